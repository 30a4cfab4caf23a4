"""A target in int8: weights a channel, activations a token (W8A8), as compressed-tensors stores them.

`w8a8:MODEL` where a scenario names a model; vLLM's CPU backend serves it through oneDNN. Rounding to
the nearest, without calibration: what it costs in quality is for a benchmark to say.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_specx.models import embedded

PREFIX = "w8a8:"
_SCHEME: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**_SCHEME, "strategy": "token", "dynamic": True},
        }
    },
}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] floats -> int8 [out, in] and float32 scales [out, 1]; weight ~ int8 * scale."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127.0
    return (weight.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def make(source: Path) -> Path:
    """The int8 form of a Llama checkpoint's folder, made once; lm_head and embeddings stay."""
    files = sorted(source.glob("*.safetensors"))
    stamp = [(file.name, file.stat().st_size) for file in files]
    config = json.loads((source / "config.json").read_text())
    name = hashlib.sha256(json.dumps([stamp, config]).encode()).hexdigest()[:12]
    folder = embedded.cache_root() / f"w8a8-{name}"
    if (folder / "config.json").exists():  # the last file that is written
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(key)
                if key.endswith("_proj.weight"):
                    tensors[key], scale = quantize(tensor)
                    tensors[key.removesuffix("weight") + "weight_scale"] = scale
                else:
                    tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, folder / file.name)
    written = folder / "config.json.tmp"
    written.write_text(json.dumps({**config, "quantization_config": QUANTIZATION}, indent=1))
    os.replace(written, folder / "config.json")
    return folder
