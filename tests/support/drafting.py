"""A decode step as proposers see it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support import synthetic_heads as synthetic
from vllm_specx.draft.proposer import DraftContext


def context(hidden: torch.Tensor, *, budgets: list[int], **changes: Any) -> DraftContext:
    """A decode step of len(hidden) requests with ten tokens each."""
    batch = len(hidden)
    tokens = np.arange(batch * 40, dtype=np.int32).reshape(batch, 40) % synthetic.VOCAB
    fields: dict[str, Any] = {
        "request_ids": [f"r{i}" for i in range(batch)],
        "rows": np.arange(batch, dtype=np.int32),
        "token_ids": tokens,
        "num_tokens": np.full(batch, 10, np.int32),
        "num_prompt_tokens": np.full(batch, 5, np.int32),
        "sampled": [[int(tokens[i, 9])] for i in range(batch)],
        "budgets": np.array(budgets, np.int32),
        "temperatures": np.zeros(batch, np.float32),
        "pools": [None] * batch,
        "finished": [],
        "vocab_size": synthetic.VOCAB,
        "hidden_states": hidden,
        **changes,
    }
    return DraftContext(**fields)
