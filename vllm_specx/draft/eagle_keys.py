"""What the config.json of an EAGLE checkpoint says, whatever its layout.

Read are flat configurations (SafeAILab's and SpecForge's), vLLM's `model_type: eagle` with the
layer's under `model` (vllm/transformers_utils/configs/eagle.py), and vllm-project/speculators' with
`transformer_layer_config` (vllm/transformers_utils/configs/speculators/algos.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.eagle_weights import DecoderShape
from vllm_specx.messages import shown

Size = Annotated[int, Field(ge=1, le=2**31)]
LAYER_TYPES = ("llama", "qwen2", "mistral")
"""Model types whose layers are Llama's, with or without biases of q, k and v."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": _LLAMA3,
}
"""Rotary embeddings, and the numbers that each must have."""
_NO_LAYER_TYPE = ("eagle", "speculators")
_OF_SPECULATORS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "logit_scale",
    "eagle_aux_hidden_state_layer_ids",
)


class EagleKeys(BaseModel):
    """The keys that matter, under the names that vLLM's llama_eagle3.py reads them by."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    version: Literal[1, 3] | None = None
    """What the configuration calls the draft; None if it does not say."""
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    max_position_embeddings: Size = 2048
    hidden_act: str = "silu"
    rope: dict[str, Any]
    vocab_size: Size | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    num_aux_hidden_states: Size | None = None
    aux_layers: list[Annotated[int, Field(ge=0, le=4096)]] | None = None
    use_aux_hidden_state: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0

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


def read_keys(config: Mapping[str, Any], path: Path) -> EagleKeys:
    """The keys of a config.json. path: the checkpoint, for messages. Raises CheckpointError."""
    flat, version = _flat(config, path)
    flat = {key: value for key, value in flat.items() if value is not None}
    _refuse_others(flat, path)
    inner = _mapping(flat, "eagle_config", path)
    for key in ("use_aux_hidden_state", "norm_before_fc"):
        if inner.get(key) is not None:
            flat[key] = inner[key]
    flat["aux_layers"] = flat.get("eagle_aux_hidden_state_layer_ids") or inner.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if flat["aux_layers"] == []:
        flat["aux_layers"] = None
    if isinstance(inner.get("parallel_draft_step"), int) and inner["parallel_draft_step"] > 1:
        raise CheckpointError(
            f"{path} drafts {inner['parallel_draft_step']} tokens in parallel, which this version does "
            "not; use a checkpoint that drafts one after another."
        )
    if "truncated_vocab_size" in flat:
        flat.setdefault("draft_vocab_size", flat["truncated_vocab_size"])
    flat["rope"] = _rope(flat, path)
    flat["version"] = version
    try:
        keys = EagleKeys.model_validate(flat)
    except ValidationError as error:
        raise CheckpointError(_sentence(error, path)) from None
    heads, kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
    if heads % kv_heads or (keys.head_dim is None and keys.hidden_size % heads):
        raise CheckpointError(
            f"{path}: config.json has {heads} attention heads, which {kv_heads} key-value heads or the "
            f"hidden size {keys.hidden_size} do not divide into; correct it."
        )
    return keys


def _flat(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], Literal[1, 3] | None]:
    """All keys on one level, and the version that the configuration says."""
    if not config:
        raise CheckpointError(
            f"{path} has no config.json, which says how many attention heads an EAGLE draft has; "
            "copy it beside the weights."
        )
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in ("eagle", "eagle3"):
            raise CheckpointError(
                f"{path} is a speculator of type {shown(kind)}; only eagle and eagle3 are read."
            )
        if config.get("layernorms"):
            raise CheckpointError(
                f"{path} has the extra layernorms of speculators' TTT variant, which are not read; use "
                "an EAGLE or HASS checkpoint without them."
            )
        flat = dict(_mapping(config, "transformer_layer_config", path))
        flat |= {key: config[key] for key in _OF_SPECULATORS if config.get(key) is not None}
        if kind == "eagle3":
            flat["norm_before_residual"] = config.get("norm_before_residual", True)
        return flat, 3 if kind == "eagle3" else 1
    named = _names(config)
    flat = dict(config)
    if config.get("model") is not None:
        inner = _mapping(config, "model", path)
        named |= _names(inner)
        own = ("model", "model_type", "architectures")
        flat = {**inner, **{key: value for key, value in config.items() if key not in own}}
    is_3 = any("eagle3" in name.lower() for name in named)
    return flat, 3 if is_3 else None


def _names(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: '{key}' in config.json must be a mapping.")
    return value


def _refuse_others(flat: Mapping[str, Any], path: Path) -> None:
    """Layers that are no Llama or Qwen2 layers."""
    kind = flat.get("model_type", "llama")
    if kind not in (*LAYER_TYPES, *_NO_LAYER_TYPE):
        raise CheckpointError(
            f"{path}: draft layers of model type {shown(kind)} are not read; only those of Llama and "
            "Qwen2 are."
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


def _rope(flat: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them; older configurations have rope_theta and
    rope_scaling."""
    rope = dict(_mapping(flat, "rope_parameters", path))
    scaling = _mapping(flat, "rope_scaling", path)
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


def _sentence(error: ValidationError, path: Path) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{path}: config.json has no '{key}'; add it."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{path}: '{key}' in config.json is {shown(first['input'])}, but {message[:1].lower()}{message[1:]}."
