"""A Llama of a few hundred thousand random weights: sampling it thousands of times takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 1003
"""Not a multiple of anything a kernel may like."""
SPREAD = 4.0
"""Standard deviation of the logits: a handful of tokens has most of the probability."""


def tiny_llama(folder: Path, silent: bool = False) -> str:
    """Make the checkpoint; its next-token distribution depends on the context, above all its end.

    silent: all logits are equal, so that at T=0 it says token 0 for ever.
    """
    return _saved(folder, _llama(0.0 if silent else SPREAD))


def attentive_llama(folder: Path) -> str:
    """One with grouped queries whose next token depends on all of its context and on positions, so that a
    wrong mask, position or cache entry shows at once."""
    changes = {"num_attention_heads": 4, "head_dim": 64}
    model = _llama(SPREAD, (("q", 6.0), ("k", 6.0), ("v", 10.0), ("o", 10.0)), **changes)
    return _saved(folder, model)


def _llama(spread: float, scales: Sequence[tuple[str, float]] = (), **changes: int) -> Any:
    """scales: of the attention's projections. spread: of the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**{**shape, **changes})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for part, scale in scales:
                getattr(layer.self_attn, f"{part}_proj").weight.mul_(scale)
        model.lm_head.weight.normal_(std=spread / config.hidden_size**0.5)
    return model


def _saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    return str(folder)
