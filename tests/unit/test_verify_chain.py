"""The rule for drawn chains, by going through all drafts of a small vocabulary; and how long they may be."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specx.draft.sampled_drafts import SampledRule
from vllm_specx.verify.chain import acceptance, residual, said

VOCAB, DEPTH = 3, 3
Model = dict[tuple[int, ...], torch.Tensor]
Lengths = Callable[[Model, tuple[int, ...]], int]


def model(seed: int, *, sharp: float = 1.0, zeros: bool = False) -> Model:
    """A distribution after each beginning of up to DEPTH tokens."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for size in range(DEPTH + 1):
        for before in itertools.product(range(VOCAB), repeat=size):
            row = torch.rand(VOCAB, generator=random, dtype=torch.float64) ** sharp
            if zeros:
                row[int(torch.randint(VOCAB, (1,), generator=random))] = 0.0
            made[before] = row / row.sum()
    return made


def chance(of: Model, tokens: tuple[int, ...]) -> float:
    found = 1.0
    for i, token in enumerate(tokens):
        found *= float(of[tokens[:i]][token])
    return found


def distribution(p: Model, q: Model, length: Lengths) -> dict[tuple[int, ...], float]:
    """Of DEPTH tokens: what a step with a draft of q commits, and after it what p says."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for draft in itertools.product(range(VOCAB), repeat=DEPTH):
        drawn = chance(q, draft)
        kept = draft[: length(q, draft)] if drawn else ()
        beginnings = [draft[:i] for i in range(len(kept) + 1)]
        for tokens, probability in said(
            kept, [p[b] for b in beginnings], [q[b] for b in beginnings]
        ).items():
            for rest in itertools.product(range(VOCAB), repeat=DEPTH - len(tokens[:DEPTH])):
                whole = (*tokens[:DEPTH], *rest)
                after = chance(p, whole) / max(chance(p, tokens[:DEPTH]), 1e-300)
                found[whole] += drawn * probability * after
    return found


def error(p: Model, q: Model, length: Lengths) -> float:
    """The largest difference from what p says alone."""
    got = distribution(p, q, length)
    assert sum(got.values()) == pytest.approx(1.0)
    return max(abs(got[t] - chance(p, t)) for t in itertools.product(range(VOCAB), repeat=DEPTH))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_said_has_the_targets_distribution(seed: int, zeros: bool) -> None:
    p, q = model(seed, sharp=2.0), model(seed + 50, sharp=3.0, zeros=zeros)
    for length in range(DEPTH + 1):
        assert error(p, q, lambda *_, n=length: n) < 1e-12
    certain = {
        before: torch.eye(VOCAB, dtype=torch.float64)[row.argmax()] for before, row in q.items()
    }
    assert error(p, certain, lambda *_: DEPTH) < 1e-12
    assert error(p, p, lambda *_: DEPTH) < 1e-12


def test_usual_faults_are_seen() -> None:
    """A residual of p without the token, as for drafts that are certain; q that was not sampled from."""
    p, q, other = model(1, sharp=2.0), model(51, sharp=3.0), model(52, sharp=3.0)
    found: dict[int, float] = defaultdict(float)
    for token in range(VOCAB):
        drawn, accepted = float(q[()][token]), float(acceptance(p[()], q[()])[token])
        without = p[()].clone()
        without[token] = 0.0
        for i in range(VOCAB):
            found[i] += drawn * (
                accepted * (i == token) + (1 - accepted) * float(without[i] / without.sum())
            )
    assert max(abs(found[i] - float(p[()][i])) for i in range(VOCAB)) > 0.01
    wrong = sum(
        float(q[()][d]) * probability
        for d in range(VOCAB)
        for tokens, probability in said((d,), [p[()], p[(d,)]], [other[()]]).items()
        if tokens[0] == 0
    )
    assert abs(wrong - float(p[()][0])) > 0.01
    assert residual(p[()], q[()]).sum() == pytest.approx(1.0)


def grown(rule: SampledRule, costs: Any, at_last: bool) -> Lengths:
    """How much of a chain is proposed, beside one of another request. at_last: by a look at all of it,
    as chains may be that are not drawn."""
    other = [0.6, 0.5, 0.45]

    def length(q: Model, draft: tuple[int, ...]) -> int:
        likely = [float(q[draft[:i]].max()) for i in range(DEPTH)]
        probabilities = np.array([likely, other], np.float32)
        budgets = np.full(2, DEPTH, np.int32)
        context: Any = SimpleNamespace(costs=costs, request_ids=["r", "other"])
        context.after = lambda forwards: context
        decide = rule.lengths if at_last else rule.as_it_grew
        return int(decide(probabilities, budgets, context)[0])

    return length


def test_lengths_that_look_ahead_change_what_is_said_and_ours_do_not() -> None:
    rule = SampledRule(DEPTH, min_probability=None, token_cost=None, on_cpu=True)
    rule.drawn = np.array([True, True])
    worst = 0.0
    seen = set()
    for seed in range(12):
        p, q = model(seed, sharp=2.0), model(seed + 50, sharp=3.0)
        random = np.random.default_rng(seed)
        costs = 1.0 + np.cumsum(random.random(7) * [0.0, 0.9, 0.1, 0.5, 0.1, 0.4, 0.4])
        ours = grown(rule, costs, at_last=False)
        seen |= {ours(q, draft) for draft in itertools.product(range(VOCAB), repeat=DEPTH)}
        assert error(p, q, ours) < 1e-12, seed
        worst = max(worst, error(p, q, grown(rule, costs, at_last=True)))
    assert len(seen) > 2, "every chain had the same length"
    assert worst > 1e-3, "nothing here depends on a look ahead"
    cut = lambda q, draft: next((i for i in range(DEPTH) if q[draft[:i]][draft[i]] < 0.4), DEPTH)  # noqa: E731
    assert error(model(1, sharp=2.0), model(51, sharp=3.0), cut) > 1e-3
