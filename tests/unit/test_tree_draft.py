"""Draft trees: which nodes, in which order, and how many of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support import synthetic_heads as synthetic
from tests.support.drafting import context
from tests.support.eagle_paths import paths
from tests.unit.test_medusa import EMBEDDINGS, LM_HEAD, config, parallel, sequential
from vllm_specx.draft.best_first import fixed_tree
from vllm_specx.draft.best_nodes import best_nodes, fixed_reach, parallel_candidates
from vllm_specx.draft.branches import worth_their_branches
from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.growth import Growth
from vllm_specx.draft.lengths import step_times
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.tree import DraftTree
from vllm_specx.draft.tree_limits import Limits
from vllm_specx.draft.tree_rule import TreeRule


def check_shape(tree: DraftTree) -> None:
    """A tree in topological order, with distinct siblings, the most likely nodes first."""
    assert all(-1 <= parent < i for i, parent in enumerate(tree.parents.tolist()))
    named = paths(tree)
    assert len(set(named)) == len(named)
    assert tree.reach is not None
    assert all(a >= b for a, b in itertools.pairwise(tree.reach.tolist()))
    for n in range(len(tree.tokens) + 1):
        part = tree.prefix(n)
        assert len(part.tokens) == len(part.parents) == n and part.parents.max(initial=-1) < n


def falling(draw: st.DrawFn, batch: int, depth: int, width: int) -> np.ndarray:
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).random((batch, depth, width + 1)) + 1e-3
    shares = raw / raw.sum(-1, keepdims=True)
    return -np.sort(-shares[..., :width], axis=-1)


@st.composite
def acceptances(draw: st.DrawFn) -> np.ndarray:
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    return falling(draw, *sizes)


@given(acceptances(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_most_probable_nodes_come_first(acceptance: np.ndarray, nodes: int) -> None:
    """Against all paths there are."""
    batch, depth, width = acceptance.shape
    parents, ranks, depths, reach = parallel_candidates(acceptance, nodes)
    chosen = best_nodes(ranks, parents, depths, reach.astype(np.float32), reach, nodes)
    smaller = best_nodes(
        ranks, parents, depths, reach.astype(np.float32), reach, max(nodes // 2, 1)
    )
    for b in range(batch):
        every = [
            float(np.prod([acceptance[b, d, r] for d, r in enumerate(path)]))
            for n in range(1, depth + 1)
            for path in itertools.product(range(width), repeat=n)
        ]
        made = int(chosen.made[b])
        assert made == min(nodes, len(every))
        tree = DraftTree(
            chosen.tokens[b, :made],
            chosen.parents[b, :made],
            chosen.reach[b, :made].astype(np.float32),
        )
        check_shape(tree)
        assert chosen.reach[b, :made] == pytest.approx(sorted(every, reverse=True)[:made])
        for node, path in enumerate(paths(tree)):
            product = math.prod(acceptance[b, d, r] for d, r in enumerate(path))
            assert chosen.reach[b, node] == pytest.approx(product)
            assert chosen.depths[b, node] == len(path) - 1
        few = int(smaller.made[b])
        assert smaller.tokens[b, :few].tolist() == tree.tokens[:few].tolist()
        assert smaller.parents[b, :few].tolist() == tree.parents[:few].tolist()


def test_a_fixed_tree_is_ordered_by_what_its_nodes_promise() -> None:
    choices = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    acceptance = np.array([[[0.6, 0.3], [0.5, 0.1], [0.9, 0.0]]])
    depths, ranks, parents = fixed_tree(choices)
    reach = fixed_reach(acceptance, depths, ranks, parents)
    made = best_nodes(
        np.broadcast_to(ranks, reach.shape), np.broadcast_to(parents, reach.shape), depths,
        reach.astype(np.float32), reach, 64,
    )  # fmt: skip
    tree = DraftTree(made.tokens[0], made.parents[0], made.reach[0].astype(np.float32))
    check_shape(tree)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 0, 0), (1, 0), (0, 1)]
    assert made.reach[0] == pytest.approx([0.6, 0.3, 0.3, 0.27, 0.15, 0.06])


def grown(
    logits_of: Callable[[tuple[int, ...]], torch.Tensor], depth: int, branching: int, nodes: int
) -> DraftTree:
    """One tree, whose draft is a function of the path."""
    table = DepthCalibration(depth).table()
    growth = Growth(table, 1, branching, lambda ids: ids, torch.device("cpu"))
    beam: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        added = growth.add(torch.stack([logits_of(path) for path in beam]))
        above, tokens = added.above[0].tolist(), added.tokens[0].tolist()
        beam = [(*beam[a], t) for a, t in zip(above, tokens, strict=True)]
    trees = growth.trees(nodes)
    made = int(trees.made[0])
    reach = trees.reach[0, :made].astype(np.float32)
    return DraftTree(trees.tokens[0, :made], trees.parents[0, :made], reach)


@given(st.integers(0, 2**31 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_grown_trees(seed: int, depth: int, branching: int, nodes: int) -> None:
    """Against the growth of EAGLE-2 told in dictionaries."""

    def logits_of(path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return 2.0 * torch.randn(6, generator=generator)

    tree = grown(logits_of, depth, branching, nodes)
    check_shape(tree)
    calibration = DepthCalibration(depth)
    reach: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 1.0}
    for d in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, above in beam.items():
            said = torch.softmax(logits_of(path), -1).sort(descending=True)
            estimate = calibration.estimate(
                np.array([[0.5] * d + [p] for p in said.values[:branching].tolist()])
            )[:, d]
            estimate /= max(estimate.sum(), 1.0)
            for token, share in zip(said.indices.tolist(), estimate.tolist(), strict=False):
                level[*path, token] = above * share
        reach |= level
        ranked = sorted(level.items(), key=lambda item: -item[1])
        # Which of two equals has children is not said.
        assume(len(ranked) <= branching or ranked[branching][1] < 0.999 * ranked[branching - 1][1])
        beam = dict(ranked[:branching])
    best = sorted(reach.values(), reverse=True)[:nodes]
    assert tree.reach is not None
    assert tree.reach.tolist() == pytest.approx(best, rel=1e-4)
    for path, value in zip(paths(tree), tree.reach.tolist(), strict=True):
        assert reach[path] == pytest.approx(value, rel=1e-4)


@given(st.integers(0, 2**31 - 1), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_number_of_nodes_makes_the_most_tokens_per_time(seed: int, batch: int) -> None:
    """Against all combinations."""
    rng = np.random.default_rng(seed)
    reach = -np.sort(-rng.random((batch, 4)), axis=1)
    budgets = rng.integers(0, 5, batch).astype(np.int32)
    costs = 1.0 + np.cumsum(np.concatenate([[0.0], rng.random(4 * batch) * 0.5]))
    rule = TreeRule(DepthCalibration(2), min_probability=None, token_cost=None, on_cpu=True)
    step = context(torch.zeros(batch, 1), budgets=budgets.tolist(), costs=costs)

    def goodput(sizes: tuple[int, ...]) -> float:
        gained = sum(float(reach[b, :n].sum()) for b, n in enumerate(sizes))
        return (batch + gained) / float(step_times(costs, sum(sizes)))

    best = max(
        goodput(sizes) for sizes in itertools.product(*(range(n + 1) for n in budgets.tolist()))
    )
    assert goodput(tuple(rule.sizes(reach, budgets, step).tolist())) == pytest.approx(best)


def test_where_tokens_are_dear_trees_are_chains_or_nothing(tmp_path: Path) -> None:
    drafter = MedusaDrafter(
        config(min_probability=None), parallel(tmp_path), lm_head=LM_HEAD, tree=Limits(32, 4, 3)
    )
    hidden = torch.randn(2, synthetic.HIDDEN, generator=torch.Generator().manual_seed(2))
    sizes = []
    for slope in (1e-7, 0.01, 0.1, 10.0):
        step = context(hidden, budgets=[64, 64], costs=1.0 + slope * np.arange(129))
        sizes.append(sum(len(draft.tokens) for draft in drafter.propose(step)))
    assert sizes[0] == 64 and sizes[-1] == 0
    assert sizes == sorted(sizes, reverse=True) and 0 < sizes[2] < sizes[0]


def test_sequential_trees_stop_where_deeper_nodes_promise_little(tmp_path: Path) -> None:
    heads, _ = sequential(tmp_path)
    drafter = MedusaDrafter(
        config(min_probability=None), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS,
        tree=Limits(16, 3, 3),
    )  # fmt: skip
    hidden = torch.randn(2, synthetic.HIDDEN, generator=torch.Generator().manual_seed(4))
    for cost, steps in ((1e-6, 3), (10.0, 1)):
        costs = 1.0 + 1e-4 * np.arange(64)
        drafter.propose(context(hidden, budgets=[16, 16], costs=costs, draft_cost=cost))
        assert drafter.draft_steps == steps


def test_confidence_becomes_acceptance(tmp_path: Path) -> None:
    """Heads that are sure and wrong: the tree learns it, siblings and all."""
    drafter = MedusaDrafter(
        config(), parallel(tmp_path), lm_head=4.0 * LM_HEAD, tree=Limits(8, 4, 2)
    )
    hidden = torch.randn(1, synthetic.HIDDEN, generator=torch.Generator().manual_seed(3))
    first = drafter.propose(context(hidden, budgets=[8]))[0]
    always = first.tokens[np.flatnonzero(first.parents < 0)[1]]
    table = np.full((1, 400), always, np.int32)
    for known in range(11, 160):
        step = context(
            hidden, budgets=[8], token_ids=table, num_tokens=np.array([known], np.int32),
            sampled=[[int(always)]],
        )  # fmt: skip
        draft = drafter.propose(step)[0]
    check_shape(draft)
    assert first.reach is not None and draft.reach is not None
    assert first.tokens[0] != always and draft.tokens[0] == always
    assert draft.reach[0] > 0.8 > first.reach[np.flatnonzero(first.tokens == always)[0]]
    refused = np.flatnonzero((draft.tokens == first.tokens[0]) & (draft.parents < 0))
    assert all(draft.reach[refused] < 0.1)


def test_branches_must_gain_more_than_they_cost() -> None:
    """Half a token a step is worth a tree where tokens are nearly free; a hundredth is not."""
    path = DraftTree(
        np.array([1, 2], np.int32), np.array([-1, 0], np.int32), np.array([0.5, 0.3], np.float32)
    )
    costs = 1.0 + 0.001 * np.arange(32)
    for gain, branched in ((0.3, True), (0.01, False)):
        reach = (
            np.array([0.5, gain, 0.3], np.float32)
            if gain >= 0.3
            else np.array([0.5, 0.3, gain], np.float32)
        )
        parents = np.array([-1, -1, 0] if gain >= 0.3 else [-1, 0, -1], np.int32)
        tokens = np.array([1, 9, 2] if gain >= 0.3 else [1, 2, 9], np.int32)
        tree = DraftTree(tokens, parents, reach)
        found = worth_their_branches([tree, path], costs)
        assert found[0].is_chain is not branched
        assert len(found[0].tokens) == (3 if branched else 2)
        assert found[1].tokens.tolist() == [1, 2]
    chain = DraftTree(tokens, parents, reach).best_path()
    assert chain.tokens.tolist() == [1, 2] and chain.reach is not None
    assert chain.reach.tolist() == pytest.approx([0.5, 0.3])
    assert worth_their_branches([tree], None)[0] is tree
