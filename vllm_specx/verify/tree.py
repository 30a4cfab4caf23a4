"""Verifying a draft tree in one forward of the target: which rows see which, and what is accepted.

Row 0 is the last committed token, row 1 + j is node j. A row sees the committed context, the rows above
it and itself (SpecInfer, arXiv 2305.09781, section 4; Medusa, 2401.10774, section 2.3).

The children of a node are fixed before the target is asked, so nothing has to be rejected by chance: a
token is drawn from the target's own distribution after a node, and where a child is that token, the walk goes
on there (2305.09781, section 4.3, of drafts that are certain of their tokens). Each token is drawn as
without drafts, hence has that distribution, and with the same random numbers it is the same token. Greedy
decoding draws the most probable one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.tree import DraftTree, IntArray

Mask = npt.NDArray[np.bool_]


def visible(parents: IntArray) -> Mask:
    """bool [n + 1, n + 1]: which rows each row sees, itself among them."""
    size = len(parents) + 1
    mask = np.zeros((size, size), np.bool_)
    mask[0, 0] = True
    for j, parent in enumerate(parents.tolist()):
        mask[j + 1] = mask[parent + 1]
        mask[j + 1, j + 1] = True
    return mask


def children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """(node, or -1 for the last committed token, and a token) -> the child with that token; of twins the
    first."""
    found: dict[tuple[int, int], int] = {}
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    for j, pair in enumerate(pairs):
        found.setdefault(pair, j)
    return found


def walk(tree: DraftTree, draw: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """What a step commits, and the nodes that were accepted: one token more than nodes.

    draw: a token of the target's distribution after a node, -1 for the last committed token; asked
        once for each accepted node and once before.
    """
    below = children(tree)
    tokens: list[int] = []
    path: list[int] = []
    node = -1
    while True:
        tokens.append(draw(node))
        child = below.get((node, tokens[-1]))
        if child is None:
            return tokens, path
        path.append(child)
        node = child


def kept_rows(path: Sequence[int], size: int) -> npt.NDArray[np.int64]:
    """int64 [size]: an order of a tree's rows in which the last committed token and the accepted nodes are
    the first, as those of an accepted chain are. size: rows, n + 1."""
    first = [0, *(node + 1 for node in path)]
    rest = np.ones(size, np.bool_)
    rest[first] = False
    return np.concatenate([np.array(first, np.int64), np.flatnonzero(rest)])
