"""EAGLE drafts of random weights, in the layouts that vLLM's own methods load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def random_eagle(
    folder: Path, target: str, version: int, *, vocab: int = 512, copying: bool = False
) -> str:
    """A draft for the checkpoint `target` (a Llama): its guesses are all but always wrong.

    vocab: tokens of EAGLE-3's draft vocabulary. copying: an EAGLE-1 that hands the target's state on as
        it is, so that it guesses what the target likes to say, and is right now and then.
    """
    config = json.loads((Path(target) / "config.json").read_text())
    hidden, inner, whole = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    generator = torch.Generator().manual_seed(version)

    def weights(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    layer, wide = ("midlayer.", 2 * hidden) if version == 3 else ("layers.0.", hidden)
    tensors = {
        f"{layer}self_attn.q_proj.weight": weights(heads * width, wide),
        f"{layer}self_attn.k_proj.weight": weights(groups * width, wide),
        f"{layer}self_attn.v_proj.weight": weights(groups * width, wide),
        f"{layer}self_attn.o_proj.weight": weights(hidden, heads * width),
        f"{layer}mlp.gate_proj.weight": weights(inner, hidden),
        f"{layer}mlp.up_proj.weight": weights(inner, hidden),
        f"{layer}mlp.down_proj.weight": weights(hidden, inner),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        "fc.weight": weights(hidden, (3 if version == 3 else 2) * hidden),
    }
    if copying:
        tensors["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{layer}{name}.weight"].zero_()
    made = {**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    if version == 3:
        ids = torch.randperm(whole, generator=generator)[:vocab].sort().values
        tensors |= {
            f"{layer}input_layernorm.weight": torch.ones(hidden),
            f"{layer}hidden_norm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            "lm_head.weight": weights(vocab, hidden),
            "d2t": ids - torch.arange(vocab),
            "t2d": torch.zeros(whole, dtype=torch.bool).index_fill(0, ids, True),
        }
        made |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab}
        last = config["num_hidden_layers"]
        layers = [1, last // 2 + 1, last] if last < 6 else [2, last // 2, last - 3]
        made["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": sorted(set(layers)),
            "use_aux_hidden_state": True,
        }
        tensors["fc.weight"] = weights(hidden, len(set(layers)) * hidden)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made))
    return str(folder)
