"""EAGLE and EAGLE-3 drafts as checkpoints that vLLM's own methods load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_specx.draft.checkpoint_files import CheckpointError, Tensors
from vllm_specx.draft.eagle_weights import EagleWeights


def save_for_vllm(
    weights: EagleWeights,
    folder: Path,
    *,
    vocab_size: int,
    lm_head: torch.Tensor | None = None,
) -> None:
    """Write a draft as vLLM 0.32's own methods `eagle` and `eagle3` load it.

    vocab_size: V, the target's. lm_head: [V, hidden], the target's; needed for an EAGLE-3 draft with a
    reduced vocabulary and no rows of its own. Stock `eagle` always drafts from the target's whole
    lm_head, so its draft vocabulary is not written. Raises CheckpointError for what stock vLLM has no
    place for.
    """
    from safetensors.torch import save_file

    tensors, config = (
        _stock_tensors(weights, vocab_size, lm_head),
        _stock_config(weights, vocab_size),
    )
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _stock_tensors(weights: EagleWeights, vocab_size: int, lm_head: torch.Tensor | None) -> Tensors:
    shape, is_3 = weights.shape, weights.version == 3
    places = {
        "an fc bias": weights.fc_bias,
        "its own lm_head": None if is_3 else weights.lm_head,
        "a norm before its first layer": None if is_3 else weights.layers[0].input_norm,
    }
    for what, tensor in places.items():
        if tensor is not None:
            raise CheckpointError(f"this draft has {what}, which vLLM's own methods do not load.")
    tensors: Tensors = {}
    optional = {
        "fc.weight": weights.fc,
        "input_norm.weight": weights.input_norm,
        "norm.weight": weights.norm,
        "embed_tokens.weight": weights.embeddings,
    }
    optional |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(weights.fc_norms)}
    for index, layer in enumerate(weights.layers):
        at = "midlayer." if is_3 and index == 0 else f"layers.{index}."
        sizes = [shape.heads * shape.head_dim, *2 * [shape.kv_heads * shape.head_dim]]
        for kind, joined in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if joined is not None:
                for name, part in zip("qkv", torch.split(joined, sizes), strict=True):
                    tensors[f"{at}self_attn.{name}_proj.{kind}"] = part.clone()
        if layer.qkv_bias is not None:
            # vLLM's Llama layers have this one wherever q, k and v have theirs.
            tensors[f"{at}self_attn.o_proj.bias"] = layer.out.new_zeros(shape.hidden_size)
        tensors[f"{at}self_attn.o_proj.weight"] = layer.out
        for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            tensors[f"{at}mlp.{name}_proj.weight"] = part.clone()
        tensors[f"{at}mlp.down_proj.weight"] = layer.down
        tensors[f"{at}post_attention_layernorm.weight"] = layer.post_norm
        optional[f"{at}input_layernorm.weight"] = layer.input_norm
        optional[f"{at}hidden_norm.weight"] = layer.hidden_norm
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    if is_3:
        own = weights.lm_head
        if own is None and weights.vocab is not None:
            if lm_head is None:
                raise CheckpointError("this draft takes rows of the target's lm_head; give it.")
            own = lm_head[weights.vocab.token_ids].to(weights.layers[0].out.dtype)
        if own is not None:
            tensors["lm_head.weight"] = own
        tensors |= weights.vocab.d2t() if weights.vocab is not None else {}
    return tensors


def _stock_config(weights: EagleWeights, vocab_size: int) -> dict[str, Any]:
    shape, is_3 = weights.shape, weights.version == 3
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if is_3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": len(weights.layers),
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": dict(shape.rope),
        "attention_bias": weights.layers[0].qkv_bias is not None,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "logit_scale": weights.logit_scale,
        "dtype": str(weights.layers[0].out.dtype).removeprefix("torch."),
    }
    if is_3:
        states = len(weights.aux_layers)
        config |= {
            "draft_vocab_size": len(weights.vocab) if weights.vocab else vocab_size,
            "norm_before_residual": weights.norm_before_residual,
            "norm_before_fc": weights.input_norm is not None,
            "norm_output": weights.norm_output,
            "fc_norm": bool(weights.fc_norms),
            "eagle_config": {
                "use_aux_hidden_state": weights.fc is not None,
                "eagle_aux_hidden_state_layer_ids": list(weights.aux_layers),
            },
        }
        if weights.fc is not None:
            config["num_aux_hidden_states"] = states
            config["target_hidden_size"] = weights.fc.shape[1] // states
    return config
