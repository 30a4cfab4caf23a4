"""A Llama of a few hundred thousand random weights: sampling it thousands of times takes seconds."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB = 1003
"""Not a multiple of anything a kernel may like."""
SPREAD = 4.0
"""Standard deviation of the logits: a handful of tokens has most of the probability."""


def tiny_llama(folder: Path, silent: bool = False) -> str:
    """Make the checkpoint; its next-token distribution depends on the context, above all its end.

    silent: all logits are equal, so that at T=0 it says token 0 for ever.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.0 if silent else SPREAD / config.hidden_size**0.5)
    model.save_pretrained(folder)
    return str(folder)
