"""Our schedulers for speculators on the device, which draft exactly as many tokens as they are told to."""

from __future__ import annotations

from typing import Any

from vllm_specx import config
from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostPrior
from vllm_specx.engine import scheduler
from vllm_specx.engine.steering import Steering, weight_bytes
from vllm_specx.engine.translate import SELECTED

DRAFT_SHARE = 0.02
"""Of a target's step, what a token of draft heads takes until it is measured: they answer together."""


class DeviceSteering(Steering):
    """K of each step is chosen before drafting; K=0 runs no draft step at all.

    With asynchronous scheduling what is known of acceptance is a step or more old; the controller's
    hysteresis and its limit of changes hold as ever.
    """

    def __init__(
        self, settings: Any, *, max_k: int, max_requests: int, prior: CostPrior, **kwargs: Any
    ):
        super().__init__(
            settings,
            self_paced=False,
            max_k=max_k,
            max_requests=max_requests,
            prior=prior,
            **kwargs,
        )
        self.controller.close()
        self.controller = Controller(
            settings,
            max_k,
            max_requests=max_requests,
            prior=prior,
            varying=False,
            least_draft_steps=0,
        )


class _OnDevice:
    """Before one of our schedulers."""

    _steering: Steering | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._steering is None:
            return
        self._steering.close()
        vllm: Any = self.vllm_config  # type: ignore[attr-defined]
        settings = config.parse(vllm.additional_config[SELECTED])
        self._steering = DeviceSteering(
            settings.controller,
            method=vllm.speculative_config.method,
            max_k=vllm.num_speculative_tokens,
            max_requests=vllm.scheduler_config.max_num_seqs,
            asynchronous=bool(vllm.scheduler_config.async_scheduling),
            prior=CostPrior.from_model(
                weight_bytes(vllm.model_config.model),
                vllm.device_config.device_type != "cpu",
                draft_share=0.0 if settings.proposer == "ngram" else DRAFT_SHARE,
            ),
        )


class SpecxV2Scheduler(_OnDevice, scheduler.SpecxScheduler):
    """For synchronous scheduling."""


class SpecxV2AsyncScheduler(_OnDevice, scheduler.SpecxAsyncScheduler):
    """For asynchronous scheduling: all requests draft the largest K, and each verifies its own."""
