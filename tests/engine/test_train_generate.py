"""Training text from a real engine, killed in the middle and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.support.training import tiny_target
from vllm_specx.setup import cpu
from vllm_specx.train import shards
from vllm_specx.train.generate import GIVEN, GREEDY, SAMPLED, GenerateSettings
from vllm_specx.train.hidden import HiddenSettings, HiddenStates

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def _group(child: subprocess.Popen[bytes], number: int) -> None:
    os.killpg(child.pid, number)


def _same_direction(recorded: np.ndarray, computed: np.ndarray) -> np.ndarray:
    a, b = (torch.from_numpy(x.copy()).view(torch.bfloat16).float() for x in (recorded, computed))
    return torch.nn.functional.cosine_similarity(a, b).numpy()


def test_engines_end_with_a_training_run_that_is_killed(tmp_path: Path) -> None:
    target, out = tiny_target(tmp_path / "target"), tmp_path / "out"
    command = [sys.executable, "-m", "vllm_specx.cli", "train", "medusa", "--target", str(target)]
    command += ["--out", str(out), "--tokens", "100000000", "--workers", "1"]
    log = (tmp_path / "log").open("w+")
    run = psutil.Popen(command, stderr=log)
    try:
        deadline = time.monotonic() + 400
        while len(started := run.children(recursive=True)) < 2 or not list(out.rglob(".rec*/st*")):
            assert run.poll() is None, Path(log.name).read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        run.kill()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def test_killed_generation_goes_on(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    settings = GenerateSettings(
        target=str(target), tokens=6000, max_answer=48, max_length=512, conversations=24, batch=16,
        own_share=0.2, follow_up_share=0.5,
    )  # fmt: skip
    file, folder, hidden = (tmp_path / name for name in ("settings.json", "text", "hidden"))
    file.write_text(settings.model_dump_json())
    environment, _ = cpu.environment(dict(os.environ), extra_flags=())
    command = [sys.executable, "-m", "vllm_specx.train.generate", str(file), str(folder), "0/1"]
    command += [str(hidden), "0,1"]
    child = subprocess.Popen(
        command, env={**os.environ, **environment}, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 400
        while len(shards.indices(folder, "text")) < 2:
            assert child.poll() is None, child.stderr and child.stderr.read().decode()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        _group(child, signal.SIGKILL)
    made = {
        i: shards.shard_path(folder, "text", i).read_bytes() for i in shards.indices(folder, "text")
    }
    damaged = shards.shard_path(folder, "text", 0)
    damaged.write_bytes(made[0][:-7])
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "text-00000" in done.stderr and "made anew" in done.stderr
    total = 0
    states = HiddenStates(HiddenSettings(target=str(target), dtype="float32", aux_layers=(0, 1)))
    for i in shards.indices(folder, "text"):
        shard = shards.read_shard(shards.shard_path(folder, "text", i))
        if 0 < i < len(made):
            assert shard.path.read_bytes() == made[i]
        arrays = shard.arrays
        assert arrays["offsets"][-1] == len(arrays["tokens"]) == len(arrays["source"])
        assert set(np.unique(arrays["source"])) <= {GIVEN, GREEDY, SAMPLED}
        assert int((arrays["source"] > 0).sum()) == int(shard.meta["generated"])
        assert set(json.loads(shard.meta["tasks"])) > {"code"}
        total += int(shard.meta["generated"])
        last, aux = states(arrays["tokens"], arrays["offsets"])
        read = np.setdiff1d(np.arange(len(arrays["tokens"])), arrays["offsets"][1:] - 1)
        inner = shards.read_shard(shards.shard_path(hidden, "aux", i)).arrays
        recorded = shards.read_shard(shards.shard_path(hidden, "hidden", i)).arrays["last"]
        for mine, computed in (
            (recorded, last), (inner["layer.1"], aux[1]), (inner["layer.0"], aux[0]),
        ):  # fmt: skip
            assert mine.shape == computed.shape
            same = _same_direction(mine[read], computed[read])
            # A follow-up that got no answer was not read.
            assert (same[same != 0] > 0.999).all()
            assert (same != 0).mean() > 0.95
            speaking = np.flatnonzero(arrays["source"]) - 1
            assert _same_direction(mine[speaking], computed[speaking]).min() > 0.999
    assert not list(hidden.glob(".recording*"))
    assert total >= 6000
    assert not list(folder.glob(".*"))
