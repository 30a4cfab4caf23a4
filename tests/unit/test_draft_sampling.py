"""Drafts that are drawn: from what they say they are, by the same numbers on every rank, kept until verified."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.support.twins import twin
from tests.unit.test_draft_model import VOCAB, chains, continuation, drafter, made, step, text
from vllm_specx.draft.sampling import (
    CANDIDATES,
    SamplingRows,
    Source,
    candidates,
    drawn_from,
    uniforms,
)
from vllm_specx.draft.vocabularies import Draftable
from vllm_specx.engine.draft_probs import DraftProbs


def rows(size: int, drawn: Any = True, **changes: Any) -> SamplingRows:
    return SamplingRows(
        np.broadcast_to(np.array(drawn), size).copy(),
        np.full(size, changes.get("temperature", 0.8), np.float32),
        np.full(size, changes.get("top_k", 0), np.int64),
        np.full(size, changes.get("top_p", 1.0), np.float32),
    )


def test_numbers_depend_on_what_they_are_asked_for_and_on_nothing_else() -> None:
    assert np.array_equal(uniforms(1, "a", 5, 20), uniforms(1, "a", 5, 20))
    assert np.array_equal(uniforms(1, "a", 5, 20)[:9], uniforms(1, "a", 5, 9))
    many = np.stack(
        [uniforms(s, r, p, 17) for s in range(2) for r in ("a", "b", "\ud800") for p in range(300)]
    )
    assert len(np.unique(many)) == many.size
    assert stats.kstest(many.ravel(), "uniform").pvalue > 1e-5
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("top_k", [0, 5, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.01])
def test_candidates_are_the_likeliest_tokens_as_the_request_samples(
    top_k: int, top_p: float
) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([[0.5], [1.0], [2.0]])
    bound = torch.full((3, 1), top_k or 2**62)
    ids, q = candidates(logits, temperature, bound, torch.full((3, 1), top_p))
    for row in range(3):
        order = logits[row].argsort(descending=True)[:CANDIDATES]
        wanted = torch.softmax((logits[row] / temperature[row])[order][: top_k or None], -1)
        kept = int((wanted.cumsum(0) < top_p).sum()) + 1
        wanted = wanted[:kept] / wanted[:kept].sum()
        assert ids[row].tolist() == order.tolist()
        assert torch.allclose(q[row, : len(wanted)], wanted, atol=1e-6)
        assert not q[row, len(wanted) :].any()


def test_what_is_drawn_has_the_distribution_that_is_told() -> None:
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    count = 40_000
    numbers = torch.from_numpy(
        np.concatenate([uniforms(0, f"r{i}", i, 4) for i in range(count // 4)])
    )
    places = drawn_from(q.expand(count, 5), numbers[:, None])[:, 0]
    seen = torch.bincount(places, minlength=5).numpy()
    assert seen[4] == 0
    assert stats.chisquare(seen[:4], (q[:4] * count).numpy()).pvalue > 1e-5


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(tmp_path_factory.mktemp("qwen"), "qwen2")


def drawing(path: str, **changes: Any) -> Any:
    keys = {"probabilistic": True, **changes.pop("keys", {})}
    return drafter(path, keys=keys, **changes)


def told(reference: Any, tokens: list[int], temperature: float, ids: int = VOCAB) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, -1, :ids]
    values, order = logits.topk(min(CANDIDATES, ids))
    return torch.zeros(VOCAB).scatter(0, order, torch.softmax(values / temperature, -1))


@pytest.mark.parametrize("size", [VOCAB, 50])
def test_sources_are_the_drafts_distributions(qwen: Any, size: int) -> None:
    """Of chains that end early, among others that are not drawn, in any order of the batch."""
    path, reference = qwen
    each = drawing(path, ids=Draftable(size), keys={"min_probability": 0.2})
    known = {f"r{i}": text(10 + i, i) for i in range(8)}
    lengths = set()
    for turn in range(6):
        names = [str(n) for n in np.random.default_rng(turn).permutation(list(known))]
        batch = {name: known[name] for name in names}
        mask = np.array([int(name[1]) % 3 > 0 for name in names])
        drafts = chains(each.propose(step(batch, sampling=rows(8, mask))))
        for name, draft, drawn in zip(names, drafts, mask, strict=True):
            tokens = known[name]
            if not drawn:
                assert draft == continuation(reference, tokens, len(draft), ids=size)
                assert name not in each.sources
            elif draft:
                lengths.add(len(draft))
                source = each.sources[name]
                assert source.tokens.tolist() == draft
                for d in range(len(draft)):
                    q = torch.zeros(VOCAB).scatter(0, source.ids[d], source.probabilities[d])
                    wanted = told(reference, tokens + draft[:d], 0.8, size)
                    assert torch.allclose(q, wanted, atol=1e-4)
                    assert q[draft[d]] > 0
            known[name] = [*tokens, *draft[:2], 1 + turn]
    assert len(lengths) > 2
    each.propose(step(known, budgets=0))
    assert each.sources == {}


def test_drawn_tokens_follow_their_source(qwen: Any) -> None:
    """One prompt, thousands of requests: by the chi-square test."""
    path, reference = qwen
    each = drawing(path, max_batch=500, cache_tokens=500 * 32)
    tokens = text(12, 3)
    seen: list[int] = []
    for turn in range(8):
        known = {f"r{turn}-{i}": tokens for i in range(500)}
        drafts = chains(each.propose(step(known, budgets=1, sampling=rows(500), tokens_read=10**6)))
        seen += [draft[0] for draft in drafts if draft]
        each.propose(step({"x": [1]}, budgets=0, finished=list(known)))
    assert len(seen) > 3000
    wanted = told(reference, tokens, 0.8) * len(seen)
    counts = np.bincount(seen, minlength=VOCAB)
    common = (wanted > 8).numpy()
    observed = [*counts[common], counts[~common].sum()]
    expected = [*wanted[common].tolist(), float(wanted[~common].sum())]
    assert (
        stats.chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue > 1e-5
    )


def test_two_ranks_draw_the_same(qwen: Any) -> None:
    both = [drawing(qwen[0], seed=5) for _ in range(2)]
    other = drawing(qwen[0], seed=6)
    known = {f"r{i}": text(30 + 9 * i, i) for i in range(6)}
    different = 0
    for turn in range(10):
        names = [str(n) for n in np.random.default_rng(turn).permutation(list(known))[:4]]
        batch = {name: known[name] for name in names}
        answers = [
            chains(
                one.propose(
                    step(batch, sampling=rows(4, [True, True, False, True]), tokens_read=999)
                )
            )
            for one in (*both, other)
        ]
        assert answers[0] == answers[1]
        different += answers[0] != answers[2]
        for name in names:
            known[name] = [*known[name], turn]
    assert different > 5


def test_without_the_key_nothing_is_drawn(qwen: Any) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"a": text(30, 1)}
    drafts = chains(each.propose(step(known, sampling=rows(1))))
    assert drafts == [continuation(reference, known["a"], 4)]
    assert each.sources == {}


def source(tokens: list[int], seed: int) -> Source:
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(20, generator=random)[:5] for _ in tokens])
    ids[:, 0] = torch.tensor(tokens)
    q = torch.rand(len(tokens), 5, generator=random)
    return Source(torch.tensor(tokens), ids, q / q.sum(1, keepdim=True))


def dense(one: Source) -> torch.Tensor:
    return torch.zeros(len(one.tokens), 20).scatter_add(1, one.ids, one.probabilities)


def test_sources_wait_until_their_drafts_are_verified() -> None:
    probs = DraftProbs(20)
    a, b = source([11, 12, 13], 1), source([14, 15], 2)
    probs.made(["a", "b", "c", "d"], [[11, 12, 13], [14, 15], [7, 8], []], {"a": a, "b": b}, "abcd")
    # Another order; the scheduler has cut the draft of "a"; "c" and "d" were not drawn.
    tokens = torch.tensor([7, 8, 11, 12, 3], dtype=torch.int32)
    q = probs.of(["c", "b", "a", "d"], [2, 0, 2, 1], tokens)
    assert q is not None
    assert torch.equal(q[:2], torch.eye(20)[[7, 8]])
    assert torch.allclose(q[2:4], dense(a)[:2])
    assert torch.equal(q[4], torch.eye(20)[3])
    # "b" was not scheduled: it waits, while "a" is drafted for again.
    again = source([16], 3)
    probs.made(["a", "c"], [[16], [9]], {"a": again}, "abcd")
    q = probs.of(["b", "a", "c"], [2, 1, 1], torch.tensor([14, 15, 16, 9]))
    assert q is not None
    assert torch.allclose(q[:2], dense(b)) and torch.allclose(q[2:3], dense(again))
    # What is there in its place was not drawn.
    q = probs.of(["b"], [2], torch.tensor([14, 14]))
    assert q is not None
    assert torch.allclose(q[0], dense(b)[0]) and torch.equal(q[1], torch.eye(20)[14])
    # Where nothing was drawn no q is needed; vLLM's kernels take sums of 1 for granted.
    assert probs.of(["c"], [1], torch.tensor([9])) is None
    q = probs.of(["c", "a"], [1, 1], torch.tensor([-1, 16]))
    assert q is not None and torch.allclose(q.sum(1), torch.ones(2))
    # Drafted for by nothing meanwhile, and ended.
    probs.made(["a"], [[]], {}, "a")
    assert probs._waiting == {}


def test_sources_are_small(tmp_path: Path) -> None:
    """64 numbers a token, whatever the vocabulary."""
    each = drawing(twin(tmp_path / "wide", "llama", vocab_size=5000))
    each.propose(step({"a": text(20)}, sampling=rows(1)))
    one = each.sources["a"]
    sizes = [getattr(one, field.name).shape for field in dataclasses.fields(one)]
    assert sizes == [(4,), (4, CANDIDATES), (4, CANDIDATES)]
