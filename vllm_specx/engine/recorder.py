"""Keeps the target's hidden states while it generates, so that training needs no second forward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.engine.pools import POOL_KEY
from vllm_specx.engine.proposers import EngineProposer

FILE_KEY = "specx_record"
"""In the additional config: the file that is appended to."""
CLASS = "vllm_specx.engine.recorder.RecordingProposer"
States = npt.NDArray[np.uint16]


def record_type(hidden_size: int) -> np.dtype[Any]:
    """One line of the file: request (`specx_pool`, a number), length (tokens, with the new one), and
    the state that the new token was sampled from, as bfloat16's bits."""
    return np.dtype([("request", "<i4"), ("length", "<i4"), ("state", "<u2", (hidden_size,))])


class Recorder:
    """Implements draft.proposer.Proposer without drafts: appends what it is shown to `path`."""

    needs_hidden_states: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        # Unbuffered and appending: the reader truncates the file between two calls of the engine.
        self._file = path.open("ab", buffering=0)

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """Nothing for every request."""
        assert context.hidden_states is not None
        kept = [
            (i, pool)
            for i, pool in enumerate(context.pools)
            if pool is not None and pool.isdecimal() and context.sampled[i]
        ]
        if kept:
            rows = torch.tensor([i for i, _ in kept], device=context.hidden_states.device)
            states = context.hidden_states[rows].to("cpu", torch.bfloat16)
            lines = np.empty(len(kept), record_type(states.shape[-1]))
            lines["request"] = [int(pool) for _, pool in kept]
            lines["length"] = [int(context.num_tokens[i]) for i, _ in kept]
            lines["state"] = states.view(torch.uint16).numpy()
            self._file.write(lines.tobytes())
        return [EMPTY_DRAFT] * len(context.request_ids)


class RecordingProposer(EngineProposer):
    """For vLLM's `custom_class`; not one of the methods that users choose (engine/offline.py)."""

    name = "recorder"

    def build(self) -> Proposer | None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        path = Path(self.vllm_config.additional_config[FILE_KEY])
        # Every rank has the same states.
        return Recorder(path if get_tensor_model_parallel_rank() == 0 else Path(os.devnull))


def engine_args(path: Path) -> dict[str, Any]:
    """Arguments of an engine that records to `path`."""
    return {
        "speculative_config": {
            "method": "custom_class", "model": CLASS, "num_speculative_tokens": 1,
        },
        "additional_config": {FILE_KEY: str(path)},
    }  # fmt: skip


def label(request: int) -> dict[str, Any]:
    """extra_args of a request that is recorded under this number."""
    return {POOL_KEY: str(request)}


def collect(path: Path, hidden_size: int, lengths: list[tuple[int, int]]) -> list[States | None]:
    """What was recorded since the last call; the file is empty afterwards.

    lengths: (tokens of the prompt, tokens generated) of request 0, 1, ...
    Returns for each uint16 [generated, hidden], the states its tokens were sampled from; None where
    one is missing.
    """
    lines = np.fromfile(path, record_type(hidden_size))
    with path.open("r+b") as file:
        file.truncate(0)
    found: list[States | None] = []
    order = np.argsort(lines["request"], kind="stable")
    edges = np.searchsorted(lines["request"][order], np.arange(len(lengths) + 1))
    for number, (prompt, generated) in enumerate(lengths):
        mine = order[edges[number] : edges[number + 1]]
        place = lines["length"][mine] - prompt - 1
        states = np.zeros((generated, hidden_size), np.uint16)
        inside = (place >= 0) & (place < generated)
        states[place[inside]] = lines["state"][mine[inside]]
        whole = len(np.unique(place[inside])) == generated
        found.append(states if whole else None)
    return found
