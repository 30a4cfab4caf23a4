"""The CPU kernel of tree attention: compiled once a machine, with the compiler that torch.compile needs too."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.models.embedded import cache_root

logger = logging.getLogger(f"vllm.{__name__}")

SOURCE = Path(__file__).parent / "kernels" / "tree_rows.cpp"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared", "-std=c++17")
_DTYPES = (torch.float32, torch.bfloat16)
_SIXTEEN = 16
"""The kernel's vectors hold so many values."""

Longs = npt.NDArray[np.int64]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None where there is no C++ compiler, said once."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning("vllm_specx: no C++ compiler, so draft trees use slower attention.")
        return None
    source = SOURCE.read_bytes()
    key = repr((source, _FLAGS, compiler, platform.machine(), _processor()))
    name = f"tree_rows-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.so"
    folder = cache_root() / "kernels"
    made = folder / name
    try:
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                new = Path(scratch) / name
                subprocess.run(
                    [compiler, *_FLAGS, "-o", str(new), str(SOURCE)],
                    check=True,
                    capture_output=True,
                    timeout=120,
                )
                new.replace(made)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        logger.warning(
            "vllm_specx: the kernel of tree attention could not be compiled, so draft trees use slower "
            "attention: %s",
            detail.decode(errors="replace").strip().splitlines()[-1:],
        )
        return None


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    )


def takes(dtype: torch.dtype, head_dim: int, block: int) -> bool:
    """Whether the kernel can be used for a model."""
    fits = head_dim % _SIXTEEN == 0 and block % (2 * _SIXTEEN) == 0
    return dtype in _DTYPES and fits and library() is not None


def tree_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    first: Longs,
    rows: Longs,
    context: Longs,
    request: Longs,
    block_table: torch.Tensor,
    visible: npt.NDArray[np.uint8],
    out: torch.Tensor,
) -> None:
    """Write the answers of all trees' rows into `out`.

    q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; kv_cache [blocks, kv_heads, block,
    2 * head_dim] as vLLM's CPU_ATTN keeps it for isa "vec"; float32 or bfloat16, the last dimension
    contiguous. Of each tree, int64: its first row in q, how many rows, committed tokens before it, its row
    of block_table int32 [requests, blocks]. visible: uint8, the masks [rows, rows] one after the other.
    """
    kernel = library()
    assert kernel is not None
    _, kv_heads, block, double = kv_cache.shape
    sizes = np.array(
        [
            q.shape[1],
            kv_heads,
            double // 2,
            block,
            *kv_cache.stride()[:2],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *out.stride()[:2],
        ],
        np.int64,
    )
    pointer = ctypes.c_void_p
    kernel.specx_tree_rows(
        ctypes.c_int(q.dtype == torch.bfloat16),
        pointer(sizes.ctypes.data),
        ctypes.c_float(scale),
        pointer(q.data_ptr()),
        pointer(k.data_ptr()),
        pointer(v.data_ptr()),
        pointer(kv_cache.data_ptr()),
        pointer(out.data_ptr()),
        ctypes.c_int64(len(first)),
        pointer(first.ctypes.data),
        pointer(rows.ctypes.data),
        pointer(context.ctypes.data),
        pointer(request.ctypes.data),
        pointer(block_table.data_ptr()),
        ctypes.c_int64(block_table.stride(0)),
        pointer(visible.ctypes.data),
    )
