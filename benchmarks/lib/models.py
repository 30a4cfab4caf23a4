"""The `model` of a scenario: a path, a hub name, `embedded:NAME`, or `twin:LAYERS`; and of a draft:
`stock:HEADS` is a checkpoint of ours in the form that vLLM's own `medusa`, `eagle` or `eagle3` loads;
`pruned:LAYERS` and `random` are those of draft_twins.py. `permutation:SIZE` and `permutation-heads:SIZE:PERCENT`
are those of permutation_llama.py. `w8a8:MODEL` is that model in int8 (quantized.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import permutation_llama, quantized
from benchmarks.draft_twins import is_draft
from benchmarks.draft_twins import make as make_draft
from benchmarks.lib.errors import BenchError
from vllm_specx.config import ConfigError
from vllm_specx.models import embedded

TWIN = "twin:"
STOCK = "stock:"


def resolve(model: str) -> str:
    """What vLLM's `model` takes; embedded models and cost twins are made on first use."""
    try:
        if model.startswith(TWIN):
            from benchmarks.cost_twin import make_twin

            layers = model.removeprefix(TWIN)
            if not layers.isdecimal():
                raise BenchError(f"model '{model}': write the number of layers, as in 'twin:170'.")
            return str(make_twin(int(layers)))
        if model.startswith(quantized.PREFIX):
            return str(quantized.make(Path(resolve(model.removeprefix(quantized.PREFIX)))))
        if is_draft(model):
            return str(make_draft(model))
        if made := permutation_llama.resolve(model):
            return made
        return str(embedded.checkpoint(model)) if embedded.is_embedded(model) else model
    except ConfigError as error:
        raise BenchError(str(error)) from None


def resolve_draft(speculative: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The speculative config for vLLM; target: what `resolve` said."""
    draft = speculative.get("model")
    synthetic = isinstance(draft, str) and draft.startswith(permutation_llama.HEADS)
    if isinstance(draft, str) and (is_draft(draft) or embedded.is_embedded(draft) or synthetic):
        return {**speculative, "model": resolve(draft)}
    if not isinstance(draft, str) or not draft.startswith(STOCK):
        return dict(speculative)
    try:
        return {
            **speculative,
            "model": str(_for_stock(Path(draft.removeprefix(STOCK)), target)),
        }
    except ConfigError as error:
        raise BenchError(str(error)) from None


def _for_stock(draft: Path, target: str) -> Path:
    from vllm_specx.draft import checkpoints, eagle_checkpoints, eagle_export
    from vllm_specx.draft.checkpoint_files import TargetShape, kind_of_checkpoint
    from vllm_specx.train.target import folder_of, load_target

    weights = load_target(target)
    rows, hidden = weights.lm_head.shape
    layers = json.loads((folder_of(target) / "config.json").read_text())["num_hidden_layers"]
    shape = TargetShape(hidden, rows, weights.lm_head.dtype, layers)
    files = sorted(draft.rglob("*.safetensors"))
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    kind = kind_of_checkpoint(draft)
    folder = embedded.cache_root() / f"stock-{kind}-{content}"
    if (folder / "config.json").exists():  # the last file that is written
        return folder
    if kind == "medusa":
        checkpoints.save_for_vllm(checkpoints.load_heads(draft, shape), weights.lm_head, folder)
    else:
        eagle_export.save_for_vllm(
            eagle_checkpoints.load_eagle(draft, shape),
            folder,
            vocab_size=rows,
            lm_head=weights.lm_head,
        )
    return folder
