"""How likely a drafted token is accepted, given what the head thinks of it: learned while serving.

The heads' probabilities are too high, and more so the deeper the head. For each depth and each
range of the head's own probability this counts how often the target agreed, given that it had
agreed with everything before. The counts start from the head's probability itself, scaled to the
acceptance that training measured and corrected by what is learned over all depths and ranges
(log_odds.py); old outcomes fade, so they follow the workload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.log_odds import LogOdds
from vllm_specx.draft.shared_rates import SharedRates

FloatArray = npt.NDArray[np.float64]

BINS = 16
_MEMORY = 1.0 - 1.0 / 2000
"""What a cell's evidence is worth after one more outcome."""
_DOUBT, _DOUBT_UNMEASURED = 0.3, 1.5
"""Of what drafts think of themselves (LogOdds), where training has measured them and where not."""
_OFTEN = 32
"""Steps with outcomes after which the correction is learned in every eighth only."""


class DepthCalibration:
    """Maps (depth, probability) to acceptance probability.

    depth: of drafts. acceptance: measured share of accepted drafts by depth, given the one before was
        accepted (a chain of validation text); empty: the heads are believed at first. kinds: of drafts, each
        with depths of its own, one kind's below the other's.
    """

    def __init__(self, depth: int, acceptance: Sequence[float] = (), *, kinds: int = 1) -> None:
        measured = np.clip(np.array(acceptance[:depth] or [0.5], np.float64), 0.0, 1.0)[:, None]
        # A head's mean probability is near its training accuracy; 0.5 stands in for it.
        start = _middles() * np.clip(measured / 0.5, 0.1, 1.0)
        self._start = start
        self._beliefs = LogOdds(start.ravel(), _DOUBT if acceptance else _DOUBT_UNMEASURED)
        self._learned = 0
        self._cells = SharedRates(depth, start, memory=_MEMORY, kinds=kinds)
        self._usual = SharedRates(depth, measured, memory=_MEMORY, kinds=kinds)
        self._places = kinds * depth

    def table(self) -> FloatArray:
        """float64 [kinds * depth, BINS]: the acceptance probability of each cell."""
        return self._cells.rates().reshape(self._places, BINS)

    def usual(self) -> FloatArray:
        """float64 [kinds * depth]: the share of tokens that were accepted at each depth, whatever their
        probability."""
        return self._usual.rates().ravel()

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
        cells = depths * BINS + bin_of(probabilities)
        for rates, places, size in (
            (self._cells, cells, self._places * BINS),
            (self._usual, depths, self._places),
        ):
            rates.learn(
                np.bincount(places, minlength=size),
                np.bincount(places, weights=right, minlength=size),
            )
        self._learned += 1
        if self._learned <= _OFTEN or self._learned % 8 == 0:
            self._correct()

    def _correct(self) -> None:
        # Depths that were not measured in training have the beliefs of the last one that was.
        last = len(self._start) - 1
        self._beliefs.learn(
            *(
                np.concatenate([counts[:last], counts[last:].sum(0)[None]]).ravel()
                for counts in (self._cells.trials.sum(0), self._cells.successes.sum(0))
            )
        )
        self._cells.begin_with(self._beliefs.corrected().reshape(self._start.shape))


def bin_of(probabilities: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """The range that each probability falls into; the ranges are finer near 0 and 1."""
    p = np.clip(probabilities.astype(np.float64), 1e-6, 1.0 - 1e-6)
    scaled = (np.log(p / (1.0 - p)) + 4.0) * (BINS / 8.0)
    return np.clip(scaled, 0, BINS - 1).astype(np.intp)


def _middles() -> FloatArray:
    odds = (np.arange(BINS) + 0.5) * (8.0 / BINS) - 4.0
    middles: FloatArray = 1.0 / (1.0 + np.exp(-odds))
    return middles
