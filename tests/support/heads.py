"""Draft-head checkpoints made on the spot, in FasterDecoding's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def random_heads(folder: Path, hidden: int, heads: int = 4, spread: float = 0.05) -> str:
    """Residual blocks of random weights: their drafts are all but always wrong."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{head}.0.linear.weight": torch.randn(hidden, hidden, generator=generator) * spread
        for head in range(heads)
    }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return str(folder)
