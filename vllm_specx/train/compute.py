"""Which number format this machine multiplies fastest."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from vllm_specx.setup import cpu


def fastest_dtype(device: str) -> torch.dtype:
    """bfloat16 on GPUs; on a CPU the faster of bfloat16 and float32, measured in a moment.

    CPUs with matrix units (AMX) are several times faster in bfloat16, others up to twice slower.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(512, 512, dtype=dtype), torch.ones(2048, 512, dtype=dtype)
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            _ = x @ weight.T
            best = min(best, time.perf_counter() - began)
        times[dtype] = best
    return min(times, key=lambda dtype: times[dtype])


def generation_dtype(target: str) -> str:
    """vLLM's `dtype` for generating text in bulk: the checkpoint's own, or float32 where this is a
    CPU that multiplies it faster and the weights in it need less than an eighth of the free memory."""
    if not cpu.is_cpu_vllm() or fastest_dtype("cpu") != torch.float32:
        return "auto"
    weights = sum(file.stat().st_size for file in Path(target).glob("*.safetensors"))
    return "float32" if 0 < 2 * weights < cpu.free_memory() / 8 else "auto"
