"""vLLM's scheduler with what the proposers need from it."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specx.engine.pools import stamp_salt


class SpecxScheduler(Scheduler):
    """Tells the worker of a request's cache_salt, which vLLM keeps to itself."""

    def add_request(self, request: Any) -> None:
        stamp_salt(request)
        super().add_request(request)
