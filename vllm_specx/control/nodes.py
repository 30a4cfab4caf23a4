"""How many nodes of draft trees are verified, and how deep they are drafted: a node's probability to be
accepted against what it costs.

As K is chosen (choice.py): the nodes of a batch by falling probability, every number of them weighed by
goodput, 0 included. A tree that is worth no more than a chain is one: its best nodes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Times = Callable[[int, int], FloatArray]
"""(N, draft steps) -> seconds [N + 1] of steps that verify 0, 1, ... N nodes in all, after so many steps
of the draft."""


class Sizes(NamedTuple):
    """nodes: int64 [B], of each tree. which: the shape they are of. goodput: tokens per second."""

    nodes: IntArray
    which: int
    goodput: float


def best_sizes(
    gains: Sequence[FloatArray],
    draft_steps: Sequence[int],
    limits: IntArray,
    times: Sequence[Times],
    nothing: float,
) -> Sizes:
    """The best of several shapes of trees, such as those of each depth, chains among them.

    gains: of each shape [B, N], falling, the probability that each node is accepted. draft_steps, times: of
    each shape. limits: int [B], the most nodes. nothing: seconds of a step without drafts, whose shape is -1.
    """
    size = len(limits)
    best = Sizes(np.zeros(size, np.int64), -1, size / nothing)
    for which, (gain, steps, seconds) in enumerate(zip(gains, draft_steps, times, strict=True)):
        width = gain.shape[1]
        places = np.flatnonzero((np.arange(width) < limits[:, None]) & (gain > 0.0))
        values = gain.ravel()[places]
        order = np.argsort(-values, kind="stable")
        made = size + np.concatenate([[0.0], np.cumsum(values[order])])
        goodput = made / seconds(len(order), steps)
        count = int(goodput.argmax())
        if goodput[count] > best.goodput:
            nodes = np.bincount(places[order[:count]] // width, minlength=size)
            best = Sizes(nodes.astype(np.int64), which, float(goodput[count]))
    return best
