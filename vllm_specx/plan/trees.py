"""Draft trees in a simulation: which nodes they have, and how deep one is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.best_first import parallel_tree
from vllm_specx.plan.scenario import Work

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def rank_table(work: Work, depth: int, branching: int) -> FloatArray:
    """[depth, branching]: how often each child of an accepted node is right, the likeliest first."""
    table = np.zeros((depth, branching))
    for d in range(depth):
        table[d, 0] = work.acceptance[min(d, len(work.acceptance) - 1)]
        if work.siblings and branching > 1:
            others = work.siblings[min(d, len(work.siblings) - 1)][: branching - 1]
            table[d, 1 : 1 + len(others)] = others
    return table


class Shape:
    """The best nodes of one kind of work, best first; any number of them is the best tree of its size.

    gains: float64 [N], the probability that each node is accepted.
    """

    def __init__(self, table: FloatArray, nodes: int) -> None:
        depths, ranks, parents = parallel_tree(table, nodes, floor=1e-6)
        self._bounds = np.cumsum(table, axis=1).tolist()
        self.depths: list[int] = depths.tolist()
        self._child: dict[tuple[int, int], int] = {
            (parent, rank): node
            for node, (parent, rank) in enumerate(
                zip(parents.tolist(), ranks.tolist(), strict=True)
            )
        }
        gains: list[float] = []
        for d, rank, parent in zip(depths.tolist(), ranks.tolist(), parents.tolist(), strict=True):
            gains.append((gains[parent] if parent >= 0 else 1.0) * float(table[d, rank]))
        self.gains: FloatArray = np.array(gains)

    def deepest(self, nodes: int) -> int:
        """Tokens of the longest path of the first `nodes` nodes."""
        return max((d + 1 for d in self.depths[:nodes]), default=0)

    def accepted(self, nodes: int, draws: Sequence[float]) -> int:
        """Tokens that are accepted of a tree of `nodes` nodes; draws: one uniform number a depth."""
        node, depth = -1, 0
        for bounds, draw in zip(self._bounds, draws, strict=False):
            rank = next((r for r, bound in enumerate(bounds) if draw < bound), -1)
            node = self._child.get((node, rank), -2) if rank >= 0 else -2
            if not 0 <= node < nodes:
                break
            depth += 1
        return depth
