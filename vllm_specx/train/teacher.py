"""What the target says after each token: its most probable tokens, computed once from the cached states.

For each shard of hidden states (hidden.py) the same folder gets
    teacher-00000.safetensors  ids int32 [T, TOP] and probabilities float32 [T, TOP], descending, of
        the token after each position; zeros where the target does not speak next.
The probabilities are those of the whole vocabulary, so that they serve any draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vllm_specx.train import hidden, shards
from vllm_specx.train.compute import fastest_dtype
from vllm_specx.train.generate import KIND as TEXT
from vllm_specx.train.loss import CHUNK
from vllm_specx.train.target import TargetWeights

KIND = "teacher"
TOP = 32
"""Tokens kept a position: 96% of the probability on average in SmolLM2-135M's greedy answers."""


def make(
    target: TargetWeights,
    text: Path,
    states: Path,
    device: str,
    report: Callable[[int, int], None],
) -> None:
    """Make `states` hold the teacher of every shard; a killed run goes on after the last whole one.

    report: told (tokens, of tokens). Raises TrainError if the disk is full.
    """
    shards.check_fingerprint(states, KIND, {"top": TOP})
    lm_head = target.lm_head.to(device, fastest_dtype(device))
    texts = {
        i: shards.read_shard(shards.shard_path(text, TEXT, i)).arrays
        for i in shards.indices(text, TEXT)
    }
    done, total = 0, sum(len(arrays["tokens"]) for arrays in texts.values())
    for index, said in texts.items():
        if not hidden.whole(states, index, [KIND], said["tokens"]):
            path = shards.shard_path(states, hidden.LAST, index)
            last = shards.read_shard(path, check=False).arrays["last"]
            speaks = np.flatnonzero(said["source"][1:] > 0)
            ids = np.zeros((len(last), TOP), np.int32)
            probabilities = np.zeros((len(last), TOP), np.float32)
            for begin in range(0, len(speaks), CHUNK):
                rows = speaks[begin : begin + CHUNK]
                state = torch.from_numpy(last[rows]).view(torch.bfloat16).to(lm_head)
                ids[rows], probabilities[rows] = _top(state, lm_head)
                report(done + int(rows[-1]), total)
            arrays = {"ids": ids, "probabilities": probabilities}
            made_from = hidden.of_text(said["tokens"])
            shards.write_shard(shards.shard_path(states, KIND, index), arrays, made_from)
        done += len(said["tokens"])
        report(done, total)


@torch.inference_mode()
def _top(state: torch.Tensor, lm_head: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    logits = (state @ lm_head.T).float()
    values, ids = logits.topk(TOP, -1)
    total = torch.logsumexp(logits, -1, keepdim=True)
    return ids.int().cpu().numpy(), (values - total).exp().cpu().numpy()
