"""Trees of two sources, and when a trained draft's trees are worth their forwards."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.eagle_paths import paths
from tests.unit.test_tree_draft import check_shape
from tests.unit.test_tree_draft_ngram import context
from vllm_specx.config import NgramConfig
from vllm_specx.draft.auto import AutoDrafter
from vllm_specx.draft.merged import merged
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.paced import PacedDrafter
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.draft.tree_limits import Limits

DEPTH = 3


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    """Falling reach, distinct siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(nodes):
        parent = int(rng.integers(-1, node))
        taken = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        free = [t for t in range(nodes + 2) if t not in taken]
        tokens.append(int(rng.choice(free)))
        parents.append(parent)
    reach = -np.sort(-rng.random(nodes).astype(np.float32))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), reach)


@given(st.integers(0, 2**31 - 1), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_merged_tree_has_the_paths_of_both(seed: int, one: int, other: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, one), random_tree(rng, other)]
    both = merged(*trees)
    check_shape(both)
    reach: dict[tuple[int, ...], float] = {}
    for tree in trees:
        assert tree.reach is not None
        for path, chance in zip(paths(tree), tree.reach.tolist(), strict=True):
            reach[path] = max(reach.get(path, 0.0), chance)
    assert both.reach is not None
    assert dict(zip(paths(both), both.reach.tolist(), strict=True)) == pytest.approx(reach)


class Branching:
    """Knows the text and drafts two paths: a wrong one first, then the true one, or two wrong ones."""

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = False
    depth: ClassVar[int] = DEPTH
    acceptance: ClassVar[tuple[float, ...]] = ()
    stops_early: ClassVar[bool] = False
    missed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, text: list[int], wrong: bool) -> None:
        self.text, self.wrong = text, wrong
        self.draft_steps = 0
        self.budgets: list[int] = []

    def forwards(self, depth: int) -> int:
        return depth

    def propose(self, context: DraftContext) -> list[DraftTree]:
        (budget,), (n,) = context.budgets.tolist(), context.num_tokens.tolist()
        self.budgets.append(budget)
        self.draft_steps = DEPTH if budget else 0
        if not budget:
            return [EMPTY_DRAFT]
        true = np.array(self.text[n : n + DEPTH])
        first, second = true + 1, true + 2 * self.wrong
        tokens = np.stack([first, second], 1).ravel().astype(np.int32)
        parents = np.arange(-2, 2 * DEPTH - 2).clip(-1).astype(np.int32)
        reach = np.repeat(0.5 ** np.arange(DEPTH), 2).astype(np.float32) * 0.45
        return [DraftTree(tokens, parents, reach).prefix(budget)]


def decode(drafter: PacedDrafter | AutoDrafter, text: list[int], steps: int, slope: float) -> int:
    """Tokens made in so many steps after the first 20."""
    known, sampled = 20, 1
    costs = 1.0 + slope * np.arange(65)
    for _ in range(steps):
        step = context(text[:known], sampled)
        step = DraftContext(
            **{f: getattr(step, f) for f in step.__dataclass_fields__}
            | {"costs": costs, "draft_cost": 0.02}
        )
        tree = drafter.propose(step)[0]
        truth = text[known:]
        node, agreed = -1, 0
        while agreed < len(truth) - 1:
            children = [i for i, p in enumerate(tree.parents.tolist()) if p == node]
            node = next((i for i in children if tree.tokens[i] == truth[agreed]), -2)
            if node < 0:
                break
            agreed += 1
        sampled = agreed + 1
        known += sampled
    return known - 20


def test_what_comes_true_in_any_branch_counts() -> None:
    text = np.random.default_rng(0).integers(0, 900, 400).tolist()
    oracle = Branching(text, wrong=False)
    paced = PacedDrafter(oracle, 8, trees=True)
    assert decode(paced, text, 60, slope=0.001) == 60 * (DEPTH + 1)
    assert all(budget == 64 for budget in oracle.budgets)
    _, accepted = paced.gate.prospects.reach(["a"])
    assert accepted[0].min() > 0.9


def test_trees_that_are_always_wrong_are_left_out() -> None:
    text = np.random.default_rng(0).integers(0, 900, 400).tolist()
    oracle = Branching(text, wrong=True)
    assert decode(PacedDrafter(oracle, 8, trees=True), text, 60, slope=0.02) == 60
    assert sum(budget > 0 for budget in oracle.budgets[-30:]) <= 8


class Cutting(Branching):
    """Drafts a wide tree, or the true path alone where it is told what verifying costs."""

    def propose(self, context: DraftContext) -> list[DraftTree]:
        (tree,) = super().propose(context)
        if context.costs is None or not len(tree.tokens):
            return [tree]
        (n,) = context.num_tokens.tolist()
        chain = DraftTree.chain([t + self.wrong for t in self.text[n : n + DEPTH]])
        return [DraftTree(chain.tokens, chain.parents, np.full(DEPTH, 0.9, np.float32))]


def test_what_is_tried_says_nothing_of_how_wide_trees_are_that_pay() -> None:
    """They are wider than any that pays, so a gate that believed them would stay shut."""
    text = np.random.default_rng(0).integers(0, 900, 400).tolist()
    oracle = Cutting(text, wrong=True)
    paced = PacedDrafter(oracle, 8, trees=True)
    decode(paced, text, 300, slope=0.02)
    tried = [budget for budget in oracle.budgets[60:] if budget]
    assert tried and max(tried) <= DEPTH, "no more nodes than a path may have"
    assert paced.gate._width == 1.0


def auto(text: list[int], wrong: bool) -> AutoDrafter:
    ngram = NgramLookahead(NgramConfig(), 2, 600, 64, Limits(32, 4, DEPTH))
    return AutoDrafter(ngram, Branching(text, wrong), depth=8, trees=True)


def test_n_grams_are_branches_of_a_trained_drafts_tree() -> None:
    """Where both promise something: n-grams guess the next of ten words, the draft knows it."""
    rng = np.random.default_rng(1)
    text = [t for _ in range(90) for t in (7, *rng.integers(20, 30, 2).tolist())]
    drafter = auto(text, wrong=False)
    both = 0
    seen = drafter._both

    def watched(*args: Any) -> list[DraftTree]:
        nonlocal both
        (tree,) = seen(*args)
        check_shape(tree)
        mine, found, length = args[1][0], args[2], int(args[3][0])
        ngrams = set(paths(found.draft(0, length)))
        both += bool(ngrams - set(paths(mine))) and bool(set(paths(mine)) - ngrams)
        assert set(paths(tree)) <= ngrams | set(paths(mine))
        return [tree]

    drafter._both = watched  # type: ignore[method-assign]
    assert decode(drafter, text, 50, slope=0.005) > 50 * DEPTH
    assert both > 10


def test_alone_each_source_drafts_as_it_does() -> None:
    fresh = np.random.default_rng(2).integers(0, 900, 400).tolist()
    assert decode(auto(fresh, wrong=False), fresh, 40, slope=0.001) == 40 * (DEPTH + 1)
    text = fresh[:30] * 13
    assert decode(auto(text, wrong=True), text, 30, slope=0.02) > 60
