"""Rates by depth that are learned together: a depth that was seldom reached is taken to be like the one above."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_PRIOR = 10.0
"""Outcomes that the start is worth."""
_UNKNOWN = 0.5


class SharedRates:
    """Of successes at each depth of a draft, given the depth before.

    depth: of drafts. start: rates to begin with; depths without one begin with what the depth above has
        come to, so that a draft which is all but always right is soon expected to be right far down.
    kinds: of drafts, with rates of their own.
    """

    def __init__(self, depth: int, start: Sequence[float] = (), *, kinds: int = 1) -> None:
        self._start = [min(max(rate, 0.0), 1.0) for rate in start[:depth]] or [_UNKNOWN]
        # [trials or successes, kind, depth]
        self._counts: FloatArray = np.zeros((2, kinds, depth))

    def rates(self) -> FloatArray:
        """float64 [kinds, depth]."""
        trials, successes = self._counts
        rates: FloatArray = np.empty_like(trials)
        above: float | FloatArray = _UNKNOWN
        for d in range(trials.shape[1]):
            start = self._start[d] if d < len(self._start) else above
            rates[:, d] = above = (successes[:, d] + _PRIOR * start) / (trials[:, d] + _PRIOR)
        return rates

    def learn(self, trials: npt.ArrayLike, successes: npt.ArrayLike, memory: float) -> None:
        """Outcomes, [kinds * depth] both. memory: what the evidence of a depth is worth after one more."""
        new = np.reshape(np.asarray(trials, np.float64), self._counts.shape[1:])
        self._counts *= memory**new
        self._counts[0] += new
        self._counts[1] += np.reshape(np.asarray(successes, np.float64), new.shape)
