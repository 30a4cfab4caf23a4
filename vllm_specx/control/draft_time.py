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
        self._known: tuple[list[float], list[float]] = ([], [])

    def learn(self, row: int, seconds: float) -> None:
        """One step with about requests[row] requests: seconds of one forward."""
        recent = self._recent.setdefault(row, deque(maxlen=_RECENT))
        recent.append(seconds)
        rows = sorted(self._recent)
        medians = [sorted(self._recent[each])[len(self._recent[each]) // 2] for each in rows]
        self._known = self._requests[rows].tolist(), medians

    def at(self, requests: float) -> float | None:
        """Seconds of one forward; None: none was timed yet."""
        batches, seconds = self._known
        return float(np.interp(requests, batches, seconds)) if batches else None
