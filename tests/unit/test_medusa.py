"""Draft heads as a proposer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import synthetic_heads as synthetic
from tests.support.drafting import context
from vllm_specx.draft.best_first import chain_length, fixed_tree, parallel_tree
from vllm_specx.draft.checkpoints import CheckpointError, HeadWeights, TargetShape, load_heads
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.medusa_heads import SequentialHeads

TARGET = TargetShape(synthetic.HIDDEN, synthetic.VOCAB)


def parallel(folder: Path, *, bias: bool = False, own: bool = False) -> HeadWeights:
    """Medusa heads."""
    names = synthetic.old_names(bias=bias, own=own)
    return load_heads(synthetic.write(folder, names, None), TARGET)


def sequential(folder: Path, layers: int = 2) -> tuple[HeadWeights, SequentialHeads]:
    """Hydra heads, and the network they are."""
    torch.manual_seed(3)
    net = SequentialHeads(synthetic.HIDDEN, layers=layers, inner=48, depth=3)
    config = synthetic.vllm_config(
        num_hidden_layers=layers,
        intermediate_size=48,
        specx={"format": 1, "conditioning": "hydra", "acceptance": [0.6, 0.5, 0.4]},
    )
    tensors = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    return load_heads(synthetic.write(folder, tensors, config), TARGET), net


def config(**changes: Any) -> MedusaConfig:
    """Drafts of full length unless said otherwise."""
    return MedusaConfig(**{"heads": "x", "min_probability": 0.0, **changes})


LM_HEAD = synthetic.lm_heads(count=1)[0]
EMBEDDINGS = synthetic.lm_heads(seed=9, count=1)[0]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_chains_are_what_vllms_medusa_drafts(tmp_path: Path, own: bool, batch: int) -> None:
    """Against the code of vLLM 0.32's model: block by block, head by head, argmax."""
    heads = parallel(tmp_path, bias=True, own=own)
    drafter = MedusaDrafter(config(), heads, lm_head=LM_HEAD)
    hidden = torch.randn(batch, synthetic.HIDDEN)
    drafts = drafter.propose(context(hidden, budgets=[8] * batch))
    for i, draft in enumerate(drafts):
        for head, token in enumerate(draft.tokens):
            x = hidden[i]
            for layer in range(synthetic.LAYERS):
                weight, bias = synthetic.blocks()[head, layer], 0.1 * head
                x = x + torch.nn.functional.silu(weight @ x + bias)
            rows = synthetic.lm_heads()[head] if own else LM_HEAD
            assert int((rows @ x).argmax()) == token
        assert len(draft.tokens) == synthetic.HEADS and draft.is_chain


def test_sequential_chains_are_the_networks(tmp_path: Path) -> None:
    heads, net = sequential(tmp_path)
    drafter = MedusaDrafter(config(), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS)
    hidden = torch.randn(4, synthetic.HIDDEN)
    step = context(hidden, budgets=[3, 3, 0, 2])
    drafts = drafter.propose(step)
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 0, 2]
    for i in (0, 1, 3):
        state, token = hidden[i], int(step.token_ids[i, 9])
        for drafted in drafts[i].tokens:
            state = net(state, EMBEDDINGS[token])
            token = int((LM_HEAD @ state).argmax())
            assert token == drafted


def test_a_reduced_vocabulary_names_target_ids(tmp_path: Path) -> None:
    ids = torch.randperm(synthetic.VOCAB, generator=torch.Generator().manual_seed(1))[:50]
    names = {**synthetic.old_names(bias=False, own=False), "token_map": ids}
    heads = load_heads(
        synthetic.write(tmp_path, names, synthetic.vllm_config(truncated_vocab_size=50)), TARGET
    )
    hidden = torch.randn(2, synthetic.HIDDEN)
    whole = MedusaDrafter(config(), parallel(tmp_path / "w"), lm_head=LM_HEAD)
    scores = whole.logits(hidden)
    for size in (50, 10):
        reduced = MedusaDrafter(config(vocab=size), heads, lm_head=LM_HEAD)
        drafts = reduced.propose(context(hidden, budgets=[3, 3]))
        for i in range(2):
            best = ids[:size][scores[:, i, ids[:size]].argmax(-1)]
            assert drafts[i].tokens.tolist() == best.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "hydra"])
