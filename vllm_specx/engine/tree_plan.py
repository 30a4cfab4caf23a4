"""Which rows of a step's forward are draft trees: made once the runner's inputs are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.tree import DraftTree
from vllm_specx.verify.tree import kept_rows, visible

Longs = npt.NDArray[np.int64]
COLUMNS = 8
"""Of a tree in TreePlan.packed, int32: first, rows, context, request, rows of the trees before it, and where
its mask begins among the masks. Two are left over, so that the masks begin at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A tree in a step. request: its place in the batch. row: of the last committed token in the
    forward; its nodes follow. logits_row: of that token among the rows that have logits."""

    request: int
    tree: DraftTree
    row: int
    logits_row: int

    @property
    def size(self) -> int:
        """Rows: the last committed token's and the nodes'."""
        return len(self.tree.tokens) + 1


@dataclass(slots=True)
class TreePlan:
    """All trees of a step, in the batch's order; at least one.

    first, rows, context, request: int64 [trees], see tree_native.tree_rows. visible: uint8, one mask
    after the other. whole: whether there are no other rows. order: which rows of all trees, int64.
    paths: the accepted nodes of each tree, once they are known.
    """

    trees: list[TreeRows]
    first: Longs
    rows: Longs
    context: Longs
    request: Longs
    visible: npt.NDArray[np.uint8]
    whole: bool
    order: Longs
    paths: list[list[int]] = field(default_factory=list)

    def masks(self) -> list[torch.Tensor]:
        """bool [rows, rows] of each tree."""
        ends = np.cumsum(self.rows**2)
        return [
            torch.from_numpy(self.visible[end - size**2 : end].reshape(size, size).astype(np.bool_))
            for end, size in zip(ends.tolist(), self.rows.tolist(), strict=True)
        ]

    def packed(self) -> npt.NDArray[np.uint8]:
        """What a kernel on a device has to know, to be copied at once: the trees, int32 [trees, COLUMNS],
        then `visible`."""
        trees = np.zeros((len(self.rows), COLUMNS), np.int32)
        square = self.rows**2
        before = (np.cumsum(self.rows) - self.rows, np.cumsum(square) - square)
        columns = (self.first, self.rows, self.context, self.request, *before)
        for column, values in enumerate(columns):
            trees[:, column] = values
        return np.concatenate((trees.view(np.uint8).ravel(), self.visible))

    def moves(self) -> tuple[Longs, Longs]:
        """The accepted nodes that are not where those of a chain would be: their rows, as places in `order`,
        and the rows of the forward whose slots in the cache are theirs."""
        source: list[int] = []
        target: list[int] = []
        begin = 0
        for tree, path in zip(self.trees, self.paths, strict=True):
            for depth, node in enumerate(path):
                if node != depth:
                    source.append(begin + 1 + node)
                    target.append(tree.row + 1 + depth)
            begin += tree.size
        return np.array(source, np.int64), np.array(target, np.int64)

    def kept(self, total: int, logits: bool) -> Longs | None:
        """int64 [total], an order of the forward's rows (or of those that have logits) in which each
        tree's accepted rows are first, as those of an accepted chain are; None: they are so already."""
        order: Longs | None = None
        for tree, path in zip(self.trees, self.paths, strict=True):
            if path == list(range(len(path))):
                continue
            if order is None:
                order = np.arange(total, dtype=np.int64)
            begin = tree.logits_row if logits else tree.row
            order[begin : begin + tree.size] = begin + kept_rows(path, tree.size)
        return order


def plan_step(
    drafted: Mapping[str, DraftTree],
    scheduled: Mapping[str, Sequence[int]],
    request_index: Mapping[str, int],
    num_scheduled: npt.NDArray[Any],
    num_computed: npt.NDArray[Any],
    walked: Collection[str] = (),
) -> tuple[TreePlan | None, Longs, Longs]:
    """The plan, or None without a tree in the batch; and of its nodes the rows and positions, int64.

    drafted: what was drafted for each request. scheduled: vLLM's drafts in this step, a beginning of
    that; what else stands there is a chain. walked: requests whose chains are taken as trees. num_scheduled, num_computed: int [requests], in the batch's
    order.
    """
    ends = np.cumsum(num_scheduled).astype(np.int64)
    counts = np.zeros(len(ends), np.int64)
    for name, tokens in scheduled.items():
        counts[request_index[name]] = len(tokens)
    logits_ends = np.cumsum(counts + 1)
    found: list[TreeRows] = []
    for name, tokens in scheduled.items():
        known = drafted.get(name)
        if known is None or not len(tokens):
            continue
        tree = known.prefix(len(tokens))
        if (tree.is_chain and name not in walked) or tree.tokens.tolist() != list(tokens):
            continue
        i, size = request_index[name], len(tokens) + 1
        found.append(TreeRows(i, tree, int(ends[i]) - size, int(logits_ends[i]) - size))
    empty = np.zeros(0, np.int64)
    if not found:
        return None, empty, empty
    found.sort(key=lambda tree: tree.request)
    request = np.array([tree.request for tree in found], np.int64)
    rows = np.array([tree.size for tree in found], np.int64)
    first = np.array([tree.row for tree in found], np.int64)
    context = (num_computed[request] + num_scheduled[request]).astype(np.int64) - rows
    plan = TreePlan(
        found,
        first,
        rows,
        context,
        request,
        np.concatenate([visible(tree.tree.parents).ravel() for tree in found]).view(np.uint8),
        bool(rows.sum() == ends[-1]),
        np.concatenate([np.arange(tree.row, tree.row + tree.size) for tree in found]),
    )
    nodes = np.concatenate([np.arange(tree.row + 1, tree.row + tree.size) for tree in found])
    positions = [
        before + tree.tree.depths() for before, tree in zip(context.tolist(), found, strict=True)
    ]
    return plan, nodes, np.concatenate(positions)
