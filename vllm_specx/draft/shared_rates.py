"""Rates by depth that are learned together: a depth that was seldom reached is taken to be like the one above."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_PRIOR = 10.0
"""Outcomes that the start is worth."""


class SharedRates:
    """Of successes at each depth of a draft, given the depth before, for each of some cells.

    depth: of drafts. start: float64 [known >= 1, cells], rates to begin with; further depths begin with what
        the depth above has come to, so that a draft which is all but always right is soon expected to be right
        far down. memory: what the evidence of a cell is worth after one more outcome. kinds: of drafts, with
        rates of their own.
    """

    def __init__(self, depth: int, start: FloatArray, *, memory: float, kinds: int = 1) -> None:
        self._start = start[:depth]
        self._memory = memory
        shape = (kinds, depth, start.shape[1])
        self.trials: FloatArray = np.zeros(shape)
        """[kinds, depth, cells], as far as they are remembered."""
        self.successes: FloatArray = np.zeros(shape)
        self._rates: FloatArray | None = None

    def rates(self) -> FloatArray:
        """float64 [kinds, depth, cells]."""
        if self._rates is None:
            rates: FloatArray = np.empty_like(self.trials)
            for d in range(rates.shape[1]):
                start = self._start[d] if d < len(self._start) else rates[:, d - 1]
                successes = self.successes[:, d] + _PRIOR * start
                rates[:, d] = successes / (self.trials[:, d] + _PRIOR)
            self._rates = rates
        return self._rates

    def begin_with(self, start: FloatArray) -> None:
        """Another start, of the shape of the first."""
        self._start, self._rates = start, None

    def learn(self, trials: npt.ArrayLike, successes: npt.ArrayLike) -> None:
        """Counts of outcomes, of as many values as rates() both."""
        new = np.reshape(np.asarray(trials, np.float64), self.trials.shape)
        kept = self._memory**new
        self.trials = self.trials * kept + new
        self.successes *= kept
        self.successes += np.reshape(np.asarray(successes, np.float64), new.shape)
        self._rates = None