@pytest.mark.parametrize("tree", [None, {"nodes": 32}])
def test_every_dtype(
    tmp_path: Path, dtype: torch.dtype, kind: str, tree: dict[str, int] | None
) -> None:
    if kind == "hydra":
        sequential(tmp_path)
    else:
        parallel(tmp_path)
    heads = load_heads(tmp_path, TargetShape(synthetic.HIDDEN, synthetic.VOCAB, dtype))
    drafter = MedusaDrafter(
        config(tree=tree), heads, lm_head=LM_HEAD.to(dtype), embeddings=EMBEDDINGS.to(dtype)
    )
    hidden = torch.randn(3, synthetic.HIDDEN).to(dtype)
    drafts = drafter.propose(context(hidden, budgets=[5, 1, 0]))
    assert len(drafts[0].tokens) == (3 if tree is None else 5)
    assert len(drafts[1].tokens) == 1 and not len(drafts[2].tokens)


def _paths(tree: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    return paths


def test_parallel_trees_hold_the_most_probable_paths() -> None:
    acceptance = np.sort(np.random.default_rng(0).random((3, 4)))[:, ::-1] * 0.6
    depths, ranks, parents = parallel_tree(acceptance, 20)
    probability: list[float] = []
    for d, r, p in zip(depths, ranks, parents, strict=True):
        probability.append((probability[p] if p >= 0 else 1.0) * acceptance[d, r])
    assert probability == sorted(probability, reverse=True)
    every = [
        float(np.prod([acceptance[d, r] for d, r in enumerate(path)]))
        for depth in (1, 2, 3)
        for path in itertools.product(range(4), repeat=depth)
    ]
    assert probability == pytest.approx(sorted(every, reverse=True)[:20])
    assert all(p < i for i, p in enumerate(parents))


@pytest.mark.parametrize("kind", ["none", "hydra"])
def test_trees_are_trees_of_distinct_paths(tmp_path: Path, kind: str) -> None:
    heads = sequential(tmp_path)[0] if kind == "hydra" else parallel(tmp_path)
    drafter = MedusaDrafter(
        config(tree={"nodes": 24, "branching": 4}), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS
    )
    drafts = drafter.propose(context(torch.randn(3, synthetic.HIDDEN), budgets=[64, 9, 1]))
    assert [len(draft.tokens) for draft in drafts] == [24, 9, 1]
    for draft in drafts:
        paths = _paths(draft)
        assert len(set(paths)) == len(paths)
        assert all(parent < i for i, parent in enumerate(draft.parents))
    chain = MedusaDrafter(config(), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS)
    again = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, synthetic.HIDDEN, generator=again)
    best = chain.propose(context(hidden, budgets=[1]))[0].tokens
    assert drafter.propose(context(hidden, budgets=[24]))[0].tokens[0] == best[0]


def test_a_sequential_trees_children_follow_from_their_parents(tmp_path: Path) -> None:
    heads, net = sequential(tmp_path)
    drafter = MedusaDrafter(
        config(tree={"nodes": 30, "branching": 5}), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS
    )
    hidden = torch.randn(1, synthetic.HIDDEN)
    step = context(hidden, budgets=[30])
    (tree,) = drafter.propose(step)
    assert tree.parents.max() >= 0
    for path in _paths(tree):
        state, token = hidden[0], int(step.token_ids[0, 9])
        for drafted in path:
            state = net(state, EMBEDDINGS[token])
            assert drafted in (LM_HEAD @ state).topk(5).indices.tolist()
            token = drafted


