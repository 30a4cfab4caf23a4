"""Numbered files of arrays that are whole or absent, so that killed work goes on where it was."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specx.train.errors import TrainError

Arrays = dict[str, npt.NDArray[Any]]
_DTYPES: dict[str, Any] = {
    "U8": np.uint8,
    "U16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
    "F32": np.float32,
}
"""safetensors' names. U16 holds bfloat16's bits, which NumPy does not know."""
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_NUMBERED = re.compile(r"-(\d{5})\.safetensors$")


class BrokenShard(Exception):
    """A shard that is truncated or damaged; it is made anew."""


@dataclass(frozen=True)
class Shard:
    """One file in the safetensors format; its header carries a checksum of the data."""

    path: Path
    meta: dict[str, str]
    arrays: Arrays
    """Read-only memory maps."""


def shard_path(folder: Path, kind: str, index: int) -> Path:
    """`folder/kind-00007.safetensors`."""
    return folder / f"{kind}-{index:05d}.safetensors"


def indices(folder: Path, kind: str) -> list[int]:
    """The numbers of the shards that are there."""
    found = (_NUMBERED.search(path.name) for path in folder.glob(f"{kind}-*.safetensors"))
    return sorted(int(match.group(1)) for match in found if match)


def write_shard(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, str]
) -> None:
    """Write arrays and metadata; the file appears under its name only when all of it is on the disk.

    Raises TrainError if the disk is full or cannot be written.
    """
    header: dict[str, Any] = {}
    offset, checksum = 0, 0
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    for name, array in contiguous.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        checksum = zlib.crc32(array.data.cast("B") if array.nbytes else b"", checksum)
        offset = end
    header["__metadata__"] = {**meta, "crc32": f"{checksum:08x}"}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in contiguous.values():
            file.write(array.data.cast("B") if array.nbytes else b"")


def read_shard(path: Path, *, check: bool = True) -> Shard:
    """Map a shard. check: compare the checksum too, which reads all of it; the size is always compared.

    Raises BrokenShard.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 1 << 24:
                raise ValueError("no header")
            header = json.loads(file.read(length))
        meta = dict(header.pop("__metadata__"))
        start = 8 + length
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != start + end:
            raise ValueError("it has not its full size")
        data = (
            np.memmap(path, np.uint8, "r", offset=start, shape=(end,))
            if end
            else np.empty(0, np.uint8)
        )
        if check and f"{zlib.crc32(data.data):08x}" != meta["crc32"]:
            raise ValueError("its checksum is wrong")
        arrays = {
            name: data[slice(*entry["data_offsets"])]
            .view(_DTYPES[entry["dtype"]])
            .reshape(entry["shape"])
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BrokenShard(f"{path}: {error}") from None
    return Shard(path, meta, arrays)


class atomic:
    """`with atomic(path) as file`: a binary file that takes its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Any:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise disk_error(error, self._path) from None
        return self._file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if error is None:
                os.replace(self._temporary, self._path)
                return
        except OSError as failed:
            error = failed
        self._temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, self._path) from None


def disk_error(error: OSError, path: Path) -> TrainError:
    """The sentence for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TrainError(
            f"there is no room left for {path}; make room and give the same command again, "
            "what is complete is kept."
        )
    return TrainError(f"{path} cannot be written: {error.strerror or error}.")


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders of writers that were killed."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_fingerprint(folder: Path, kind: str, fingerprint: Mapping[str, Any]) -> None:
    """Note what the shards in `folder` are made from, or compare with what is noted.

    Raises TrainError when it differs: shards of two configurations are never mixed.
    """
    path = folder / f"{kind}.json"
    wanted = json.loads(json.dumps(fingerprint))
    if path.exists():
        try:
            noted = json.loads(path.read_text())
        except (OSError, ValueError):
            raise TrainError(
                f"{path} cannot be read; delete the folder {folder} to start anew."
            ) from None
        if noted != wanted:
            keys = sorted(key for key in {*noted, *wanted} if noted.get(key) != wanted.get(key))
            key = keys[0]
            raise TrainError(
                f"{folder} was made with {key} {noted.get(key)!r}, not {wanted.get(key)!r}; "
                "use the same settings, or another output folder."
            )
        return
    with atomic(path) as file:
        file.write(json.dumps(wanted, indent=2).encode() + b"\n")
