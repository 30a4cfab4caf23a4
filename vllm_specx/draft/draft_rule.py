"""By what a draft's length is decided: thresholds as configured, or costs."""

from __future__ import annotations

from vllm_specx.draft.depth_calibration import DepthCalibration


class DraftRule:
    """calibration: of the draft's confidence. min_probability, token_cost: as configured (MedusaConfig,
    EagleConfig); where neither is, and step times are known, by goodput."""

    def __init__(
        self,
        calibration: DepthCalibration,
        *,
        min_probability: float | None,
        token_cost: float | None,
        on_cpu: bool,
    ) -> None:
        self._calibration = calibration
        self._min_probability = min_probability
        self._token_cost = token_cost
        self._default_cost = 0.05 if on_cpu else 0.01
        self.by_goodput = min_probability is None and token_cost is None
