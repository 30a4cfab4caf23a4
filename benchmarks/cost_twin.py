"""A target with SmolLM2's function and several times its weights.

Layers are appended whose o_proj and down_proj are zero: each adds exactly nothing to the residual
stream, so logits stay the same to the bit, while every weight is still read in every step. The
ratio of a draft step to a target step, and the price of verifying, become those of a large model.

    python -m benchmarks.cost_twin [--layers 170] [--check]

prints the checkpoint folder; in a scenario it is `model: twin:170`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.lib.errors import BenchError
from vllm_specx.config import ConfigError
from vllm_specx.models.embedded import cache_root, checkpoint

BASE = "embedded:smollm2-135m-instruct"
DEFAULT_LAYERS = 170
_ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_WEIGHTS = "model.safetensors"


def make_twin(layers: int = DEFAULT_LAYERS, base: Path | None = None) -> Path:
    """The checkpoint folder of the twin with `layers` extra layers, made on first use.

    base: a Llama checkpoint folder with one safetensors file; default the embedded model's.
    """
    if layers < 1:
        raise BenchError(f"a twin of {layers} extra layers is no twin; ask for at least 1.")
    source = base or checkpoint(BASE)
    root = cache_root()
    folder = root / f"{source.name}-twin-{layers}"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _WEIGHTS).exists():
            for stale in root.glob(f".{folder.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=root))
            try:
                _write(source, layers, work)
                work.chmod(0o755)
                (work / _WEIGHTS).chmod(0o644)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _write(source: Path, layers: int, folder: Path) -> None:
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != "vllm_specx.json":
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    depth = config["num_hidden_layers"]
    config["num_hidden_layers"] = depth + layers
    if "layer_types" in config:
        types = config["layer_types"]
        config["layer_types"] = types + [types[i % depth] for i in range(layers)]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with safe_open(source / _WEIGHTS, framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    tensors |= extra_layers(tensors, depth, layers)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def extra_layers(
    tensors: dict[str, torch.Tensor], depth: int, layers: int
) -> dict[str, torch.Tensor]:
    """Layers depth .. depth+layers-1: copies of the first ones whose two outputs are zero.

    The copies are real ones, so activations inside them stay finite (0 x inf would be NaN).
    """
    added = {}
    for extra in range(layers):
        prefix = f"model.layers.{extra % depth}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                copy = torch.zeros_like(tensor) if part in _ZERO else tensor.clone()
                added[f"model.layers.{depth + extra}.{part}"] = copy
    return added


def largest_difference(
    base: Path, twin: Path, texts: list[str], dtype: torch.dtype = torch.float32
) -> float:
    """The largest absolute difference of logits between two checkpoints; 0.0 is to the bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (base, twin)]
    worst = 0.0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            one, other = (model(ids).logits for model in models)
            worst = max(worst, (one - other).abs().max().item())
    return worst


TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it",
    "def add(a, b):\n    return a + b\n\n\nprint(add(",
    '{"name": "Ada", "born": 1815, "city": "London"}, {"name": "',
]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_twin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS)
    parser.add_argument("--check", action="store_true", help="compare logits with the small model")
    args = parser.parse_args()
    try:
        folder = make_twin(args.layers)
        if args.check:
            for dtype in (torch.float32, torch.bfloat16):
                worst = largest_difference(checkpoint(BASE), folder, TEXTS, dtype)
                print(f"{dtype}: largest difference of logits {worst}", file=sys.stderr)
                if worst != 0.0:
                    raise BenchError(f"{folder} computes other logits; delete it and make it anew.")
    except (BenchError, ConfigError) as error:
        print(f"cost_twin: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
