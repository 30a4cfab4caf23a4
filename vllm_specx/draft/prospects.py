"""What a draft will bring, before it is made: from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MEMORY = 0.95
"""What a request's evidence is worth after one more draft."""
_MEMORY_OF_ALL = 0.998
_PRIOR = 4.0
"""Drafts that what is known of all requests is worth beside a request's own."""


class Prospects:
    """By depth, given the depth before, per request and over all: is a token that was asked for made,
    and is it made and accepted?

    The second is not the first times an acceptance rate: a draft that ends early does so where it
    would have been wrong.

    depth: tokens of a draft at most. acceptance: as measured in training, to begin with; missing
        depths are taken to be as good as the last one known.
    """

    def __init__(self, depth: int, acceptance: Sequence[float] = ()) -> None:
        known = [min(max(a, 0.02), 0.98) for a in acceptance[:depth]] or [0.5]
        start: FloatArray = np.array(known + [known[-1]] * (depth - len(known)), np.float64)
        self.depth = depth
        # [made or accepted, trials and successes, depth].
        self._all: FloatArray = np.full((2, 2, depth), 10.0)
        self._all[1, 1] *= start
        self._own: dict[str, FloatArray] = {}

    def reach(self, requests: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Two of float64 [B, depth]: the probabilities that a draft that is asked for down to each depth
        gets there, and that all of it is accepted down to there."""
        rates = self._all[:, 1] / self._all[:, 0]
        found = np.broadcast_to(rates, (len(requests), *rates.shape)).copy()
        for i, request in enumerate(requests):
            if (own := self._own.get(request)) is not None:
                found[i] = (own[:, 1] + _PRIOR * rates) / (own[:, 0] + _PRIOR)
        reached: FloatArray = np.cumprod(found, axis=2, dtype=np.float64)
        return reached[:, 0], reached[:, 1]

    def learn(self, request: str, asked: int, made: int, accepted: int, failed: bool) -> None:
        """One draft's outcome: `made` of `asked` tokens, of which `accepted` in a row were right.

        failed: the token after these was wrong, or not made though asked for; if not, it was not tried.
        """
        own = self._own.setdefault(request, np.zeros((2, 2, self.depth)))
        good = made, accepted
        tried = min(made + 1, asked), min(accepted + failed, asked)
        for counts, memory in ((own, _MEMORY), (self._all, _MEMORY_OF_ALL)):
            for kind in (0, 1):
                # Only what has new evidence is forgotten.
                counts[kind, :, : tried[kind]] *= memory
                counts[kind, 0, : tried[kind]] += 1.0
                counts[kind, 1, : good[kind]] += 1.0

    def forget(self, requests: Sequence[str]) -> None:
        """Requests that have ended."""
        for request in requests:
            self._own.pop(request, None)
