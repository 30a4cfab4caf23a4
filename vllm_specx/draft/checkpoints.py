"""Draft-head checkpoints, whatever their layout, as plain tensors that fit the target.

Read are
    FasterDecoding/Medusa (arXiv 2401.10774): `H.L.linear.weight`, `H.L.linear.bias`, `H.N.weight`
        (own lm_head of head H), with or without the prefix `medusa_head(s).`, as .pt, .bin or
        .safetensors; its configuration needs neither model_type nor vocab_size, or may be missing;
    vLLM 0.32's Medusa (vllm/model_executor/models/medusa.py): `blocks.H.layers.L.weight`,
        `lm_head.weight` or `lm_heads.H.weight`, `token_map`;
    ours: the same names, and for sequential heads `fc.*`, `layers.*` and norms, beside a config.json
        whose `specx` and `speculators_config` blocks say what the heads are and for which target.
Nothing is unpickled but tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_specx.draft.checkpoint_files import FORMAT as FORMAT
from vllm_specx.draft.checkpoint_files import CheckpointError as CheckpointError
from vllm_specx.draft.checkpoint_files import TargetShape as TargetShape
from vllm_specx.draft.checkpoint_files import (
    Tensors,
    acceptance_of,
    check_numbers,
    check_target,
    get,
    kind_of,
    own_block,
    read_checkpoint,
    vocab_of,
    without_identity,
)
from vllm_specx.draft.checkpoint_files import read_tensors as read_tensors
from vllm_specx.draft.vocab import DraftVocab, VocabError

Conditioning = Literal["none", "hydra"]
_PREFIXES = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_OLD = re.compile(r"^(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_OWN_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


@dataclass(frozen=True)
class HeadWeights:
    """Draft heads in the target's dtype.

    conditioning: "none" are Medusa's parallel heads; "hydra" are sequential ones, each fed with the
        embedding of the token before it (arXiv 2402.05109).
    depth: tokens that can be drafted.
    blocks: [heads, layers, hidden, hidden], weights of the residual blocks; None for "hydra".
    biases: [heads, layers, hidden] or None.
    lm_heads: [1 or heads, N, hidden], logits of the draft vocabulary, or None for the target's own.
    vocab: the draft vocabulary; None is all of the target's.
    sequential: the tensors of a "hydra" checkpoint by name (draft/medusa_heads.py).
    logit_scale: vLLM's `logit_scale`.
    acceptance: by depth, how often drafts of validation text were accepted; empty if unknown.
    """

    conditioning: Conditioning
    depth: int
    blocks: torch.Tensor | None
    biases: torch.Tensor | None
    lm_heads: torch.Tensor | None
    vocab: DraftVocab | None
    sequential: Tensors = field(default_factory=dict)
    logit_scale: float = 1.0
    acceptance: tuple[float, ...] = ()


def load_heads(path: str | Path, target: TargetShape) -> HeadWeights:
    """Read a checkpoint folder or file and fit it to the target.

    Raises CheckpointError: one sentence that says what does not fit.
    """
    path = Path(path).expanduser()
    tensors, config = read_checkpoint(path)
    named = {_PREFIXES.sub("", name): tensor for name, tensor in tensors.items()}
    try:
        return _fit(_rename(named), config, target, path)
    except VocabError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_for_vllm(heads: HeadWeights, lm_head: torch.Tensor, folder: Path) -> None:
    """Write parallel heads as vLLM 0.32's own method `medusa` loads them.

    lm_head: [V, hidden], the target's. Stock vLLM refuses a token_map ("not initialized from
    checkpoint") and does not share the target's lm_head, so the file holds all of its rows and the
    draft vocabulary is the whole one. Raises CheckpointError for sequential heads.
    """
    from safetensors.torch import save_file

    if heads.blocks is None:
        raise CheckpointError("sequential heads have no form that vLLM's own medusa loads.")
    count, layers, hidden, _ = heads.blocks.shape
    tensors: Tensors = {"lm_head.weight": lm_head.to(heads.blocks.dtype).contiguous()}
    for head in range(count):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}."
            tensors[f"{name}weight"] = heads.blocks[head, layer].contiguous()
            if heads.biases is not None:
                tensors[f"{name}bias"] = heads.biases[head, layer].contiguous()
    if heads.lm_heads is not None and heads.vocab is None:
        del tensors["lm_head.weight"]
        for head in range(count):
            own = heads.lm_heads[min(head, len(heads.lm_heads) - 1)]
            tensors[f"lm_heads.{head}.weight"] = own.clone()
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": lm_head.shape[0],
        "num_heads": count,
        "num_hidden_layers": layers,
        "original_lm_head": "lm_head.weight" in tensors,
        "medusa_fc_bias": heads.biases is not None,
        "logit_scale": heads.logit_scale,
        "dtype": str(heads.blocks.dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _rename(tensors: Tensors) -> Tensors:
    """FasterDecoding's names as vLLM's; others stay."""
    renamed = {}
    for name, tensor in tensors.items():
        if match := _OLD.match(name):
            head, layer, linear, kind = match.groups()
            name = f"blocks.{head}.layers.{layer}.{kind}" if linear else f"lm_heads.{head}.{kind}"
        renamed[name] = tensor
    return renamed


def _fit(
    tensors: Tensors, config: Mapping[str, Any], target: TargetShape, path: Path
) -> HeadWeights:
    if kind_of(tensors, config) == "eagle":
        raise CheckpointError(
            f"{path} holds an EAGLE draft, not Medusa heads; write method 'specx:eagle'."
        )
    check_numbers(tensors, path)
    specx = own_block(config, path)
    check_target("hidden_size", config.get("hidden_size"), target.hidden_size, path)
    check_target("vocab_size", config.get("vocab_size"), target.vocab_size, path)
    vocab = _vocab(tensors, config, target, path)
    size = len(vocab) if vocab else target.vocab_size
    conditioning = specx.get("conditioning", "none")
    if conditioning not in ("none", "hydra"):
        raise CheckpointError(f"{path}: conditioning {conditioning!r} is neither none nor hydra.")
    blocks = biases = None
    sequential: Tensors = {}
    if conditioning == "hydra":
        depth = int(config.get("num_heads", 4))
        sequential = _sequential(tensors, config, target, path)
    else:
        blocks, biases = _blocks(tensors, target, path)
        depth = blocks.shape[0]
    return HeadWeights(
        conditioning=conditioning,
        depth=depth,
        blocks=blocks,
        biases=biases,
        lm_heads=_lm_heads(tensors, config, depth, size, vocab, target, path),
        vocab=vocab,
        sequential=sequential,
        logit_scale=float(config.get("logit_scale", 1.0)),
        acceptance=acceptance_of(specx, path),
    )


def _vocab(
    tensors: Tensors, config: Mapping[str, Any], target: TargetShape, path: Path
) -> DraftVocab | None:
    said = config.get("truncated_vocab_size", config.get("draft_vocab_size"))
    vocab = vocab_of(tensors, said, target, path)
    if vocab is None and isinstance(said, int) and said < target.vocab_size:
        raise CheckpointError(
            f"{path} has a draft vocabulary of {said} tokens, but no token_map that says which."
        )
    return without_identity(vocab)


def _blocks(
    tensors: Tensors, target: TargetShape, path: Path
) -> tuple[torch.Tensor, torch.Tensor | None]:
    places = {
        (int(match.group(1)), int(match.group(2)))
        for name in tensors
        if (match := _BLOCK.match(name)) and match.group(3) == "weight"
    }
    if not places:
        found = ", ".join(sorted(tensors)[:3]) or "nothing"
        raise CheckpointError(f"{path} has no Medusa heads; it holds {found}.")
    heads, layers = max(h for h, _ in places) + 1, max(n for _, n in places) + 1
    hidden = target.hidden_size
    weights, biases = [], []
    for head in range(heads):
        for layer in range(layers):
            name = f"blocks.{head}.layers.{layer}."
            weight = get(tensors, f"{name}weight", (hidden, hidden), target, path)
            weights.append(weight)
            if f"{name}bias" in tensors:
                biases.append(get(tensors, f"{name}bias", (hidden,), target, path))
    if biases and len(biases) != len(weights):
        raise CheckpointError(f"{path}: some residual blocks have a bias and others have none.")
    stacked = torch.stack(weights).view(heads, layers, hidden, hidden)
    return stacked, torch.stack(biases).view(heads, layers, hidden) if biases else None


def _lm_heads(
    tensors: Tensors,
    config: Mapping[str, Any],
    depth: int,
    size: int,
    vocab: DraftVocab | None,
    target: TargetShape,
    path: Path,
) -> torch.Tensor | None:
    own = {int(m.group(1)): name for name in tensors if (m := _OWN_HEAD.match(name))}
    names = [own[i] for i in sorted(own)]
    if "lm_head.weight" in tensors:
        names = ["lm_head.weight"]
    elif config.get("original_lm_head") and own:
        names = names[:1]
    if not names:
        return None
    if len(names) not in (1, depth):
        raise CheckpointError(f"{path} has {len(names)} lm_heads for {depth} heads.")
    found = []
    for name in names:
        if vocab is not None and tensors[name].shape[0] == target.vocab_size > size:
            tensors = {**tensors, name: tensors[name][vocab.token_ids]}
        found.append(get(tensors, name, (size, target.hidden_size), target, path))
    return torch.stack(found)


def _sequential(
    tensors: Tensors, config: Mapping[str, Any], target: TargetShape, path: Path
) -> Tensors:
    from vllm_specx.draft.medusa_heads import sequential_shapes

    shapes = sequential_shapes(
        target.hidden_size,
        layers=int(config.get("num_hidden_layers", 1)),
        inner=int(config.get("intermediate_size", 4 * target.hidden_size)),
    )
    return {name: get(tensors, name, shape, target, path) for name, shape in shapes.items()}
