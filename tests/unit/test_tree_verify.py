"""Verifying a draft tree: the distribution by enumeration, which rows see which, and the plan of a step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine.tree_plan import plan_step
from vllm_specx.verify.chain import said
from vllm_specx.verify.tree import children, kept_rows, visible, walk

VOCAB, LENGTH = 3, 4
Tokens = tuple[int, ...]
Model = Callable[[Tokens], torch.Tensor]


@st.composite
def trees(draw: st.DrawFn, most: int = 12, vocab: int = VOCAB, least: int = 0) -> DraftTree:
    """Any tree; two children of one node may have the same token."""
    size = draw(st.integers(least, most))
    parents = [draw(st.integers(-1, j - 1)) for j in range(size)]
    tokens = [draw(st.integers(0, vocab - 1)) for _ in range(size)]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def model(seed: int) -> Model:
    """A distribution after each beginning, some of it zero."""

    def after(before: Tokens) -> torch.Tensor:
        random = np.random.default_rng([seed, len(before), *before])
        row = random.random(VOCAB) ** 2
        row[random.integers(VOCAB)] *= random.integers(2)
        return torch.from_numpy(row / row.sum())

    return after


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the top down to this one; -1: none."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = int(tree.parents[node])
    return found[::-1]


def words(tree: DraftTree, node: int) -> Tokens:
    """Tokens down to a node."""
    return tuple(int(tree.tokens[j]) for j in path_to(tree, node))


class _Asked(Exception):
    pass


def outcomes(tree: DraftTree, p: Model) -> dict[Tokens, float]:
    """What a step commits, with its probability: every way in which the draws of `walk` can come out."""
    found: dict[Tokens, float] = {}

    def go_on(drawn: Tokens, chance: float) -> None:
        left = list(drawn)

        def draw(node: int) -> int:
            if not left:
                raise _Asked(node)
            return left.pop(0)

        try:
            tokens, path = walk(tree, draw)
        except _Asked as asked:
            following = p(words(tree, asked.args[0]))
            for token, probability in enumerate(following.tolist()):
                if probability:
                    go_on((*drawn, token), chance * probability)
            return
        assert not left and len(tokens) == len(path) + 1
        assert words(tree, path[-1] if path else -1) == tuple(tokens[:-1])
        found[tuple(tokens)] = chance

    go_on((), 1.0)
    return found


def wholes(step: dict[Tokens, float], p: Model) -> dict[Tokens, float]:
    """Of LENGTH tokens: what the step commits, and what p says after it."""
    found: dict[Tokens, float] = defaultdict(float)
    for tokens, probability in step.items():
        kept = tokens[:LENGTH]
        for rest in itertools.product(range(VOCAB), repeat=LENGTH - len(kept)):
            chance = probability
            for i, token in enumerate(rest):
                chance *= float(p((*kept, *rest[:i]))[token])
            found[(*kept, *rest)] += chance
    return found


def worst(found: dict[Tokens, float], p: Model) -> float:
    """How far it is from p itself."""
    error = 0.0
    for whole in itertools.product(range(VOCAB), repeat=LENGTH):
        right = 1.0
        for i, token in enumerate(whole):
            right *= float(p(whole[:i])[token])
        error = max(error, abs(right - found.get(whole, 0.0)))
    return error


@given(trees(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_distribution_is_the_targets(tree: DraftTree, seed: int) -> None:
    p = model(seed)
    assert worst(wholes(outcomes(tree, p), p), p) < 1e-12


@given(st.lists(st.integers(0, VOCAB - 1), max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_chain_as_a_tree_is_the_chain_rule(draft: list[int], seed: int) -> None:
    p = model(seed)
    beginnings = [tuple(draft[:i]) for i in range(len(draft) + 1)]
    certain = [torch.eye(VOCAB, dtype=torch.float64)[token] for token in draft]
    chain = said(draft, [p(b) for b in beginnings], certain)
    assert outcomes(DraftTree.chain(draft), p) == pytest.approx(chain)


def test_following_the_best_child_whatever_was_drawn_is_seen() -> None:
    """The usual fault: nodes accepted for being in the tree, not for being what was drawn."""
    p = model(1)
    always: dict[Tokens, float] = {(0, 2, token): float(p((0, 2))[token]) for token in range(VOCAB)}
    assert worst(wholes(always, p), p) > 0.01


@given(trees(most=24), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_greedy_accepts_the_longest_right_path(tree: DraftTree, seed: int) -> None:
    p = model(seed)
    tokens, path = walk(tree, lambda node: int(p(words(tree, node)).argmax()))
    said_alone: list[int] = []
    while len(said_alone) < len(tokens):
        said_alone.append(int(p(tuple(said_alone)).argmax()))
    assert tokens == said_alone
    right = {
        words(tree, j)
        for j in range(len(tree.tokens))
        if list(words(tree, j)) == said_alone[: len(words(tree, j))]
    }
    assert len(path) <= max(map(len, right), default=0)
    distinct = len({(int(tree.parents[j]), int(tree.tokens[j])) for j in range(len(tree.tokens))})
    if distinct == len(tree.tokens):
        assert len(path) == max(map(len, right), default=0)


@given(trees(most=24))
@settings(max_examples=60, deadline=None)
def test_rows_see_what_is_above_them(tree: DraftTree) -> None:
    mask, deep = visible(tree.parents), tree.depths()
    assert mask[0].tolist() == [True] + [False] * len(tree.tokens)
    for j in range(len(tree.tokens)):
        above = path_to(tree, j)
        assert np.flatnonzero(mask[j + 1]).tolist() == [0, *(node + 1 for node in above)]
        assert deep[j] == len(above)
    for n in range(len(tree.tokens) + 1):
        part = tree.prefix(n)
        assert np.array_equal(visible(part.parents), mask[: n + 1, : n + 1])


@given(trees(most=24), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_kept_rows_begin_with_the_accepted_ones(tree: DraftTree, seed: int) -> None:
    random = np.random.default_rng(seed)
    node = int(random.integers(-1, len(tree.tokens)))
    path = path_to(tree, node)
    order = kept_rows(path, len(tree.tokens) + 1).tolist()
    assert order[: len(path) + 1] == [0, *(j + 1 for j in path)]
    assert sorted(order) == list(range(len(tree.tokens) + 1))


def test_twins_are_one_child() -> None:
    tree = DraftTree(np.array([7, 7, 8], np.int32), np.array([-1, -1, 1], np.int32))
    assert children(tree) == {(-1, 7): 0, (1, 8): 2}


Row = tuple[DraftTree | None, int, int, int]


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Of each request its tree, how much of it is scheduled, committed tokens that were read before, and
    tokens of the prompt that are read in this step besides (0: it decodes)."""
    found: list[Row] = []
    for _ in range(draw(st.integers(1, 5))):
        tree = draw(st.none() | trees(most=10, vocab=50, least=1))
        kept = 0 if tree is None else draw(st.integers(0, len(tree.tokens)))
        chunk = draw(st.integers(1, 30)) if not kept else 0
        found.append((tree, kept, draw(st.integers(0, 200)), chunk))
    return found


