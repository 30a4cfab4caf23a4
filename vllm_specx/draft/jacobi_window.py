"""The window of lookahead decoding: guesses for the places ahead that Jacobi iteration improves.

The lookahead branch of arXiv 2402.02057 (section 3.1, figure 2) as its authors' implementation lays it out
(hao-ai-lab/LookaheadDecoding, lade/decoding.py, there W and LEVEL = N): N - 1 levels of W columns, the token of
level l in column c being a guess for the place c + l after the last committed token, which is itself level 0 of
column 0. A token of level l > 0 sees what is committed, level 0 up to its own column, and its own column above
it; one of level 0 sees level 0 before it. So each sees just the path above it in a tree: level 0 is a chain of
W - 1 nodes, and from each of these, and from the last committed token, a chain of N - 2 hangs.

What the target says after the lowest level continues the columns: W new n-grams, and a new lowest level, by which
all others move up. The window moves on by one place a step whatever was committed, as theirs does (their
ALWAYS_FWD_ONE; moving on as far as was committed brought no more). Theirs starts with random tokens of the
prompt and fills its levels in the first steps; ours starts with pieces of the text, full.
"""

from __future__ import annotations

import zlib

import numpy as np

from vllm_specx.draft.tree import DraftTree, IntArray


def window_parents(window: int, ngram: int) -> IntArray:
    """int32 [window * (ngram - 1) - 1]: the parents of the window's nodes, level by level; -1: the last
    committed token."""
    first = np.arange(-1, window - 2)
    second = np.arange(-1, window - 1)
    below = np.arange(window - 1, window - 1 + window * (ngram - 3))
    parents: IntArray = np.concatenate([first, second, below]).astype(np.int32)
    return parents


class JacobiWindow:
    """Of one request. Deterministic given its text, so that all ranks have the same.

    window: columns, W >= 2. ngram: N >= 3. text: int32 [n], n > 0, what is known of the request.
    """

    def __init__(self, window: int, ngram: int, text: IntArray) -> None:
        random = np.random.default_rng(zlib.crc32(text.tobytes()))
        starts = random.integers(0, max(1, len(text) - ngram + 2), window)
        places = (starts + np.arange(ngram - 1)[:, None]) % len(text)
        # [level, column]; the place of the last committed token, [0, 0], is filled by tree().
        self._tokens: IntArray = text[places].astype(np.int32)
        self._parents = window_parents(window, ngram)

    def tree(self, last: int) -> DraftTree:
        """The rows after the last committed token; those of the lowest level, W of them, are the last."""
        self._tokens[0, 0] = last
        return DraftTree(self._tokens.ravel()[1:].copy(), self._parents)

    def update(self, said: IntArray) -> IntArray:
        """Take in what the target says after the lowest level of the last tree(), int32 [W], and move on.

        Returns the new n-grams, int32 [W, N].
        """
        whole = np.concatenate([self._tokens, said[None].astype(np.int32)])
        self._tokens = whole[1:].copy()
        ngrams: IntArray = np.ascontiguousarray(whole.T)
        return ngrams
