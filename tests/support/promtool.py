"""promtool, of the Debian package prometheus: the machine's, or one that is unpacked into the cache."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_specx.models.embedded import cache_root


def promtool() -> str:
    """Its path; skips where it cannot be had. Needs neither root nor an installation."""
    if found := shutil.which("promtool"):
        return found
    folder = cache_root() / "prometheus"
    program = folder / "usr" / "bin" / "promtool"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _unpack(folder)
    return str(program)


def _unpack(folder: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("promtool is not installed, and there is no apt-get to get it with")
    done = subprocess.run(
        ["apt-get", "download", "prometheus"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if done.returncode or not packages:
        pytest.skip(f"the Debian package prometheus cannot be had here: {done.stderr[-200:]}")
    subprocess.run(["dpkg", "-x", str(packages[0]), str(folder)], check=True)
    packages[0].unlink()
