"""The n-grams that lookahead decoding made for one request, by their first token.

The n-gram pool of arXiv 2402.02057 (section 3.2): what to verify next are the n-grams that start with the last
committed token, at most W of them, the latest made (section 3.3: G = W).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.tree import IntArray

FIRST_TOKENS = 2048
"""Of as many the n-grams are kept, those used last."""


class Guesses(NamedTuple):
    """A trie of n nodes, parents first. tokens, parents: int32, as DraftTree's. depths: int64, from 0.
    shares: float32, of the n-grams that come to a node's parent those that go on with it."""

    tokens: IntArray
    parents: IntArray
    depths: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float32]


class GuessPool:
    """each: n-grams that are kept of one first token."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._after: dict[int, dict[tuple[int, ...], int]] = {}

    def __len__(self) -> int:
        """N-grams held."""
        return sum(map(len, self._after.values()))

    def add(self, ngrams: IntArray) -> None:
        """int32 [n, N]; one that comes again counts the more."""
        for first, *rest in ngrams.tolist():
            known = self._after.pop(first, {})
            words = tuple(rest)
            known[words] = known.pop(words, 0) + 1
            if len(known) > self._each:
                del known[next(iter(known))]
            self._after[first] = known
        while len(self._after) > FIRST_TOKENS:
            del self._after[next(iter(self._after))]

    def after(self, last: int, branching: int) -> Guesses | None:
        """What may follow the last committed token; of a node at most `branching` children, those that most
        n-grams have. None: nothing is known."""
        known = self._after.get(last)
        if not known:
            return None
        tokens: list[int] = []
        parents: list[int] = []
        shares: list[float] = []

        def grow(parent: int, depth: int, words: Iterable[tuple[tuple[int, ...], int]]) -> None:
            below: dict[int, list[tuple[tuple[int, ...], int]]] = {}
            for word, times in words:
                if depth < len(word):
                    below.setdefault(word[depth], []).append((word, times))
            weights = {t: sum(times for _, times in group) for t, group in below.items()}
            total = sum(weights.values())
            # Sorting is stable: among equals what was made last is first.
            for token in sorted(below, key=lambda t: -weights[t])[:branching]:
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
                shares.append(weights[token] / total)
                grow(node, depth + 1, below[token])

        depths: list[int] = []
        grow(-1, 0, reversed(known.items()))
        return Guesses(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(depths, np.int64),
            np.array(shares, np.float32),
        )
