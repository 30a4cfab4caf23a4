"""What a forward of the draft takes, where the worker times it."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

_RECENT = 15


class DraftTime:
    """By the number of requests: medians of the latest steps, so that single slow ones do not count.

    requests: float64 [n], rising, the batches that are told apart; those between lie between their times.
    """

    def __init__(self, requests: npt.NDArray[np.float64]) -> None:
        self._requests = requests
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        # What at() has said since.
        self._at: dict[float, float] = {}

    def learn(self, row: int, seconds: float) -> None:
        """One step with about requests[row] requests: seconds of one forward."""
        recent = self._recent.setdefault(row, deque(maxlen=_RECENT))
        recent.append(seconds)
        self._medians[row] = sorted(recent)[len(recent) // 2]
        self._at.clear()

    def at(self, requests: float) -> float | None:
        """Seconds of one forward; None: none was timed yet."""
        if not self._medians:
            return None
        seconds = self._at.get(requests)
        if seconds is None:
            rows = sorted(self._medians)
            medians = [self._medians[row] for row in rows]
            seconds = self._at[requests] = float(np.interp(requests, self._requests[rows], medians))
        return seconds
