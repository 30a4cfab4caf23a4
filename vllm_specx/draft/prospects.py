"""What a draft will bring, before it is made: from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.shared_rates import SharedRates

FloatArray = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_MEMORY = 0.95
"""What a request's evidence is worth after one more draft."""
_MEMORY_OF_ALL = 0.998
_PRIOR = 6.0
"""Drafts that what is known of all requests is worth beside a request's own."""


class Prospects:
    """By depth, given the depth before, per request and over all: is a token that was asked for made,
    and is it made and accepted?

    The second is not the first times an acceptance rate: a draft that ends early does so where it
    would have been wrong.

    depth: tokens of a draft at most. acceptance: as measured in training, to begin with; missing
        depths are taken to be as good as the one above.
    """

    def __init__(self, depth: int, acceptance: Sequence[float] = ()) -> None:
        self.depth = depth
        # Whether a token was made, and whether it was made and accepted.
        start = np.array([*acceptance[:depth]] or [0.5], np.float64)[:, None]
        self._all = tuple(
            SharedRates(depth, rates, memory=_MEMORY_OF_ALL)
            for rates in (np.ones((depth, 1)), np.clip(start, 0.0, 1.0))
        )
        # By slot; the first is of requests without evidence, and stays empty.
        self._own: FloatArray = np.zeros((8, 2, 2, depth))
        self._slots: dict[str, int] = {}
        self._free = list(range(7, 0, -1))
        self._depths = np.arange(depth)

    def reach(self, requests: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Two of float64 [B, depth]: the probabilities that a draft that is asked for down to each depth
        gets there, and that all of it is accepted down to there."""
        own = self._own[[self._slots.get(request, 0) for request in requests]]
        rates = np.concatenate([of_all.rates()[..., 0] for of_all in self._all])
        found = (own[:, :, 1] + _PRIOR * rates) / (own[:, :, 0] + _PRIOR)
        reached: FloatArray = np.cumprod(found, axis=2, dtype=np.float64)
        return reached[:, 0], reached[:, 1]

    def learn(
        self, requests: Sequence[str], asked: Counts, made: Counts, accepted: Counts, failed: Counts
    ) -> None:
        """The outcomes of one draft each: `made` of `asked` tokens, of which `accepted` in a row were
        right; int [n] all.

        failed: 1 if the token after these was wrong, or not made though asked for; 0: it was not tried.
        """
        slots = [self._slot(request) for request in requests]
        tried = np.stack([np.minimum(made + 1, asked), np.minimum(accepted + failed, asked)], 1)
        new = self._depths < tried[..., None]  # [n, made or accepted, depth]
        right = self._depths < np.stack([made, accepted], 1)[..., None]
        # Only what has new evidence is forgotten.
        own = self._own[slots] * np.where(new, _MEMORY, 1.0)[:, :, None]
        own += np.stack([new, right], 2)
        self._own[slots] = own
        for i, of_all in enumerate(self._all):
            of_all.learn(new[:, i].sum(0), right[:, i].sum(0))

    def forget(self, requests: Sequence[str]) -> None:
        """Requests that have ended."""
        for request in requests:
            if slot := self._slots.pop(request, 0):
                self._own[slot] = 0.0
                self._free.append(slot)

    def _slot(self, request: str) -> int:
        slot = self._slots.get(request, 0)
        if not slot:
            if not self._free:
                size = len(self._own)
                self._own = np.concatenate([self._own, np.zeros_like(self._own)])
                self._free = list(range(2 * size - 1, size - 1, -1))
            slot = self._slots[request] = self._free.pop()
        return slot