def test_fixed_choices(tmp_path: Path) -> None:
    choices = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    drafter = MedusaDrafter(config(tree={}, choices=choices), parallel(tmp_path), lm_head=LM_HEAD)
    hidden = torch.randn(2, synthetic.HIDDEN)
    best = drafter.logits(hidden).topk(2, -1).indices
    drafts = drafter.propose(context(hidden, budgets=[64, 3]))
    assert len(drafts[1].tokens) == 3
    assert set(_paths(drafts[0])) == {
        tuple(int(best[d, 0, rank]) for d, rank in enumerate(path)) for path in choices
    }
    assert fixed_tree(choices)[2].tolist() == [-1, -1, 0, 0, 1, 2]


def test_choices_deeper_than_the_heads(tmp_path: Path) -> None:
    choices = tuple((0,) * n for n in range(1, 6))
    with pytest.raises(CheckpointError, match="5 deep"):
        MedusaDrafter(config(tree={}, choices=choices), parallel(tmp_path), lm_head=LM_HEAD)


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no lm_head"):
        MedusaDrafter(config(), parallel(tmp_path / "a"), lm_head=None)
    with pytest.raises(CheckpointError, match="need the target's embeddings"):
        MedusaDrafter(config(), sequential(tmp_path / "b")[0], lm_head=LM_HEAD)
    with pytest.raises(CheckpointError, match="leave vocab out"):
        MedusaDrafter(config(vocab=10), parallel(tmp_path / "a"), lm_head=LM_HEAD)


def test_drafts_shorten_when_they_are_wrong_and_grow_when_right(tmp_path: Path) -> None:
    heads, net = sequential(tmp_path)
    del net
    generator = torch.Generator().manual_seed(0)

    def lengths(rightly: bool) -> list[int]:
        drafter = MedusaDrafter(
            MedusaConfig(heads="x", token_cost=0.1), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS
        )
        found, at, sampled = [], 10, [3]
        for _ in range(1000):
            hidden = torch.randn(1, synthetic.HIDDEN, generator=generator)
            step = context(
                hidden, budgets=[3], sampled=[sampled], num_tokens=np.array([at], np.int32),
                token_ids=np.full((1, 10_000), 3, np.int32),
            )  # fmt: skip
            (draft,) = drafter.propose(step)
            found.append(len(draft.tokens))
            guessed = drafter._outcomes.guesses["r0"].tree.tokens.tolist()
            sampled = [*guessed, 1][: found[-1] + 1] if rightly else [-1]
            at += len(sampled)
        return found

    assert np.mean(lengths(True)[-100:]) > 2.8
    wrong = lengths(False)
    assert np.mean(wrong[:10]) > 1.0
    assert np.mean(wrong[-100:]) < 0.8


def test_heads_that_were_given_up_come_back(tmp_path: Path) -> None:
    """What is not proposed is still compared with what the target said."""
    heads, _ = sequential(tmp_path)
    drafter = MedusaDrafter(
        MedusaConfig(heads="x", token_cost=0.3), heads, lm_head=LM_HEAD, embeddings=EMBEDDINGS
    )
    hidden = torch.randn(1, synthetic.HIDDEN)
    at, sampled, found = 10, [3], []
    token_ids = np.full((1, 10_000), 3, np.int32)
    for i in range(600):
        step = context(
            hidden, budgets=[3], sampled=[sampled], num_tokens=np.array([at], np.int32),
            token_ids=token_ids,
        )  # fmt: skip
        (draft,) = drafter.propose(step)
        found.append(len(draft.tokens))
        guessed = drafter._outcomes.guesses["r0"].tree.tokens
        sampled = [-1] if i < 200 else [int(guessed[0])]
        at += 1
    assert found[199] == 0 and found[-1] >= 1


