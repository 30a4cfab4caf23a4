"""Draft models as transformers writes them: config.json and safetensors, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vllm_specx.draft.checkpoint_files import (
    CheckpointError,
    Tensors,
    check_numbers,
    read_config,
    read_tensors,
)
from vllm_specx.draft.decoder_keys import DecoderKeys, Size, refuse_others, rope_of, validated
from vllm_specx.draft.eagle_weights import DecoderShape, LayerWeights
from vllm_specx.draft.named_tensors import NamedTensors, read_layer
from vllm_specx.messages import shown

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
_INDEX = "model.safetensors.index.json"


class _Keys(DecoderKeys):
    """What must be said of a whole model."""

    num_hidden_layers: Size
    intermediate_size: Size
    vocab_size: Size
    model_type: str
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class DraftModelWeights:
    """A Llama-like decoder. embeddings: [V, hidden]; norm: [hidden], before lm_head; lm_head: [V, hidden],
    the embeddings themselves if they are tied."""

    shape: DecoderShape
    layers: tuple[LayerWeights, ...]
    embeddings: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embeddings."""
        return self.lm_head is self.embeddings


def load_draft_model(
    path: str | Path, dtype: torch.dtype, *, values: bool = True
) -> DraftModelWeights:
    """Read a folder of a Llama, Qwen2, Qwen3 or Mistral model, in the given dtype.

    values: False checks names and shapes alone, without reading the weights, which then have no values
    (device `meta`). Raises CheckpointError: one sentence that says what cannot be used.
    """
    path = Path(path).expanduser()
    keys = _keys(path)
    tensors: Tensors = {}
    for file in _files(path):
        found = read_tensors(file) if values else _shapes(file)
        _refuse_quantized(found, path)
        if values:
            check_numbers(found, path)
        tensors |= found
    named = _named(tensors, path, dtype)
    shape = keys.decoder(keys.intermediate_size)
    layers = tuple(
        _owned_layer(
            read_layer(named, f"model.layers.{n}.", shape, head_norms=keys.model_type == "qwen3")
        )
        for n in range(keys.num_hidden_layers)
    )
    embeddings = named.get("model.embed_tokens.weight", keys.vocab_size, shape.hidden_size)
    norm = named.get("model.norm.weight", shape.hidden_size)
    head = embeddings
    if keys.tie_word_embeddings:
        named.used.add("lm_head.weight")
    else:
        head = named.get("lm_head.weight", keys.vocab_size, shape.hidden_size)
    named.refuse_the_rest(f"a draft model of {keys.num_hidden_layers} {keys.model_type} layers")
    kept = _owned(embeddings)
    return DraftModelWeights(
        shape,
        layers,
        kept,
        _owned(norm),
        kept if head is embeddings else _owned(head),
    )


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Not as a part of a mapped file, which would stay in memory as a whole, beside what is made of it."""
    return tensor if tensor.device.type == "meta" else tensor.clone()


def _owned_layer(layer: LayerWeights) -> LayerWeights:
    tensors: dict[str, torch.Tensor | None] = {
        field.name: getattr(layer, field.name) for field in fields(layer)
    }
    owned: dict[str, Any] = {
        name: None if each is None else _owned(each) for name, each in tensors.items()
    }
    return LayerWeights(**owned)


def holds_model(path: Path) -> bool:
    """Whether a folder holds a whole language model, and no draft that hangs on a target's states."""
    try:
        names = (
            {name for file in _files(path) for name in _shapes(file)} if path.is_dir() else set()
        )
    except CheckpointError:
        return False
    whole = {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= names
    return whole and not any(name.endswith("fc.weight") for name in names)


def _keys(path: Path) -> _Keys:
    if not path.is_dir():
        raise CheckpointError(f"there is no draft model {path}; give the folder of one.")
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json, which says what layers a draft model has; copy it beside the weights."
        )
    config: Mapping[str, Any] = read_config(path / "config.json")
    flat = {key: value for key, value in config.items() if value is not None}
    if "quantization_config" in flat:
        method = flat["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise CheckpointError(
            f"{path} is quantized ({shown(method)}), which a draft model must not be; use its "
            "original weights."
        )
    if "model_type" not in flat:
        raise CheckpointError(f"{path}: config.json has no 'model_type'; add it.")
    refuse_others(flat, path, read=MODEL_TYPES, named="Llama, Qwen2, Qwen3 and Mistral")
    return validated(_Keys, {**flat, "rope": rope_of(flat, path)}, path)


def _files(path: Path) -> list[Path]:
    """The files of the weights: those that the index names, or all."""
    index = path / _INDEX
    if index.is_file():
        try:
            said = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [path / name for name in sorted(said) if Path(name).name == name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{index} is no index of weights; copy it again.") from None
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{path} has no {missing[0]}, which its index names; copy it again."
            )
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} has no weights as .safetensors; save the model in that format (transformers' "
            "save_pretrained does)."
        )
    return files


def _shapes(file: Path) -> Tensors:
    """All tensors without their values."""
    from safetensors import safe_open

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: torch.empty(
                    part.get_shape(), dtype=dtypes.get(part.get_dtype(), torch.int8), device="meta"
                )
                for name, part in slices.items()
            }
    except Exception as error:
        # safetensors raises whatever its parser does; the file is unusable in any case.
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(
            f"{file} cannot be read ({reason}); it may be truncated, copy it again."
        ) from None


def _refuse_quantized(tensors: Tensors, path: Path) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{path}: '{name}' is no tensor of bfloat16, float16 or float32; quantized weights are not "
                "read, use the model's original ones."
            )


def _named(tensors: Tensors, path: Path, dtype: torch.dtype) -> NamedTensors:
    """Under their names in a causal language model; those of a bare model have no `model.`."""
    bare = "embed_tokens.weight" in tensors
    names = {
        name: f"model.{name}" if bare and name != "lm_head.weight" else name for name in tensors
    }
    written = {there: name for name, there in names.items()}
    return NamedTensors(
        {names[name]: tensor for name, tensor in tensors.items()},
        written,
        path,
        dtype,
        "its config.json needs",
    )