@given(batches())
@settings(max_examples=100, deadline=None)
def test_the_plan_of_a_step(rows: list[Row]) -> None:
    names = [f"r{i}" for i in range(len(rows))]
    drafted = {n: r[0] for n, r in zip(names, rows, strict=True) if r[0] is not None}
    scheduled = {
        n: tree.tokens[:kept].tolist()
        for n, (tree, kept, _, _) in zip(names, rows, strict=True)
        if tree is not None and kept
    }
    scheduled = dict(reversed(scheduled.items()))
    counts = np.array([chunk or 1 + kept for _, kept, _, chunk in rows])
    computed = np.array([before for _, _, before, _ in rows])
    index = {name: i for i, name in enumerate(names)}
    plan, nodes, positions = plan_step(drafted, scheduled, index, counts, computed)
    wanted = [
        i for i, (tree, kept, _, _) in enumerate(rows) if tree and not tree.prefix(kept).is_chain
    ]
    if not wanted:
        assert plan is None and not len(nodes)
        return
    assert plan is not None
    assert [tree.request for tree in plan.trees] == wanted
    starts = np.cumsum(counts) - counts
    with_logits = np.array([1 + kept for _, kept, _, _ in rows])
    at: dict[int, int] = {}
    for place, i in enumerate(wanted):
        tree, kept, before, _ = rows[i]
        assert tree is not None
        found = plan.trees[place]
        assert found.row == starts[i] == plan.first[place]
        assert found.logits_row == int(with_logits[:i].sum())
        assert plan.context[place] == before and plan.rows[place] == kept + 1
        at |= {int(starts[i]) + 1 + j: before + d for j, d in enumerate(tree.prefix(kept).depths())}
        assert np.array_equal(plan.masks()[place].numpy(), visible(tree.parents[:kept]))
    assert dict(zip(nodes.tolist(), positions.tolist(), strict=True)) == at
    assert plan.whole == (sum(tree.size for tree in plan.trees) == counts.sum())


def test_drafts_that_are_not_those_of_the_tree_are_a_chain() -> None:
    """Near max_model_len vLLM sends zeros of its own."""
    tree = DraftTree(np.array([5, 6, 7], np.int32), np.array([-1, -1, 0], np.int32))
    one = np.array([4]), np.array([9])
    assert plan_step({"a": tree}, {"a": [5, 6, 7]}, {"a": 0}, *one)[0] is not None
    assert plan_step({"a": tree}, {"a": [0, 0, 0]}, {"a": 0}, *one)[0] is None
    assert plan_step({}, {"a": [5, 6, 7]}, {"a": 0}, *one)[0] is None
    assert plan_step({"a": tree}, {"a": [5]}, {"a": 0}, np.array([2]), one[1])[0] is None


def test_states_are_put_where_those_of_an_accepted_chain_would_be() -> None:
    tree = DraftTree(np.array([5, 6, 7], np.int32), np.array([-1, -1, 1], np.int32))
    plan, _, _ = plan_step(
        {"b": tree}, {"b": [5, 6, 7]}, {"a": 0, "b": 1}, np.array([6, 4]), np.array([0, 9])
    )
    assert plan is not None
    plan.paths = [[1, 2]]
    rows = plan.kept(10, logits=False)
    logits = plan.kept(5, logits=True)
    assert rows is not None and rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 7]
    assert logits is not None and logits.tolist() == [0, 1, 3, 4, 2]
    plan.paths = [[0]]
    assert plan.kept(10, logits=False) is None
