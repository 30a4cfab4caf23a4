"""Synthetic EAGLE checkpoints in every layout that is read."""

from __future__ import annotations

from typing import Any

import torch

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, TARGET_LAYERS = 32, 48, 4, 2, 8, 200, 12
IDS = [7, 3, 199, 20, 21]
"""A draft vocabulary by frequency."""


def _layer(prefix: str, wide: int, norms: tuple[str, ...], bias: bool) -> dict[str, torch.Tensor]:
    kv = KV_HEADS * HEAD_DIM
    rows = {"q": HEADS * HEAD_DIM, "k": kv, "v": kv}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in rows.items():
        shapes[f"self_attn.{name}_proj.weight"] = (size, wide)
        if bias:
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    shapes |= {
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
    return {f"{prefix}{name}": torch.empty(shape) for name, shape in shapes.items()}


def _filled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.normal_(generator=generator)
    return tensors


def eagle1(
    *, layers: int = 1, bias: bool = False, fc_bias: bool = False
) -> dict[str, torch.Tensor]:
    """SafeAILab's EAGLE, without embed_tokens and lm_head."""
    tensors = {"fc.weight": torch.empty(HIDDEN, 2 * HIDDEN)}
    if fc_bias:
        tensors["fc.bias"] = torch.empty(HIDDEN)
    for index in range(layers):
        norms = ("post_attention_layernorm", *(["input_layernorm"] if index else []))
        tensors |= _layer(f"layers.{index}.", HIDDEN, norms, bias)
    return _filled(tensors)


def eagle3(
    *,
    first: str = "midlayer.",
    layers: int = 1,
    bias: bool = False,
    ids: list[int] | None = None,
    states: int = 3,
    of_target: int = HIDDEN,
) -> dict[str, torch.Tensor]:
    """SafeAILab's EAGLE-3; ids: the draft vocabulary, ascending unless given."""
    ids = sorted(IDS) if ids is None else ids
    tensors = {"fc.weight": torch.empty(HIDDEN, states * of_target)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= _layer(first, 2 * HIDDEN, norms, bias)
    for index in range(1, layers):
        tensors |= _layer(
            f"layers.{index}.", HIDDEN, ("input_layernorm", "post_attention_layernorm"), bias
        )
    tensors |= {"norm.weight": torch.empty(HIDDEN), "lm_head.weight": torch.empty(len(ids), HIDDEN)}
    return _filled(tensors) | tables(ids)


def tables(ids: list[int]) -> dict[str, torch.Tensor]:
    """d2t and t2d."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": t2d}


def layer_config(**changes: Any) -> dict[str, Any]:
    """A Llama configuration as transformers 4 wrote it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "vocab_size": VOCAB,
        **changes,
    }


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """SafeAILab's configuration of EAGLE-3, with no word about auxiliary layers."""
    architectures = ["LlamaForCausalLMEagle3"]
    return layer_config(architectures=architectures, draft_vocab_size=len(IDS), **changes)
