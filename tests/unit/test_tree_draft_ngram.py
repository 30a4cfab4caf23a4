"""Trees of n-gram continuations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.eagle_paths import paths
from tests.unit.test_tree_draft import check_shape
from vllm_specx.config import NgramConfig
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree
from vllm_specx.draft.tree_limits import Limits

LENGTH = 600


def lookahead(nodes: int = 24, branching: int = 4, tree: bool = True) -> NgramLookahead:
    limits = Limits(nodes, branching, 4) if tree else None
    config = NgramConfig(min_probability=0.0)
    return NgramLookahead(config, 2, LENGTH, nodes, limits)


def context(tokens: list[int], sampled: int = 1, name: str = "a", budget: int = 64) -> DraftContext:
    table = np.zeros((1, LENGTH), np.int32)
    table[0, : len(tokens)] = tokens
    return DraftContext(
        request_ids=[name],
        rows=np.zeros(1, np.int32),
        token_ids=table,
        num_tokens=np.array([len(tokens)], np.int32),
        num_prompt_tokens=np.array([min(16, len(tokens))], np.int32),
        sampled=[tokens[len(tokens) - sampled :]],
        budgets=np.array([budget], np.int32),
        temperatures=np.zeros(1, np.float32),
        pools=["default"],
        finished=[],
        vocab_size=1000,
    )


def draft(proposer: NgramLookahead, tokens: list[int], sampled: int = 1) -> DraftTree:
    return proposer.propose(context(tokens, sampled))[0]


def occurs(tokens: list[int], path: tuple[int, ...]) -> bool:
    """Whether this path is in the text. A copy may run on into what it drafts itself."""
    whole = [*tokens, *path]
    return any(tuple(whole[i : i + len(path)]) == path for i in range(1, len(tokens)))


@given(st.integers(0, 2**31 - 1), st.integers(2, 6), st.integers(1, 32), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_every_path_has_followed_before(
    seed: int, alphabet: int, nodes: int, branching: int
) -> None:
    rng = np.random.default_rng(seed)
    proposer = lookahead(nodes, branching)
    tokens = rng.integers(0, alphabet, 40).tolist()
    for _ in range(8):
        tree = draft(proposer, tokens)
        if len(tree.tokens):
            check_shape(tree)
        parents = tree.parents.tolist()
        assert len(tree.tokens) <= nodes
        assert all(parents.count(parent) <= branching for parent in set(parents))
        for path in paths(tree):
            assert occurs(tokens, path)
        tokens = [*tokens, int(rng.integers(0, alphabet))]


@given(st.integers(0, 2**31 - 1), st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_without_branches_it_is_the_chain(seed: int, alphabet: int) -> None:
    """The same tokens with the same probabilities, step by step, both learning."""
    rng = np.random.default_rng(seed)
    tree, chain = lookahead(16, 1), lookahead(16, tree=False)
    tokens = rng.integers(0, alphabet, 40).tolist()
    sampled = 1
    for _ in range(12):
        one, other = tree.predict(context(tokens, sampled)), chain.predict(context(tokens, sampled))
        size = int(one.lengths[0])
        assert int(other.lengths[0]) - size in (0, 1)  # the chain shows the token that ends it
        assert one.tokens[0, :size].tolist() == other.tokens[0, :size].tolist()
        assert one.reach[0, :size] == pytest.approx(other.reach[0, :size])
        known = other.tokens[0, : int(rng.integers(0, min(size, 3) + 1))].tolist()
        tokens = [*tokens, *known, int(rng.integers(0, alphabet))]
        sampled = len(known) + 1


def test_both_continuations_are_drafted() -> None:
    """What chains must choose between."""
    tokens = [7, 8, 1, 2, 3, 90, 7, 8, 4, 5, 6, 91, 7, 8]
    tree = draft(lookahead(16), tokens)
    assert {(1, 2, 3), (4, 5, 6)} <= set(paths(tree))
    chain = draft(lookahead(16, tree=False), tokens)
    assert chain.tokens[:3].tolist() in ([1, 2, 3], [4, 5, 6])


def test_siblings_learn_how_often_they_are_right() -> None:
    """A text in which the rarer continuation is the right one."""
    proposer = lookahead(8, 2)
    rng = np.random.default_rng(0)
    words = [[7, 8, 1], [7, 8, 1], [7, 8, 2]]
    tokens: list[int] = [t for word in words for t in word]
    reach: list[float] = []
    for _ in range(60):
        tokens += [int(rng.integers(50, 900)), 7, 8]
        tree = draft(proposer, tokens, 3)
        named = dict(zip(paths(tree), (tree.reach if tree.reach is not None else []), strict=True))
        if (2,) in named and (1,) in named:
            reach.append(float(named[2,]))
        tokens += [2 if rng.random() < 0.4 else 1]
        draft(proposer, tokens)
    assert np.mean(reach[-10:]) == pytest.approx(0.4, abs=0.15)
