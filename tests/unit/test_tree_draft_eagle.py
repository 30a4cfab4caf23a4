"""Trees of an EAGLE draft, against a draft that recomputes every path by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support import eagle_engine as synthetic
from tests.support.eagle_engine import Told, text
from tests.support.eagle_paths import paths, said_after
from tests.unit.test_tree_draft import check_shape
from vllm_specx.draft.tree import DraftTree
from vllm_specx.draft.tree_limits import Limits

Version = Literal[1, 3]
LIMITS = Limits(nodes=24, branching=3, depth=4)


def drafter(draft: Any, **changes: Any) -> Any:
    return synthetic.drafter(draft, tree=LIMITS, **changes)


def told(name: str, tokens: list[int], position: int = 0, sampled: int = 1, **changes: Any) -> Told:
    return Told(name, tokens, position, len(tokens) - 1 - position, sampled, budget=24, **changes)


def accepted_path(tree: DraftTree, node: int) -> list[int]:
    return list(paths(tree)[node]) if node >= 0 else []


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("variant", ["plain", "two layers", "reduced vocabulary", "norm_output"])
def test_children_are_the_best_of_their_path(version: Version, variant: str) -> None:
    """All nodes of a depth in one forward say what each path says alone."""
    changes: dict[str, Any] = {
        "two layers": {"layers": 2},
        "reduced vocabulary": {"vocab": synthetic.reduced()},
        "norm_output": {"norm_output": True} if version == 3 else {},
    }.get(variant, {})
    draft = synthetic.weights(version, **changes)
    known = [text(20, 1), text(61, 2), text(7, 3)]
    trees = drafter(draft).propose(
        synthetic.context([told(f"r{i}", tokens) for i, tokens in enumerate(known)], version)
    )
    for tokens, tree in zip(known, trees, strict=True):
        check_shape(tree)
        assert len(tree.tokens) == LIMITS.nodes
        assert max(map(len, paths(tree))) == LIMITS.depth
        for path in paths(tree):
            said = said_after(draft, tokens, path[:-1])
            best = sorted(said, key=lambda token: -said[token])[: LIMITS.branching]
            assert path[-1] in best


@pytest.mark.parametrize("version", [1, 3])
def test_after_any_accepted_path_a_draft_is_as_a_fresh_one(version: Version) -> None:
    """Its keys and values are those of the committed tokens, wherever in the tree they were."""
    draft = synthetic.weights(version, layers=2)
    kept = drafter(draft)
    known = [text(20 + 9 * i, i) for i in range(3)]
    step = [told(f"r{i}", tokens) for i, tokens in enumerate(known)]
    rng = np.random.default_rng(3)
    branched = 0
    for _ in range(12):
        trees = kept.propose(synthetic.context(step, version))
        # The same calibration, nothing of the past.
        fresh = drafter(draft)
        fresh._calibration = kept._calibration
        again = [told(f"n{i}", tokens) for i, tokens in enumerate(known)]
        for tree, other in zip(
            trees, fresh.propose(synthetic.context(again, version)), strict=True
        ):
            assert tree.tokens.tolist() == other.tokens.tolist()
            assert tree.parents.tolist() == other.parents.tolist()
            assert tree.reach == pytest.approx(other.reach, rel=1e-3)
        for i, tree in enumerate(trees):
            node = int(rng.integers(-1, len(tree.tokens)))
            path = accepted_path(tree, node)
            branched += path != tree.best_path().tokens[: len(path)].tolist()
            position = len(known[i]) - 1
            known[i] = [*known[i], *path, int(rng.integers(0, synthetic.VOCAB))]
            step[i] = told(f"r{i}", known[i], position, len(path) + 1)
    assert branched > 5


def test_requests_stop_by_themselves() -> None:
    """Where one request's next depth promises too little the others go on, as they would alone."""
    draft = synthetic.weights(3)
    costs = 1.0 + 0.05 * np.arange(400)
    known = [text(20 + 9 * i, i) for i in range(6)]
    step = [told(f"r{i}", tokens) for i, tokens in enumerate(known)]
    batch = drafter(draft, keys={"min_probability": None})
    trees = batch.propose(synthetic.context(step, 3, costs=costs, draft_cost=1e-4))
    depths = {max(map(len, paths(tree)), default=0) for tree in trees}
    assert {0, 4} <= depths and len(depths) > 2
    for tokens, tree in zip(known, trees, strict=True):
        check_shape(tree)
        for path in paths(tree):
            said = said_after(draft, tokens, path[:-1])
            assert path[-1] in sorted(said, key=lambda token: -said[token])[: LIMITS.branching]


def test_a_budget_cuts_the_worst_nodes() -> None:
    draft = synthetic.weights(3)
    step = [told("a", text(20))]
    whole = drafter(draft).propose(synthetic.context(step, 3))[0]
    for budget in (1, 5, 23):
        step = [dataclasses.replace(step[0], budget=budget)]
        few = drafter(draft).propose(synthetic.context(step, 3))[0]
        best = [path for path in paths(whole) if len(path) <= budget]
        assert paths(few) == best[:budget]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_word_from_the_host(dtype: torch.dtype) -> None:
    """Where the host does not wait in between, as on GPUs, whole trees are the same."""
    draft = synthetic.cast(synthetic.weights(3), dtype)
    step = [told(f"r{i}", text(20 + 30 * i, i)) for i in range(4)]
    waiting, blind = drafter(draft, dtype=dtype), drafter(draft, dtype=dtype)
    blind.stops_early = False
    both = [each.propose(synthetic.context(step, 3)) for each in (waiting, blind)]
    for tree, other in zip(*both, strict=True):
        check_shape(tree)
        assert tree.tokens.tolist() == other.tokens.tolist()
        assert tree.parents.tolist() == other.parents.tolist()
    assert blind.draft_steps == waiting.draft_steps == LIMITS.depth
