"""Keeps the target's hidden states while it generates, so that training needs no second forward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.engine.pools import POOL_KEY
from vllm_specx.engine.proposers import EngineProposer

KEY = "specx_record"
"""In the additional config: {"file": appended to, "aux_layers": [...]}."""
CLASS = "vllm_specx.engine.recorder.RecordingProposer"
States = npt.NDArray[np.uint16]


def record_type(hidden_size: int, kinds: int) -> np.dtype[Any]:
    """One line of the file: request (`specx_pool`, a number), position of the token that was read,
    and the states after it as bfloat16's bits: the last one, then each auxiliary layer's."""
    return np.dtype(
        [("request", "<i4"), ("position", "<i4"), ("states", "<u2", (kinds, hidden_size))]
    )


class Recorder:
    """Implements draft.proposer.Proposer without drafts: appends what it is shown to `path`."""

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = True
    draft_steps: ClassVar[int] = 0

    def __init__(self, path: Path) -> None:
        # Unbuffered and appending: the reader truncates the file between two calls of the engine.
        self._file = path.open("ab", buffering=0)

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """Nothing for every request."""
        verified = context.verified
        assert verified is not None
        kept = [
            i
            for i, pool in enumerate(context.pools)
            if pool is not None and pool.isdecimal() and verified.count[i]
        ]
        if kept:
            count = verified.count[kept]
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            rows = torch.from_numpy(np.repeat(verified.first[kept], count) + within)
            states = torch.stack(
                [
                    state[rows.to(state.device)].to("cpu", torch.bfloat16)
                    for state in verified.states
                ],
                1,
            )
            lines = np.empty(len(rows), record_type(states.shape[-1], states.shape[1]))
            lines["request"] = np.repeat([int(str(context.pools[i])) for i in kept], count)
            lines["position"] = np.repeat(verified.position[kept], count) + within
            lines["states"] = states.view(torch.uint16).numpy()
            self._append(lines.tobytes(), lines.itemsize)
        return [EMPTY_DRAFT] * len(context.request_ids)

    def _append(self, lines: bytes, size: int) -> None:
        """Whole lines or none; raises OSError where the disk is full."""
        written = self._file.write(lines)
        if written != len(lines):
            self._file.truncate(self._file.tell() // size * size)
            raise OSError(f"only {written} of {len(lines)} bytes could be written")


class RecordingProposer(EngineProposer):
    """For vLLM's `custom_class`; not one of the methods that users choose (engine/offline.py)."""

    name = "recorder"

    def build(self) -> Proposer | None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        given = self.vllm_config.additional_config[KEY]
        self.aux_layers = tuple(given["aux_layers"])
        # Every rank has the same states.
        first = get_tensor_model_parallel_rank() == 0
        return Recorder(Path(given["file"] if first else os.devnull))

    def states(
        self, last: torch.Tensor, auxiliary: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, ...]:
        return (last, *(auxiliary or ()))


def engine_args(path: Path, aux_layers: Sequence[int]) -> dict[str, Any]:
    """Arguments of an engine that records to `path`; nothing is skipped as a known prefix."""
    return {
        "speculative_config": {
            "method": "custom_class", "model": CLASS, "num_speculative_tokens": 1,
        },
        "additional_config": {KEY: {"file": str(path), "aux_layers": list(aux_layers)}},
        "enable_prefix_caching": False,
    }  # fmt: skip


def label(request: int) -> dict[str, Any]:
    """extra_args of a request that is recorded under this number."""
    return {POOL_KEY: str(request)}


def collect(
    path: Path, hidden_size: int, kinds: int, lengths: Sequence[int]
) -> list[States | None]:
    """What was recorded since the last call; the file is empty afterwards.

    lengths: tokens of request 0, 1, ..., prompt and answer.
    Returns for each uint16 [length - 1, kinds, hidden]: the last token was not read any more; None
    where a state is missing.
    """
    form = record_type(hidden_size, kinds)
    size = path.stat().st_size // form.itemsize
    # Mapped: the states of one shard of a large target are gigabytes.
    lines = np.memmap(path, form, "r", shape=(size,)) if size else np.empty(0, form)
    requests, positions = np.array(lines["request"]), np.array(lines["position"])
    order = np.argsort(requests, kind="stable")
    edges = np.searchsorted(requests[order], np.arange(len(lengths) + 1))
    found: list[States | None] = []
    for number, length in enumerate(lengths):
        mine = order[edges[number] : edges[number + 1]]
        inside = mine[(positions[mine] >= 0) & (positions[mine] < length - 1)]
        states = np.zeros((length - 1, kinds, hidden_size), np.uint16)
        states[positions[inside]] = lines["states"][inside]
        whole = len(np.unique(positions[inside])) == length - 1
        found.append(states if whole else None)
    del lines
    with path.open("r+b") as file:
        file.truncate(0)
    return found
