"""What the config.json of an EAGLE checkpoint says, whatever its layout.

Read are flat configurations (SafeAILab's and SpecForge's), vLLM's `model_type: eagle` with the
layer's under `model` (vllm/transformers_utils/configs/eagle.py), and vllm-project/speculators' with
`transformer_layer_config` (vllm/transformers_utils/configs/speculators/algos.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.decoder_keys import (
    DecoderKeys,
    Size,
    mapping_in,
    refuse_others,
    rope_of,
    validated,
)
from vllm_specx.messages import shown

LAYER_TYPES = ("llama", "qwen2", "mistral")
"""Model types whose layers are Llama's, with or without biases of q, k and v."""
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


class EagleKeys(DecoderKeys):
    """The keys that matter, under the names that vLLM's llama_eagle3.py reads them by."""

    version: Literal[1, 3] | None = None
    """What the configuration calls the draft; None if it does not say."""
    hidden_act: str = "silu"
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


def read_keys(config: Mapping[str, Any], path: Path) -> EagleKeys:
    """The keys of a config.json. path: the checkpoint, for messages. Raises CheckpointError."""
    flat, version = _flat(config, path)
    flat = {key: value for key, value in flat.items() if value is not None}
    types = (*LAYER_TYPES, *_NO_LAYER_TYPE)
    refuse_others(flat, path, read=types, named="Llama and Qwen2")
    inner = mapping_in(flat, "eagle_config", path)
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
    flat["rope"] = rope_of(flat, path)
    flat["version"] = version
    return validated(EagleKeys, flat, path)


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
        flat = dict(mapping_in(config, "transformer_layer_config", path))
        flat |= {key: config[key] for key in _OF_SPECULATORS if config.get(key) is not None}
        if kind == "eagle3":
            flat["norm_before_residual"] = config.get("norm_before_residual", True)
        return flat, 3 if kind == "eagle3" else 1
    named = _names(config)
    flat = dict(config)
    if config.get("model") is not None:
        inner = mapping_in(config, "model", path)
        named |= _names(inner)
        own = ("model", "model_type", "architectures")
        flat = {**inner, **{key: value for key, value in config.items() if key not in own}}
    is_3 = any("eagle3" in name.lower() for name in named)
    return flat, 3 if is_3 else None


def _names(config: Mapping[str, Any]) -> set[str]:
    names = config.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
