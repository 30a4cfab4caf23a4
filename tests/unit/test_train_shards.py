"""Shards: whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_specx.train import shards
from vllm_specx.train.errors import TrainError


def _arrays() -> shards.Arrays:
    return {
        "tokens": np.arange(1000, dtype=np.int32),
        "hidden": np.arange(600, dtype=np.uint16).reshape(100, 6),
        "empty": np.zeros(0, np.uint8),
    }


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = shards.shard_path(tmp_path, "text", 7)
    shards.write_shard(path, _arrays(), {"generated": "12"})
    shard = shards.read_shard(path)
    assert shard.meta["generated"] == "12"
    for name, array in _arrays().items():
        assert np.array_equal(shard.arrays[name], array)
        assert shard.arrays[name].dtype == array.dtype
    assert shards.indices(tmp_path, "text") == [7]


def test_it_is_safetensors(tmp_path: Path) -> None:
    path = shards.shard_path(tmp_path, "text", 0)
    arrays = _arrays()
    shards.write_shard(path, arrays, {})
    assert np.array_equal(load_file(path)["tokens"], arrays["tokens"])


@pytest.mark.parametrize("keep", [0, 5, 100, 500, -1])
def test_a_truncated_shard_is_broken(tmp_path: Path, keep: int) -> None:
    path = shards.shard_path(tmp_path, "text", 0)
    shards.write_shard(path, _arrays(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(shards.BrokenShard):
        shards.read_shard(path, check=False)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = shards.shard_path(tmp_path, "text", 0)
    shards.write_shard(path, _arrays(), {})
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(shards.BrokenShard, match="checksum"):
        shards.read_shard(path)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(RuntimeError), shards.atomic(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import sys
import numpy as np
from pathlib import Path
from vllm_specx.train import shards
from vllm_specx.train.errors import TrainError
folder = Path(sys.argv[1])
for i in range(100):
    try:
        shards.write_shard(
            shards.shard_path(folder, "text", i), {"x": np.ones(100_000, np.uint8)}, {}
        )
    except TrainError as error:
        print(error)
        break
for i in shards.indices(folder, "text"):
    shards.read_shard(shards.shard_path(folder, "text", i))
print(len(shards.indices(folder, "text")), [p.name for p in folder.iterdir() if p.name[0] == "."])
"""


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    mounted = "mount -t tmpfs -o size=1m none " + str(tmp_path)
    command = f'{mounted} && exec "$@"'
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            command,
            "sh",
            sys.executable,
            "-c",
            FULL_DISK,
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("may not mount a small file system")
    sentence, rest = done.stdout.splitlines()
    assert "no room left" in sentence and "make room" in sentence
    whole, leftovers = rest.split(" ", 1)
    assert 5 <= int(whole) <= 10
    assert leftovers == "[]"


def test_settings_are_not_mixed(tmp_path: Path) -> None:
    shards.check_fingerprint(tmp_path, "text", {"seed": 1, "target": "a"})
    shards.check_fingerprint(tmp_path, "text", {"seed": 1, "target": "a"})
    with pytest.raises(TrainError, match="seed 1, not 2"):
        shards.check_fingerprint(tmp_path, "text", {"seed": 2, "target": "a"})
