"""Which nodes a draft of limited size should have: those most likely to be accepted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.tree import IntArray

FloatArray = npt.NDArray[np.float64]


def chain_length(acceptance: FloatArray, token_cost: float) -> npt.NDArray[np.intp]:
    """acceptance [B, depth], of each token given those before it -> the length [B] that makes the
    most tokens per unit of time, when verifying one more token costs token_cost plain steps."""
    reached = np.cumprod(acceptance, axis=1)
    tokens = 1.0 + np.cumsum(reached, axis=1)
    cost = 1.0 + token_cost * np.arange(1, acceptance.shape[1] + 1)
    goodput = np.concatenate([np.ones((len(acceptance), 1)), tokens / cost], axis=1)
    best: npt.NDArray[np.intp] = goodput.argmax(axis=1)
    return best


def parallel_tree(
    acceptance: FloatArray, nodes: int, floor: float = 0.0
) -> tuple[IntArray, IntArray, IntArray]:
    """The `nodes` most probable nodes when the candidates of a depth do not depend on the path.

    acceptance: [depth, k], of each depth's candidates in descending order.
    floor: nodes less probable than this are left out.
    Returns depths, ranks and parents, int32 [n] each, in descending order of probability, so
    parents stand before their children and the best child first.
    """
    depth, width = acceptance.shape
    depths: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    # Entries: (-probability, order, parent, depth, rank, probability of the parent).
    heap = [(-float(acceptance[0, 0]), 0, -1, 0, 0, 1.0)] if depth and width else []
    pushed = 1
    while heap and len(depths) < nodes:
        negative, _, parent, d, rank, above = heapq.heappop(heap)
        if -negative < floor:
            break
        node = len(depths)
        depths.append(d)
        ranks.append(rank)
        parents.append(parent)
        if rank + 1 < width:
            value = above * float(acceptance[d, rank + 1])
            heapq.heappush(heap, (-value, pushed, parent, d, rank + 1, above))
            pushed += 1
        if d + 1 < depth:
            value = -negative * float(acceptance[d + 1, 0])
            heapq.heappush(heap, (-value, pushed, node, d + 1, 0, -negative))
            pushed += 1
    return np.array(depths, np.int32), np.array(ranks, np.int32), np.array(parents, np.int32)


def fixed_tree(choices: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray, IntArray]:
    """Depths, ranks and parents of `medusa_choices`, parents first and the best child first."""
    paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    place = {path: i for i, path in enumerate(paths)}
    parents = [place[path[:-1]] if len(path) > 1 else -1 for path in paths]
    return (
        np.array([len(path) - 1 for path in paths], np.int32),
        np.array([path[-1] for path in paths], np.int32),
        np.array(parents, np.int32),
    )
