"""Figures of GPUs, from NVIDIA's data sheets: dense BF16 with tensor cores, without sparsity.

Memory is counted in powers of ten, as data sheets write it: none of these has less than that to use
(nvidia-smi says 81920 MiB of an A100-80GB, 46068 MiB of an L40S).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from vllm_specx.config import ConfigError, nearest
from vllm_specx.messages import clipped


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. bandwidth: bytes/s of its memory; flops: dense BF16 FLOP/s; memory: bytes."""

    bandwidth: float
    flops: float
    memory: float


GPUS = {
    # NVIDIA A10 Tensor Core GPU data sheet
    "A10": Gpu(600e9, 125e12, 24e9),
    # NVIDIA A100 Tensor Core GPU data sheet
    "A100-40GB": Gpu(1555e9, 312e12, 40e9),
    "A100-80GB": Gpu(2039e9, 312e12, 80e9),
    # NVIDIA L4 Tensor Core GPU data sheet (242 TFLOPS with sparsity)
    "L4": Gpu(300e9, 121e12, 24e9),
    # NVIDIA L40S data sheet
    "L40S": Gpu(864e9, 362e12, 48e9),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM: 1979, PCIe: 1513 TFLOPS with sparsity)
    "H100-SXM": Gpu(3350e9, 989e12, 80e9),
    "H100-PCIe": Gpu(2000e9, 756e12, 80e9),
    # NVIDIA H200 Tensor Core GPU data sheet
    "H200": Gpu(4800e9, 989e12, 141e9),
    # NVIDIA DGX B200 data sheet (1,440 GB and 36 PFLOPS of dense FP8 for eight); the bandwidth by its
    # bus of 7680 bits at 3996 MHz, as pytorch/ao pull 4002 reads it from the driver
    "B200": Gpu(7670e9, 2250e12, 180e9),
    # NVIDIA Ada GPU architecture white paper: BF16 with FP32 accumulation
    "RTX-4090": Gpu(1008e9, 165e12, 24e9),
    # NVIDIA Ampere GA102 GPU architecture white paper: BF16 with FP32 accumulation
    "RTX-3090": Gpu(936e9, 71e12, 24e9),
}
_SAME = {"h100": "H100-SXM", "a100": "A100-80GB", "4090": "RTX-4090", "3090": "RTX-3090"}


def find(name: str) -> str:
    """The name in GPUS that is meant: in any case, `A100-80G` and `A100 80GB` too. Raises ConfigError."""
    said = re.sub(r"[\s_]+", "-", name.strip().lower())
    said = re.sub(r"(\d)g$", r"\1gb", said.removeprefix("nvidia-"))
    known = (
        {gpu.lower(): gpu for gpu in GPUS}
        | _SAME
        | {f"{key}-80gb": v for key, v in _SAME.items() if key[1] == "1"}
    )
    if said in known:
        return known[said]
    plain = {key.replace("-", ""): gpu for key, gpu in known.items()}
    if said.replace("-", "") in plain:
        return plain[said.replace("-", "")]
    raise ConfigError(
        f"there are no figures of the GPU '{clipped(name)}'; {nearest(name.upper(), sorted(GPUS))}"
    )


def mentioned(text: str) -> str | None:
    """The first GPU of GPUS that a text names, such as `4 x A100-80GB`; None: none."""
    words = re.split(r"[^A-Za-z0-9-]+", text)
    for word in [*(f"{a}-{b}" for a, b in itertools.pairwise(words)), *words]:
        try:
            return find(word)
        except ConfigError:
            continue
    return None
