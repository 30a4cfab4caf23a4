"""How many tokens of a draft will be accepted, before it is made: from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.tree import IntArray

FloatArray = npt.NDArray[np.float64]

_MEMORY = 0.95
"""What a request's evidence is worth after one more draft."""
_MEMORY_OF_ALL = 0.998
_PRIOR = 4.0
"""Drafts that what is known of all requests is worth beside a request's own."""


class Prospects:
    """Acceptance by depth, given that all before was accepted, per request and over all.

    depth: tokens of a draft at most. acceptance: as measured in training, to begin with; missing
        depths are taken to be as good as the last one known.
    """

    def __init__(self, depth: int, acceptance: Sequence[float] = ()) -> None:
        known = [min(max(a, 0.02), 0.98) for a in acceptance[:depth]] or [0.5]
        start = np.array(known + [known[-1]] * (depth - len(known)))
        self.depth = depth
        # [2, depth]: trials, successes.
        self._all: FloatArray = 10.0 * np.stack([np.ones(depth), start])
        self._own: dict[str, FloatArray] = {}

    def reach(self, requests: Sequence[str]) -> FloatArray:
        """float64 [B, depth]: the probability that all tokens down to each depth are accepted."""
        rates = self._all[1] / self._all[0]
        found = np.tile(rates, (len(requests), 1))
        for i, request in enumerate(requests):
            if (own := self._own.get(request)) is not None:
                found[i] = (own[1] + _PRIOR * rates) / (own[0] + _PRIOR)
        reached: FloatArray = np.cumprod(found, axis=1)
        return reached

    def learn(self, request: str, drafted: int, accepted: int) -> None:
        """One draft's outcome: `accepted` of `drafted` tokens, in a row from the first."""
        tried = min(accepted + 1, drafted, self.depth)
        if tried == 0:
            return
        own = self._own.setdefault(request, np.zeros((2, self.depth)))
        for counts, memory in ((own, _MEMORY), (self._all, _MEMORY_OF_ALL)):
            # Only what has new evidence is forgotten.
            counts[:, :tried] *= memory
            counts[0, :tried] += 1.0
            counts[1, : min(accepted, tried)] += 1.0

    def forget(self, requests: Sequence[str]) -> None:
        """Requests that have ended."""
        for request in requests:
            self._own.pop(request, None)


def accepted_of(draft: IntArray, sampled: Sequence[int]) -> int:
    """How many tokens of a chain the step after it has committed."""
    for i, (guess, truth) in enumerate(zip(draft.tolist(), sampled, strict=False)):
        if guess != truth:
            return i
    return min(len(draft), len(sampled))
