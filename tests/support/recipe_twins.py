"""Tiny random twins of the recipes' models: their architecture, vocabulary and heads, few and narrow layers.

A twin says successor(t) after token t: its embeddings E are random, its lm_head has E[t] as the row of
successor(t), and its layers add a share of noise that depends on the context. So twins of all widths agree,
drafts are often right, and no two tokens are so close that rounding could choose between them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from tests.support.twins import tokenizer
from vllm_specx.plan.facts import COMMITTED

HEAD_DIM = 32
"""The narrowest that vLLM's attention on the CPU takes."""
EAGLE3_TARGET_LAYERS = 8
"""EAGLE-3 reads three layers, (2, L // 2, L - 3), unless its configuration names others."""
SHORT, LONG = 5, 61
"""Lengths of the cycles that successor() walks: one repeats within a few tokens, one does not."""
EDGE = 1000
"""Tokens below walk the short cycles."""
PROMPTS = [[7, 8, 9], [EDGE + 2 * LONG, EDGE + 2 * LONG + 1], [EDGE + 3 * LONG + 5] * 4]
REAL_TOKENS = {"qwen2.5": 151665, "llama3": 128256}
"""Vocabularies without padding."""
OTHER_DRAFTS: dict[str, dict[str, Any]] = {
    # Layers as wide as the target's with as many key-value heads as heads, by their descriptions.
    "leptonai/EAGLE-Qwen2.5-7B-Instruct": {"of": "Qwen/Qwen2.5-7B-Instruct", "version": 1},
    "Zjcxy-SmartAI/Eagle-Qwen2.5-14B-Instruct": {"of": "Qwen/Qwen2.5-14B-Instruct", "version": 1},
}


@functools.cache
def _models() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMMITTED.read_text())
    return found


def described(name: str) -> dict[str, Any]:
    """What is known of a model: `config`, and `eagle` of an EAGLE draft."""
    if name in OTHER_DRAFTS:
        target = _models()[OTHER_DRAFTS[name]["of"]]["config"]
        alike = {**target, "num_key_value_heads": target["num_attention_heads"]}
        return {"config": alike, "eagle": {"version": OTHER_DRAFTS[name]["version"]}}
    return _models()[name]


def successor(tokens: torch.Tensor, times: int = 1) -> torch.Tensor:
    """The token that a twin says after each."""
    for _ in range(times):
        short = tokens // SHORT * SHORT + (tokens + 1) % SHORT
        base = tokens - EDGE
        long = EDGE + base // LONG * LONG + (base + 1) % LONG
        tokens = torch.where(tokens < EDGE, short, long)
    return tokens


def model_twin(folder: Path, name: str, *, often_wrong: bool = False) -> str:
    """The checkpoint of the twin of a hub name. often_wrong: it says something else after every fourth
    token, as a draft that is not always right."""
    said = described(name)
    config = _narrow(said["config"])
    config["tie_word_embeddings"] = False  # or it could not say successor()
    if name.startswith("meta-llama/Llama-3."):
        config["num_hidden_layers"] = EAGLE3_TARGET_LAYERS
    hidden, rows = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(len(name) + hidden)
    embeddings = torch.randn(rows, hidden, generator=generator).bfloat16()
    tokens = torch.arange(rows)
    following = successor(tokens).clamp(max=rows - 1)
    if often_wrong:
        following = torch.where(tokens % 4 == 3, tokens, following)
    head = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    head[following] = embeddings / hidden**0.5
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for index in range(config["num_hidden_layers"]):
        tensors |= _layer(f"model.layers.{index}.", config, hidden, generator)
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    config["architectures"] = [names[config["model_type"]]]
    _write(folder, tensors, config)
    kind = said["tokenizer"]
    size, added = REAL_TOKENS[kind], 256 if kind == "llama3" else 22
    words = [f"w{i}" for i in range(size - added)]
    tokenizer(str(folder), words, tuple(f"<{said.get('special', kind)}-{i}>" for i in range(added)))
    return str(folder)


def eagle_twin(folder: Path, name: str, target: str) -> str:
    """An EAGLE draft in the layout of the hub name, for the twin `target`."""
    said = described(name)
    of_target = json.loads((Path(target) / "config.json").read_text())
    config = {
        **_narrow(said["config"]),
        "num_hidden_layers": 1,
        "vocab_size": of_target["vocab_size"],
    }
    generator = torch.Generator().manual_seed(3)
    if said["eagle"]["version"] == 1:
        config["hidden_size"] = of_target["hidden_size"]
        tensors = _eagle1(config, generator)
        # As SafeAILab publishes it: a .bin beside a configuration without the word EAGLE.
        folder.mkdir(parents=True)
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
    own = bool(said["eagle"]["embeddings"])
    config |= {"draft_vocab_size": said["eagle"]["draft_vocab_size"]}
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    if own:
        config["target_hidden_size"] = of_target["hidden_size"]
    else:
        config["hidden_size"] = of_target["hidden_size"]
    _write(folder, _eagle3(config, target, generator, own), config)
    return str(folder)


