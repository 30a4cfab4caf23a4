"""Room on the disk for what a run keeps of the target: known before hours of work, not after."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_specx.train import hidden, shards, teacher
from vllm_specx.train.errors import TrainError
from vllm_specx.train.generate import KIND as TEXT
from vllm_specx.train.generate import GenerateSettings

TOKENS_A_GENERATED = 1.4
"""Tokens of conversations for each that the target says in them, while there are none to count: 1.37
in 3,844 conversations of SmolLM2-135M-Instruct with the built-in prompts."""
_CONVERSATION = 250
"""Tokens of one of these."""
_TEACHER_BYTES = teacher.TOP * 8
_GIB = 2**30


@dataclass(frozen=True)
class Kept:
    """What is kept of each token: `kinds` states of `size` bfloat16 values, and the teacher or not."""

    kinds: int
    size: int
    taught: bool

    @property
    def states(self) -> int:
        """Bytes."""
        return 2 * self.kinds * self.size


def needed(
    kept: Kept, text: Path, states: Path, settings: GenerateSettings | None, workers: int
) -> tuple[int, int]:
    """(tokens whose states are missing, bytes that these and the missing part of the teacher take).

    text, states: folders of shards, complete or not, or not there yet.
    settings: of the text that is made; None if it is all there. workers: how many record at a time.
    """
    have = generated = bare = untaught = 0
    for index in shards.indices(text, TEXT):
        try:
            shard = shards.read_shard(shards.shard_path(text, TEXT, index), check=False)
        except shards.BrokenShard:
            continue
        size = len(shard.arrays["tokens"])
        have += size
        generated += int(shard.meta["generated"])
        bare += size * (not shards.shard_path(states, hidden.LAST, index).exists())
        untaught += size * (not shards.shard_path(states, teacher.KIND, index).exists())
    left = 0 if settings is None else max(0, settings.tokens - generated)
    coming = math.ceil(left * (have / generated if generated else TOKENS_A_GENERATED))
    bare += coming
    untaught += coming
    recorded = 0
    if settings is not None and left:
        recorded = workers * min(settings.conversations * _CONVERSATION, coming)
    return bare, (bare + recorded) * kept.states + kept.taught * untaught * _TEACHER_BYTES


def require(
    kept: Kept, text: Path, states: Path, settings: GenerateSettings | None, workers: int
) -> None:
    """Say how much will be written; arguments as of needed(). Raise TrainError if it does not fit."""
    tokens, size = needed(kept, text, states, settings, workers)
    if not size:
        return
    place = next(folder for folder in (states, *states.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    said = (
        f"the target's states of about {tokens} tokens take {size / _GIB:.2f} GiB in {states}, "
        f"where {free / _GIB:.2f} GiB are free"
    )
    if size > free:
        fewer = "" if settings is None else ", or ask for fewer --tokens"
        raise TrainError(f"{said}; make room, take an --out on another disk{fewer}.")
    print(f"vllm-specx: {said}.", file=sys.stderr)
