"""The ways around vLLM's rejection sampler; that they change no distribution is tested on engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from vllm_specx.engine import shims


@pytest.mark.parametrize(
    ("counts", "passed_on"), [([0, 0], False), ([0, 2], True), ([], False), (None, False)]
)
def test_only_drafts_go_through_the_rejection_sampler(
    counts: list[int] | None, passed_on: bool
) -> None:
    metadata = None if counts is None else SimpleNamespace(num_draft_tokens=counts)
    seen: list[Any] = []

    def original(runner: str, logits: torch.Tensor, metadata: Any) -> SimpleNamespace:
        seen.append((runner, metadata))
        return SimpleNamespace(sampled_token_ids=torch.tensor([[3], [5]]))

    output = shims._sample(original, "runner", torch.zeros(2, 8), metadata)
    assert seen == [("runner", metadata if passed_on else None)]
    assert output.sampled_token_ids.tolist() == [[3], [5]]
    if metadata is not None and not passed_on:
        assert output.sampled_token_ids.dtype == torch.int32  # what the rejection sampler gives


@pytest.mark.parametrize("certain", [True, False])
def test_a_rejected_draft_is_replaced_from_the_residual(certain: bool) -> None:
    """Chi-square against max(p - q, 0) made to sum to one; false alarms in one run of a million."""
    random = torch.Generator().manual_seed(1)
    p = torch.rand(12, generator=random).pow(3)
    p[[4, 9]] = 0.0
    p /= p.sum()
    q = torch.zeros(12)
    q[2] = 1.0
    if not certain:
        q = torch.rand(12, generator=random)
        q /= q.sum()
    torch.manual_seed(2)
    many = 50_000
    drafts = torch.full((many,), 2, dtype=torch.int32)
    tokens = shims.sample_residual(
        p.repeat(many, 1), drafts, None if certain else q.repeat(many, 1)
    )
    residual = (p.double() - q.double()).clamp(min=0.0)
    expected = residual / residual.sum() * many
    counts = torch.bincount(tokens, minlength=12)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    result = stats.chisquare(counts[possible].numpy(), expected[possible].numpy())
    assert result.pvalue > 1e-6


def test_residuals_of_nothing_and_of_forbidden_drafts() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]])
    tokens = shims.sample_residual(p, torch.tensor([1, -1, 2]), None)
    assert 0 <= int(tokens[0]) < 3  # never asked for: the draft was right for certain
    assert int(tokens[1]) == 2  # a grammar's -1 takes nothing away
    assert int(tokens[2]) in (0, 1)
    assert shims.sample_residual(
        torch.empty(0, 3), torch.empty(0, dtype=torch.int32), None
    ).shape == (0,)
