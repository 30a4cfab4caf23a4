"""The file between the engine that records hidden states and the training that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.support.drafting import context
from vllm_specx.engine.recorder import Recorder, collect, label, record_type

HIDDEN = 8


def _step(recorder: Recorder, requests: list[tuple[str | None, int, list[int], float]]) -> None:
    """requests: (pool, tokens with the new one, sampled, value of its state)."""
    states = torch.tensor([[value] * HIDDEN for *_, value in requests], dtype=torch.float32)
    step = context(
        states,
        budgets=[1] * len(requests),
        num_tokens=np.array([length for _, length, _, _ in requests], np.int32),
        sampled=[sampled for _, _, sampled, _ in requests],
        pools=[pool for pool, *_ in requests],
    )
    assert all(len(draft.tokens) == 0 for draft in recorder.propose(step))


def _values(bits: np.ndarray) -> list[float]:
    return torch.from_numpy(bits[:, 0].copy()).view(torch.bfloat16).float().tolist()


def test_states_are_found_by_request_and_place(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    assert label(4) == {"specx_pool": "4"}
    # Two requests with prompts of 3 and 5 tokens; the third is in the middle of its prompt, the
    # fourth belongs to somebody else.
    _step(
        recorder, [("0", 4, [7], 1.0), ("1", 6, [7], 2.0), ("2", 9, [], 9.0), (None, 4, [7], 9.0)]
    )
    _step(recorder, [("1", 7, [7], 3.0), ("0", 5, [7], 4.0), ("default", 5, [7], 9.0)])
    _step(recorder, [("0", 6, [7], 5.0)])
    found = collect(path, HIDDEN, [(3, 3), (5, 2), (9, 1)])
    assert found[0] is not None and _values(found[0]) == [1.0, 4.0, 5.0]
    assert found[1] is not None and _values(found[1]) == [2.0, 3.0]
    assert found[2] is None
    assert path.stat().st_size == 0


def test_the_file_begins_anew_after_each_collection(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    _step(recorder, [("0", 4, [7], 1.0)])
    collect(path, HIDDEN, [(3, 1)])
    _step(recorder, [("0", 3, [7], 6.0)])
    found = collect(path, HIDDEN, [(2, 1)])
    assert found[0] is not None and _values(found[0]) == [6.0]


def test_missing_states_are_not_taken_for_zeros(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    _step(recorder, [("0", 4, [7], 1.0)])
    _step(recorder, [("0", 6, [7], 1.0)])
    assert collect(path, HIDDEN, [(3, 3)]) == [None]
    assert record_type(HIDDEN).itemsize == 8 + 2 * HIDDEN
