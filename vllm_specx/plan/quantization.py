"""Bytes of a quantized weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Quantization:
    """bytes_a_weight: of a layer's matrices, scales included; group: weights that share a scale along
    a row, None where a whole row or tensor does."""

    method: str
    bytes_a_weight: float
    group: int | None = None


FP8 = Quantization("fp8", 1.0)
ONLINE: dict[str, Quantization] = {
    "fp8": FP8,
    "fp8_per_tensor": FP8,
    "fp8_per_block": FP8,
    "bitsandbytes": Quantization("bitsandbytes", 0.5 + 4 / 64),
}
"""What `--quantization` makes of a checkpoint that is not quantized."""


def quantization_of(config: Any) -> Quantization | None:
    """Of `quantization_config` in a config.json; None: not quantized. Methods that are not known here
    come back with two bytes a weight, which is too much rather than too little."""
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method", "unknown"))
    if method in ("awq", "gptq", "auto-round", "intel/auto-round", "awq_marlin", "gptq_marlin"):
        return _grouped(
            method,
            config.get("bits", config.get("w_bit", 4)),
            config.get("group_size", config.get("q_group_size", 128)),
        )
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "bitsandbytes":
        return Quantization(method, 0.5 + 4 / 64 if config.get("load_in_4bit") else 1.0)
    if "fp8" in method or str(config.get("quant_algo", "")).upper() == "FP8":
        return Quantization(method, 1.0)
    return Quantization(method, 2.0)


def _compressed(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return Quantization("compressed-tensors", 2.0)
    return _grouped("compressed-tensors", weights.get("num_bits", 8), weights.get("group_size"))


def _grouped(method: str, bits: Any, group: Any) -> Quantization:
    size = bits / 8 if isinstance(bits, int) and 1 <= bits <= 16 else 2.0
    if not isinstance(group, int) or group < 1:
        return Quantization(method, size)
    scale = (2 + size) / group  # a float16 scale and a zero point
    return Quantization(method, size + scale, group)