def test_outcomes_of_another_place_are_not_learned(tmp_path: Path) -> None:
    """A request that was preempted, or whose draft was dropped, says nothing about the draft."""
    drafter = MedusaDrafter(config(), parallel(tmp_path), lm_head=LM_HEAD)
    hidden = torch.randn(1, synthetic.HIDDEN)
    drafter.propose(context(hidden, budgets=[3]))
    before = drafter._calibration.table().copy()
    drafter.propose(context(hidden, budgets=[3], num_tokens=np.array([25], np.int32)))
    assert np.array_equal(before, drafter._calibration.table())
    drafter.propose(context(hidden, budgets=[0], finished=["r0"], sampled=[[]]))
    assert not drafter._outcomes.guesses


def test_chain_length_is_the_best_of_all() -> None:
    acceptance = np.array([[0.9, 0.8, 0.7], [0.3, 0.9, 0.9], [0.02, 0.5, 0.5]])
    lengths = chain_length(acceptance, 0.1)
    for row, length in zip(acceptance, lengths, strict=True):
        goodput = [(1 + np.cumprod(row)[:n].sum()) / (1 + 0.1 * n) for n in range(len(row) + 1)]
        assert length == int(np.argmax(goodput))
    assert lengths[0] == 3 and lengths[2] == 0


def test_calibration_learns_the_rate() -> None:
    calibration = DepthCalibration(2)
    random = np.random.default_rng(0)
    for _ in range(50):
        p = random.uniform(0.6, 0.9, 100)
        calibration.learn(np.zeros(100, int), p, random.random(100) < p / 2)
    estimated = calibration.estimate(np.array([[0.75, 0.75]]))
    assert estimated[0, 0] == pytest.approx(0.375, abs=0.05)
    assert estimated[0, 1] == pytest.approx(0.375, abs=0.1), "deeper is thought to be alike"
    assert calibration.estimate(np.array([[0.3, 0.75]]))[0, 0] < 0.3
    assert calibration.usual()[0] == pytest.approx(0.375, abs=0.05)


def test_a_draft_that_is_right_whatever_it_thinks_is_soon_believed() -> None:
    calibration = DepthCalibration(4)
    random = np.random.default_rng(0)
    for _ in range(40):
        p = random.beta(2, 1, 3)
        calibration.learn(np.arange(3), p, np.ones(3, bool))
    estimated = calibration.estimate(np.full((1, 4), 0.3))
    assert (estimated > 0.85).all()
    heads = DepthCalibration(2, (0.6, 0.4))
    heads.learn(np.zeros(1, int), np.array([0.5]), np.ones(1, bool))
    assert heads.estimate(np.array([[0.5, 0.5]]))[0] == pytest.approx([0.55, 0.44], abs=0.07)


def test_a_depth_that_was_never_reached_is_like_the_one_above() -> None:
    calibration = DepthCalibration(4, kinds=2)
    assert calibration.usual() == pytest.approx([0.5] * 8)
    calibration.learn(np.repeat([0, 1], 200), np.full(400, 0.9), np.arange(400) < 380)
    usual = calibration.usual().reshape(2, 4)
    assert usual[0, 0] > 0.97
    assert usual[0, 1:] == pytest.approx([usual[0, 1]] * 3) and 0.88 < usual[0, 1] < 0.92
    assert usual[1] == pytest.approx([0.5] * 4), "another kind of draft"
    measured = DepthCalibration(4, (0.3, 0.6)).usual()
    assert measured == pytest.approx([0.3, 0.6, 0.6, 0.6])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"choices": [[0]]}, "choices need the key 'tree'"),
        ({"choices": [[0, 1]], "tree": {}}, "not its parent"),
        ({"choices": [[0], [0]], "tree": {}}, "distinct"),
        ({"node": 3}, "Extra inputs"),
    ],
)
def test_configurations_that_cannot_work(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaConfig.model_validate({"heads": "x", **keys})


@pytest.mark.parametrize("rows", [1, 4, 33, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_products(rows: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 48).to(dtype), torch.randn(rows, 48).to(dtype)
    dense = Dense(weight)
    dense.pack()
    exact = x.double() @ weight.double().T
    found = dense(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), exact, atol=0.15 if dtype == torch.bfloat16 else 1e-4)
