"""The ways around vLLM's rejection sampler; that they change no distribution is tested on engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
