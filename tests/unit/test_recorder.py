"""The file between the engine that records hidden states and the training that reads them."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.drafting import context
from vllm_specx.draft.proposer import VerifiedRows
from vllm_specx.engine.recorder import Recorder, collect, label, record_type

HIDDEN = 8


def _step(recorder: Recorder, requests: list[tuple[str | None, int, list[float], int]]) -> None:
    """requests: (pool, position of the first token read, values of the states, rows rejected)."""
    values = [v for _, _, states, _ in requests for v in states]
    last = torch.tensor(values)[:, None].expand(-1, HIDDEN)
    sizes = np.array([len(states) for _, _, states, _ in requests])
    rejected = np.array([r for *_, r in requests])
    step = context(
        torch.zeros(len(requests), HIDDEN),
        budgets=[1] * len(requests),
        pools=[pool for pool, *_ in requests],
        verified=VerifiedRows(
            states=(last, last + 100),
            first=(np.cumsum(sizes) - sizes).astype(np.int32),
            position=np.array([p for _, p, _, _ in requests], np.int32),
            count=(sizes - rejected).astype(np.int32),
        ),
    )
    assert all(len(draft.tokens) == 0 for draft in recorder.propose(step))


def _values(bits: np.ndarray | None) -> list[list[float]]:
    assert bits is not None
    return torch.from_numpy(bits[..., 0].copy()).view(torch.bfloat16).float().T.tolist()


def test_states_are_found_by_request_and_place(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    assert label(4) == {"specx_pool": "4"}
    # Prompts in one piece and in two, a request of somebody else, one that is cut short, and a
    # rejected row whose place is read again.
    _step(
        recorder,
        [("1", 0, [1, 2, 3], 0), (None, 0, [9], 0), ("0", 0, [4, 5], 0), ("2", 0, [8], 0)],
    )
    _step(recorder, [("0", 2, [6, 9], 1), ("default", 5, [9], 0), ("1", 3, [7], 0)])
    _step(recorder, [("0", 3, [10], 0)])
    found = collect(path, HIDDEN, 2, [5, 5, 3])
    assert _values(found[0]) == [[4, 5, 6, 10], [104, 105, 106, 110]]
    assert _values(found[1]) == [[1, 2, 3, 7], [101, 102, 103, 107]]
    assert found[2] is None
    assert path.stat().st_size == 0


def test_the_file_begins_anew_after_each_collection(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    _step(recorder, [("0", 0, [1, 2], 0)])
    collect(path, HIDDEN, 2, [3])
    _step(recorder, [("0", 0, [6], 0)])
    assert _values(collect(path, HIDDEN, 2, [2])[0]) == [[6], [106]]
    assert collect(path, HIDDEN, 2, [2]) == [None]


def test_what_was_read_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    _step(recorder, [("0", 0, [1, 2], 0)])
    _step(recorder, [("0", 0, [1, 2], 0)])
    assert collect(path, HIDDEN, 2, [4]) == [None]
    assert record_type(HIDDEN, 2).itemsize == 8 + 4 * HIDDEN


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "states"
    recorder = Recorder(path)
    size = record_type(HIDDEN, 2).itemsize
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="bytes could be written"):
            _step(recorder, [("0", 0, [1, 2, 3, 4, 5], 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 3 * size
    _step(recorder, [("1", 0, [6, 7], 0)])
    found = collect(path, HIDDEN, 2, [6, 3])
    assert found[0] is None
    assert _values(found[1]) == [[6, 7], [106, 107]]