def medusa_twin(folder: Path, target: str, heads: int = 4) -> str:
    """Heads as vLLM 0.32 has them, of the tokens that PROMPTS lead to."""
    embeddings = _embeddings(target)
    ids = _walked()
    rows = embeddings.shape[1]
    tensors = {"token_map": ids}
    for head in range(heads):
        weight = torch.zeros(len(ids), rows, dtype=torch.bfloat16)
        order = {int(token): place for place, token in enumerate(ids)}
        for token in ids:
            said = int(successor(token[None], head + 2)[0])
            weight[order[said]] = embeddings[token] / rows**0.5
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(rows, rows, dtype=torch.bfloat16)
        tensors[f"lm_heads.{head}.weight"] = weight
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": rows,
        "vocab_size": len(embeddings),
        "num_heads": heads,
        "num_hidden_layers": 1,
        "truncated_vocab_size": len(ids),
        "original_lm_head": False,
    }
    _write(folder, tensors, config)
    return str(folder)


def _walked() -> torch.Tensor:
    """The tokens of the cycles that PROMPTS are in, ascending."""
    seen = torch.tensor([token for prompt in PROMPTS for token in prompt])
    return torch.cat([successor(seen, n) for n in range(LONG)]).unique()


def _narrow(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with two layers and narrow heads, as many as there are."""
    heads = config["num_attention_heads"]
    # vLLM's Qwen2 divides the hidden size by the heads; Llama may be narrower than its heads together.
    hidden = heads * (HEAD_DIM if config["model_type"] == "qwen2" else HEAD_DIM // 4)
    return {
        **config,
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }


def _layer(
    prefix: str, config: dict[str, Any], wide: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """One decoder layer; wide: of attention's input."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def weights(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).bfloat16()

    tensors = {
        "self_attn.q_proj.weight": weights(heads * HEAD_DIM, wide),
        "self_attn.k_proj.weight": weights(groups * HEAD_DIM, wide),
        "self_attn.v_proj.weight": weights(groups * HEAD_DIM, wide),
        "self_attn.o_proj.weight": weights(hidden, heads * HEAD_DIM, 0.15),
        "mlp.gate_proj.weight": weights(inner, hidden),
        "mlp.up_proj.weight": weights(inner, hidden),
        "mlp.down_proj.weight": weights(hidden, inner, 0.15),
    }
    if config["model_type"] == "qwen2":
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            tensors[f"self_attn.{name}_proj.bias"] = weights(rows * HEAD_DIM, 1, 0.1)[:, 0].clone()
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _eagle1(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """It hands the last token's embedding on, for which the target's lm_head says the next."""
    hidden = config["hidden_size"]
    tensors = _layer("layers.0.", config, hidden, generator)
    del tensors["layers.0.input_layernorm.weight"]
    eye, zeros = torch.eye(hidden), torch.zeros(hidden, hidden)
    return {**tensors, "fc.weight": torch.cat((eye, zeros), 1).bfloat16()}


def _eagle3(
    config: dict[str, Any], target: str, generator: torch.Generator, own: bool
) -> dict[str, torch.Tensor]:
    """From the target's first auxiliary state, which is much like the embedding of the last token but
    one, it says the token after next."""
    embeddings = _embeddings(target)
    hidden, wide = config["hidden_size"], embeddings.shape[1]
    rows, size = len(embeddings), config["draft_vocab_size"]
    narrowed = torch.randn(hidden, wide, generator=generator) / wide**0.5
    ids = torch.cat(
        (torch.arange(size // 2), rows - size + size // 2 + torch.arange(size - size // 2))
    )
    head = torch.zeros(size, hidden)
    among = ids[: size // 2 - 2 * LONG]  # those whose cycle is all there
    head[torch.searchsorted(ids, successor(among, 2))] = embeddings[among].float() @ narrowed.T
    tensors = _layer("midlayer.", config, 2 * hidden, generator)
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors |= {
        "midlayer.hidden_norm.weight": ones,
        "norm.weight": ones.clone(),
        "fc.weight": torch.cat((narrowed, torch.zeros(hidden, 2 * wide)), 1).bfloat16(),
        "lm_head.weight": (head / hidden**0.5).bfloat16(),
        "d2t": ids - torch.arange(size),
        "t2d": torch.zeros(rows, dtype=torch.bool).index_fill(0, ids, True),
    }
    if own:
        tensors["embed_tokens.weight"] = torch.randn(rows, hidden, generator=generator).bfloat16()
    return tensors


def _embeddings(target: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(Path(target) / "model.safetensors", framework="pt") as file:
        found: torch.Tensor = file.get_tensor("model.embed_tokens.weight")
    return found


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
