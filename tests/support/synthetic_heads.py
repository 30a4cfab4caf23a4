"""Synthetic draft-head checkpoints in every layout that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, HEADS, LAYERS = 32, 200, 3, 2


def blocks(seed: int = 0, heads: int = HEADS, layers: int = LAYERS) -> torch.Tensor:
    """float32 [heads, layers, HIDDEN, HIDDEN]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, layers, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5


def lm_heads(seed: int = 1, count: int = HEADS, rows: int = VOCAB) -> torch.Tensor:
    """float32 [count, rows, HIDDEN]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, rows, HIDDEN, generator=generator)


def old_names(prefix: str = "", bias: bool = True, own: bool = True) -> dict[str, torch.Tensor]:
    """FasterDecoding's names."""
    named = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            named[f"{prefix}{head}.{layer}.linear.weight"] = blocks()[head, layer].clone()
            if bias:
                named[f"{prefix}{head}.{layer}.linear.bias"] = torch.full((HIDDEN,), 0.1 * head)
        if own:
            named[f"{prefix}{head}.{LAYERS}.weight"] = lm_heads()[head].clone()
    return named


def vllm_names(rows: int = VOCAB, shared: bool = True) -> dict[str, torch.Tensor]:
    """vLLM 0.32's names."""
    named = {
        f"blocks.{head}.layers.{layer}.weight": blocks()[head, layer].clone()
        for head in range(HEADS)
        for layer in range(LAYERS)
    }
    if shared:
        named["lm_head.weight"] = lm_heads(count=1, rows=rows)[0]
    else:
        named |= {f"lm_heads.{h}.weight": lm_heads(rows=rows)[h].clone() for h in range(HEADS)}
    return named


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm_config(**changes: Any) -> dict[str, Any]:
    """What vLLM 0.32 wants to read."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "original_lm_head": True,
        **changes,
    }
