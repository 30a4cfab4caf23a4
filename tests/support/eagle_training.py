"""Cached states and a teacher for a text, made without a target, whose answers are what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vllm_specx.train import hidden, shards
from vllm_specx.train.generate import GREEDY, KIND, SAMPLED

FIRST, CYCLE, STRIDE = 20, 40, 7


def cycling_text(folder: Path, count: int, *, per_shard: int = 30, seed: int = 0) -> Path:
    """Shards of conversations in which one token always follows another."""
    random = np.random.default_rng(seed)
    for index in range(-(-count // per_shard)):
        tokens: list[int] = []
        source: list[int] = []
        offsets = [0]
        for _ in range(per_shard):
            start, given = int(random.integers(CYCLE)), int(random.integers(3, 9))
            length = int(random.integers(16, 40))
            spoken = GREEDY if random.random() < 0.7 else SAMPLED
            tokens += [FIRST + (start + i * STRIDE) % CYCLE for i in range(given + length)]
            source += [0] * given + [spoken] * length
            offsets.append(len(tokens))
        arrays: dict[str, np.ndarray] = {
            "tokens": np.array(tokens, np.int32),
            "source": np.array(source, np.uint8),
            "offsets": np.array(offsets, np.int64),
            "task": np.zeros(per_shard, np.uint8),
        }
        meta = {"tasks": '["cycle"]', "generated": str(sum(s > 0 for s in source))}
        shards.write_shard(shards.shard_path(folder, KIND, index), arrays, meta)
    return folder


def states_of(text: Path, folder: Path, embeddings: torch.Tensor, layers: tuple[int, ...]) -> Path:
    """Random auxiliary states, and last states from which lm_head (tied) says the next token."""
    random = torch.Generator().manual_seed(0)
    for index in shards.indices(text, KIND):
        tokens = shards.read_shard(shards.shard_path(text, KIND, index)).arrays["tokens"]
        last = embeddings[torch.from_numpy(tokens.astype(np.int64)).roll(-1)]
        aux = {
            layer: torch.randn(len(tokens), embeddings.shape[1], generator=random)
            for layer in layers
        }
        bits = {layer: _bits(state) for layer, state in aux.items()}
        hidden.write_states(folder, index, _bits(last), bits, tokens)
    return folder


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.bfloat16).view(torch.uint16).numpy()
