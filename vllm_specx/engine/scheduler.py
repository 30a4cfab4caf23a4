"""vLLM's schedulers with control/ in them, and with what the proposers need from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specx import config
from vllm_specx.control.cost import CostPrior
from vllm_specx.engine.metrics import Meter, report_of
from vllm_specx.engine.plan import DRAFT_STEPS, WINDOW_ROWS
from vllm_specx.engine.pools import stamp_salt
from vllm_specx.engine.steering import VARYING, Steering, weight_bytes
from vllm_specx.engine.translate import SELECTED
from vllm_specx.engine.v2.captured import rungs

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")
_DRAFT_SHARE = {"ours": 0.05, "on device": 0.02, "stock": 0.1}
"""Of a target's step, what a forward of the draft takes until it is measured. On the device heads answer
together."""


class _Steered:
    """Before a Scheduler: K follows acceptance and load (steering.py), and requests tell their salt.

    A fault in choosing K is logged once and ends the choosing, never the scheduler: drafts are then
    what vLLM's own configuration says.
    """

    on_device: ClassVar[bool] = False
    """Whether speculators of ours on the device draft, exactly as many tokens as they are told to: K is
    chosen before drafting, and K=0 runs no draft step at all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steering: Steering | None = None
        self._schedule_started = 0.0
        self._meter = Meter(counting=False)
        vllm: Any = self.vllm_config  # type: ignore[attr-defined]
        raw = (vllm.additional_config or {}).get(SELECTED)
        if raw is None or vllm.speculative_config is None:
            return
        settings = config.parse(raw)
        on_gpu = vllm.device_config.device_type != "cpu"
        method = vllm.speculative_config.method
        stock = settings.proposer == "stock"
        paces_itself = not stock and not self.on_device
        looks_up = method in VARYING if stock else settings.proposer == "ngram"
        self._meter = Meter(
            counting=bool(self.log_stats),  # type: ignore[attr-defined]
            asynchronous=bool(vllm.scheduler_config.async_scheduling),
        )
        kind = "stock" if stock else "on device" if self.on_device else "ours"
        self._steering = Steering(
            settings.controller,
            method=method,
            self_paced=paces_itself,
            rests=paces_itself and not looks_up and config.drafts_by_goodput(settings),
            idle_forwards=0 if self.on_device and method == "custom_class" else None,
            most_forwards=settings.depth
            if self.on_device and isinstance(settings, config.AutoConfig)
            else None,
            rungs=rungs(settings.controller, vllm.num_speculative_tokens)
            if vllm.speculative_config.num_speculative_tokens_per_batch_size
            else (),
            max_k=vllm.num_speculative_tokens,
            max_requests=vllm.scheduler_config.max_num_seqs,
            asynchronous=bool(vllm.scheduler_config.async_scheduling),
            prior=CostPrior.from_model(
                weight_bytes(vllm.model_config.model),
                on_gpu,
                draft_share=0.0 if looks_up else _DRAFT_SHARE[kind],
            ),
            meter=self._meter,
        )
        # With a table of its own vLLM does not pad a request's first step with drafts that are
        # known to be wrong. Its values are never used, unless choosing fails: K is set below.
        if self.dynamic_sd_lookup is not None or not on_gpu:  # type: ignore[has-type]
            self.dynamic_sd_lookup = [vllm.num_speculative_tokens] * (
                vllm.scheduler_config.max_num_seqs + 1
            )

    def add_request(self, request: Any) -> None:
        stamp_salt(request)
        self._steer(lambda steering: steering.add(request), None)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._schedule_started = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        started, requests = self._schedule_started, self.requests  # type: ignore[attr-defined]
        self._steer(lambda steering: steering.scheduled(scheduler_output, requests, started), None)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self._steer(lambda steering: steering.placed(requests), None)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        drafts = draft_token_ids.draft_token_ids
        steps = getattr(draft_token_ids, DRAFT_STEPS, 0)
        report = report_of(draft_token_ids)
        seconds = None if report is None else float(report["seconds"])
        self._meter.worker(report)
        self._steer(lambda steering: steering.took(steps, seconds), None)
        windows = getattr(draft_token_ids, WINDOW_ROWS, {})
        self._steer(
            lambda steering: steering.windows(draft_token_ids.req_ids, drafts, windows), None
        )
        if self._steering is not None and self._steering.cuts:
            draft_token_ids.draft_token_ids = self._steer(
                lambda steering: steering.drafted(draft_token_ids.req_ids, drafts), drafts
            )
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        nothing: dict[str, int] = {}
        before = self._steer(lambda steering: steering.before_output(scheduler_output), nothing)
        # vLLM cuts these lists where a request ends; what was accepted beyond is no rejection.
        sampled = [tuple(tokens) for tokens in model_runner_output.sampled_token_ids]
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._steer(
            lambda steering: steering.finished_step(
                scheduler_output,
                sampled,
                model_runner_output.req_id_to_index,
                before,
            ),
            None,
        )
        steering = self._steering
        self._meter.attach(outputs, None if steering is None else steering.controller)
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self._steer(lambda steering: steering.remove(request.request_id), None)
        return freed

    def shutdown(self) -> None:
        self._steer(lambda steering: steering.close(), None)
        super().shutdown()  # type: ignore[misc]

    def _steer(self, act: Callable[[Steering], T], otherwise: T) -> T:
        if self._steering is None:
            return otherwise
        try:
            return act(self._steering)
        except Exception:
            self._steering = None
            self._meter.controller_failed()
            logger.exception(
                "vllm_specx: choosing the draft length failed and is switched off until the engine "
                "restarts; drafts go on with the configured length."
            )
            return otherwise


class SpecxScheduler(_Steered, Scheduler):
    """For synchronous scheduling: K by request."""


class SpecxAsyncScheduler(_Steered, AsyncScheduler):
    """For asynchronous scheduling: all requests draft the largest K, and each verifies its own."""
