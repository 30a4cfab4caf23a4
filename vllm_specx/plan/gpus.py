"""Figures of GPUs, from NVIDIA's data sheets: dense BF16 with tensor cores, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass


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
}
