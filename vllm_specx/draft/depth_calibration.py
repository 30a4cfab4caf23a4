"""How likely a drafted token is accepted, given what the head thinks of it: learned while serving.

The heads' probabilities are too high, and more so the deeper the head. For each depth and each
range of the head's own probability this counts how often the target agreed, given that it had
agreed with everything before. The counts start from the head's probability itself, scaled to the
acceptance that training measured, and old outcomes fade, so they follow the workload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.shared_rates import SharedRates

FloatArray = npt.NDArray[np.float64]

BINS = 16
_PRIOR = 10.0
"""Outcomes that the start is worth, in each cell."""
_MEMORY = 2000.0
"""Outcomes that a cell remembers."""


class DepthCalibration:
    """Maps (depth, probability) to acceptance probability.

    depth: of drafts. acceptance: measured share of accepted drafts by depth, given the one before was
        accepted (a chain of validation text); empty: the heads are believed at first. kinds: of drafts, each
        with depths of its own, one kind's below the other's.
    """

    def __init__(self, depth: int, acceptance: Sequence[float] = (), *, kinds: int = 1) -> None:
        self._shared = SharedRates(depth, acceptance, kinds=kinds)
        middles = _middles()
        start = np.tile(middles, (kinds * depth, 1))
        for d, measured in enumerate(acceptance[:depth]):
            # A head's mean probability is near its training accuracy; 0.5 stands in for it.
            start[d] = middles * np.clip(measured / 0.5, 0.1, 1.0)
        self._seen: FloatArray = np.full(start.shape, _PRIOR)
        self._right: FloatArray = start * _PRIOR

    def table(self) -> FloatArray:
        """float64 [kinds * depth, BINS]: the acceptance probability of each cell."""
        rates: FloatArray = self._right / self._seen
        return rates

    def usual(self) -> FloatArray:
        """float64 [kinds * depth]: the share of tokens that were accepted at each depth, whatever their
        probability."""
        return self._shared.rates().ravel()

    def estimate(self, probabilities: npt.NDArray[np.floating]) -> FloatArray:
        """probabilities [..., depth or fewer] of the heads' tokens -> acceptance, same shape."""
        depth = np.arange(probabilities.shape[-1])
        estimated: FloatArray = self.table()[depth, bin_of(probabilities)]
        return estimated

    def learn(
        self,
        depths: npt.NDArray[np.integer],
        probabilities: npt.NDArray[np.floating],
        right: npt.NDArray[np.bool_],
    ) -> None:
        """Outcomes [n]: whether the target agreed at this depth, having agreed before it."""
        cells = (depths, bin_of(probabilities))
        np.add.at(self._seen, cells, 1.0)
        np.add.at(self._right, cells, right.astype(np.float64))
        excess = self._seen > _MEMORY
        if excess.any():
            self._right[excess] *= _MEMORY / self._seen[excess]
            self._seen[excess] = _MEMORY
        places = len(self._seen)
        self._shared.learn(
            np.bincount(depths, minlength=places),
            np.bincount(depths, weights=right, minlength=places),
            1.0 - 1.0 / _MEMORY,
        )


def bin_of(probabilities: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """The range that each probability falls into; the ranges are finer near 0 and 1."""
    p = np.clip(probabilities.astype(np.float64), 1e-6, 1.0 - 1e-6)
    scaled = (np.log(p / (1.0 - p)) + 4.0) * (BINS / 8.0)
    return np.clip(scaled, 0, BINS - 1).astype(np.intp)


def _middles() -> FloatArray:
    odds = (np.arange(BINS) + 0.5) * (8.0 / BINS) - 4.0
    middles: FloatArray = 1.0 / (1.0 + np.exp(-odds))
    return middles
