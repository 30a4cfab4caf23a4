"""Of the candidates of a batch of trees, the nodes that are most likely accepted, in an order to be cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.tree import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trees:
    """B trees of at most N nodes, each in descending order of reach, parents before their children.

    tokens, parents, depths: int32 [B, N]; depths are 0 for children of the last committed token.
    probabilities: float32 [B, N], what the draft says of each token given those above it.
    reach: float64 [B, N], the probability that a node is accepted with all above it; 0 beyond `made`.
    made: int32 [B], nodes of each tree.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    probabilities: npt.NDArray[np.float32]
    reach: FloatArray
    made: IntArray


def best_nodes(
    tokens: IntArray,
    parents: IntArray,
    depths: IntArray,
    probabilities: npt.NDArray[np.float32],
    reach: FloatArray,
    nodes: int,
) -> Trees:
    """The `nodes` candidates of most reach: EAGLE-2's re-ranking (arXiv 2406.16858, 4.2).

    All are [B, M], of M candidates, parents before children; depths may be [M]. A child's reach is at
    most its parent's; a reach of 0 is no candidate. Among equals the earlier candidate is first, so a
    node never comes before its parent.
    """
    batch, size = reach.shape
    nodes = min(nodes, size)
    order = np.argsort(-reach, axis=1, kind="stable")[:, :nodes]
    rows = np.arange(batch)[:, None]
    # One place more: where the parents of the first tokens, -1, are looked up.
    place = np.full((batch, size + 1), -1, np.int32)
    place[rows, order] = np.arange(nodes, dtype=np.int32)
    kept = reach[rows, order]
    return Trees(
        tokens[rows, order],
        place[rows, parents[rows, order]],
        np.broadcast_to(depths, reach.shape)[rows, order].astype(np.int32),
        probabilities[rows, order],
        kept,
        (kept > 0.0).sum(1).astype(np.int32),
    )


def parallel_candidates(
    acceptance: FloatArray, nodes: int
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Candidates among which are the `nodes` most probable ones, where the tokens of a depth do not depend on
    the path (Medusa, arXiv 2401.10774).

    acceptance: [B, depth, k], of each depth's tokens. Returns parents and ranks int32
    [B, M], depths int32 [M], reach [B, M]. Of each depth only the `nodes` best have children: each has at
    least itself before its child.
    """
    batch, depth, width = acceptance.shape
    above = np.full((batch, 1), -1, np.int32)
    reached: FloatArray = np.ones((batch, 1))
    rows = np.arange(batch)[:, None]
    parts: list[tuple[IntArray, IntArray, FloatArray]] = []
    before = 0
    for d in range(depth):
        reach = (reached[:, :, None] * acceptance[:, None, d]).reshape(batch, -1)
        parents = np.repeat(above, width, axis=1)
        ranks = np.tile(np.arange(width, dtype=np.int32), (batch, above.shape[1]))
        parts.append((parents, ranks, reach))
        best = np.argsort(-reach, axis=1, kind="stable")[:, :nodes]
        above = (before + best).astype(np.int32)
        reached = reach[rows, best]
        before += reach.shape[1]
    depths = np.repeat(np.arange(depth, dtype=np.int32), [part[2].shape[1] for part in parts])
    return (
        np.concatenate([part[0] for part in parts], 1),
        np.concatenate([part[1] for part in parts], 1),
        depths,
        np.concatenate([part[2] for part in parts], 1),
    )


def fixed_reach(
    acceptance: FloatArray, depths: IntArray, ranks: IntArray, parents: IntArray
) -> FloatArray:
    """[B, n], the reach of the nodes of a fixed tree (best_first.fixed_tree), parents first; acceptance as in
    parallel_candidates()."""
    reach = acceptance[:, depths, ranks].copy()
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            reach[:, node] *= reach[:, parent]
    return reach
