"""Our schedulers for speculators on the device, which draft exactly as many tokens as they are told to.

With asynchronous scheduling what is known of acceptance is a step or more old; the controller's
hysteresis and its limit of changes hold as ever.
"""

from __future__ import annotations

from typing import ClassVar

from vllm_specx.engine import scheduler


class SpecxV2Scheduler(scheduler.SpecxScheduler):
    """For synchronous scheduling."""

    on_device: ClassVar[bool] = True


class SpecxV2AsyncScheduler(scheduler.SpecxAsyncScheduler):
    """For asynchronous scheduling: all requests draft the largest K, and each verifies its own."""

    on_device: ClassVar[bool] = True
