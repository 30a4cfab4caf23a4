"""What the config.json of a model of Llama-like decoder layers says of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.eagle_weights import DecoderShape
from vllm_specx.messages import shown

Size = Annotated[int, Field(ge=1, le=2**31)]
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": _LLAMA3,
}
"""Rotary embeddings, and the numbers that each must have."""


class DecoderKeys(BaseModel):
    """The keys of a decoder layer, under the names of transformers' LlamaConfig."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    max_position_embeddings: Size = 2048
    rope: dict[str, Any]
    vocab_size: Size | None = None

    def decoder(self, intermediate_size: int) -> DecoderShape:
        """The layer's sizes."""
        heads = self.num_attention_heads
        return DecoderShape(
            hidden_size=self.hidden_size,
            intermediate_size=intermediate_size,
            heads=heads,
            kv_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope=self.rope,
        )


_Keys = TypeVar("_Keys", bound=DecoderKeys)


def validated(kind: type[_Keys], flat: Mapping[str, Any], path: Path) -> _Keys:
    """The keys, once they go together. path: the checkpoint, for messages. Raises CheckpointError."""
    try:
        keys = kind.model_validate(flat)
    except ValidationError as error:
        raise CheckpointError(_sentence(error, path)) from None
    heads, kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
    if heads % kv_heads or (keys.head_dim is None and keys.hidden_size % heads):
        raise CheckpointError(
            f"{path}: config.json has {heads} attention heads, which {kv_heads} key-value heads or the "
            f"hidden size {keys.hidden_size} do not divide into; correct it."
        )
    return keys


def refuse_others(
    flat: Mapping[str, Any], path: Path, *, read: Collection[str], named: str
) -> None:
    """Refuse layers that are not of the model types `read`, which are `named` so in messages, and what
    layers of these types may have that is not read. Raises CheckpointError."""
    kind = flat.get("model_type", "llama")
    if kind not in read:
        raise CheckpointError(
            f"{path}: draft layers of model type {shown(kind)} are not read; only those of {named} are."
        )
    if (act := flat.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(
            f"{path}: the activation {shown(act)} is not supported; only silu is."
        )
    layers = flat.get("num_hidden_layers")
    types = flat.get("layer_types")
    used = types[: layers if isinstance(layers, int) else None] if isinstance(types, list) else []
    slides = "sliding_attention" in used or flat.get("use_sliding_window") is True
    if slides or (kind == "mistral" and flat.get("sliding_window")):
        raise CheckpointError(
            f"{path}: draft layers with a sliding attention window are not supported; use a checkpoint "
            "with full attention."
        )


def rope_of(flat: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them; older configurations have rope_theta and
    rope_scaling."""
    rope = dict(mapping_in(flat, "rope_parameters", path))
    scaling = mapping_in(flat, "rope_scaling", path)
    rope = rope or dict(scaling)
    rope = {key: value for key, value in rope.items() if value is not None}
    rope.setdefault("rope_theta", flat.get("rope_theta", 10000.0))
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if not isinstance(rope["rope_type"], str) or rope["rope_type"] not in ROPE_TYPES:
        raise CheckpointError(
            f"{path}: the rotary embedding {shown(rope['rope_type'])} is not supported; "
            f"{', '.join(ROPE_TYPES)} are."
        )
    partial = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(
            f"{path}: partial_rotary_factor {shown(partial)} is not supported; only 1.0 is."
        )
    for key in ("rope_theta", *ROPE_TYPES[rope["rope_type"]]):
        if key not in rope:
            raise CheckpointError(
                f"{path}: the rotary embedding {rope['rope_type']!r} has no {key}; add it to config.json."
            )
        value = rope[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise CheckpointError(
                f"{path}: '{key}' of the rotary embedding is {shown(value)}; it must be a positive number."
            )
    return rope


def mapping_in(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """A mapping in the configuration; {} if it is not there. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: '{key}' in config.json must be a mapping.")
    return value


def _sentence(error: ValidationError, path: Path) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{path}: config.json has no '{key}'; add it."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{path}: '{key}' in config.json is {shown(first['input'])}, but {message[:1].lower()}{message[1:]}."
