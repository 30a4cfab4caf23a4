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

from vllm_specx.config import ConfigError
from vllm_specx.draft.vocab import DraftVocab, VocabError

Tensors = dict[str, torch.Tensor]
Conditioning = Literal["none", "hydra"]
FORMAT = 1
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "state")
_PREFIXES = re.compile(r"^(model\.)?(medusa_heads?\.)?")
_OLD = re.compile(r"^(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_OWN_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class TargetShape:
    """What heads must fit. vocab_size: rows of the target's lm_head; dtype: of its activations."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype = torch.float32


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
    files, config_file = _find(path)
    config = _read_config(config_file)
    tensors: Tensors = {}
    for file in files:
        tensors |= read_tensors(file)
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


def read_tensors(file: Path) -> Tensors:
    """All tensors of a .safetensors, .pt or .bin file, without running code from it.

    Raises CheckpointError.
    """
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # safetensors and torch raise whatever their parsers do; the file is unusable in any case.
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise CheckpointError(
                f"{file} holds more than tensors, and code from checkpoints is never run; "
                "save its state_dict as safetensors."
            ) from None
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(
            f"{file} cannot be read ({reason}); it may be truncated, copy it again."
        ) from None
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in loaded.values()
    ):
        raise CheckpointError(f"{file} is not a mapping of names to tensors.")
    return dict(loaded)


def _find(path: Path) -> tuple[list[Path], Path | None]:
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise CheckpointError(f"{path} is none of {', '.join(_SUFFIXES)}.")
        config = path.with_name("config.json")
        return [path], config if config.is_file() else None
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; check 'heads'.")
    if (path / "heads" / "config.json").is_file():
        return _find(path / "heads")
    for suffix in _SUFFIXES:
        if files := sorted(f for f in path.glob(f"*{suffix}") if f.stem not in _NOT_WEIGHTS):
            config = path / "config.json"
            return files, config if config.is_file() else None
    raise CheckpointError(f"{path} has no weights: none of {', '.join(_SUFFIXES)}.")


def _read_config(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must be a JSON mapping.")
    return config


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
    _check_numbers(tensors, path)
    specx = config.get("specx")
    specx = specx if isinstance(specx, dict) else {}
    if specx.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path} has format {specx['format']!r}, and this version reads {FORMAT}; update vllm_specx."
        )
    _check_target(config, target, path)
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
        acceptance=tuple(float(a) for a in specx.get("acceptance", ())),
    )


def _check_numbers(tensors: Tensors, path: Path) -> None:
    for name, tensor in tensors.items():
        if name in ("token_map", "d2t", "t2d"):
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{path}: '{name}' is {str(tensor.dtype).removeprefix('torch.')}; "
                "quantized heads are not read, save them as bfloat16 or float32."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path}: '{name}' has values that are not finite.")


def _check_target(config: Mapping[str, Any], target: TargetShape, path: Path) -> None:
    for key, mine in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        made_for = config.get(key)
        if isinstance(made_for, int) and made_for != mine:
            raise CheckpointError(
                f"{path} was made for a target with {key} {made_for}, but this target has {mine}; "
                "use heads that were trained for it."
            )


def _vocab(
    tensors: Tensors, config: Mapping[str, Any], target: TargetShape, path: Path
) -> DraftVocab | None:
    said = config.get("truncated_vocab_size", config.get("draft_vocab_size"))
    vocab = None
    if "token_map" in tensors:
        vocab = DraftVocab(tensors["token_map"].to(torch.int64), target.vocab_size)
    elif "d2t" in tensors:
        vocab = DraftVocab.from_d2t(tensors["d2t"], target.vocab_size)
    if vocab is None and isinstance(said, int) and said < target.vocab_size:
        raise CheckpointError(
            f"{path} has a draft vocabulary of {said} tokens, but no token_map that says which."
        )
    if vocab is not None and isinstance(said, int) and said != len(vocab):
        raise CheckpointError(
            f"{path}: token_map has {len(vocab)} tokens, but the configuration says {said}."
        )
    return vocab if vocab is None or len(vocab) < target.vocab_size else _identity(vocab)


def _identity(vocab: DraftVocab) -> DraftVocab | None:
    """None for a map of every token to itself."""
    same = torch.equal(vocab.token_ids, torch.arange(len(vocab)))
    return None if same else vocab


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
            weight = _get(tensors, f"{name}weight", (hidden, hidden), target, path)
            weights.append(weight)
            if f"{name}bias" in tensors:
                biases.append(_get(tensors, f"{name}bias", (hidden,), target, path))
    if biases and len(biases) != len(weights):
        raise CheckpointError(f"{path}: some residual blocks have a bias and others have none.")
    stacked = torch.stack(weights).view(heads, layers, hidden, hidden)
    return stacked, torch.stack(biases).view(heads, layers, hidden) if biases else None


def _get(
    tensors: Tensors, name: str, shape: tuple[int, ...], target: TargetShape, path: Path
) -> torch.Tensor:
    if name not in tensors:
        raise CheckpointError(f"{path} has no '{name}'; it may be incomplete, copy it again.")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(tensor.shape)}, but a target with hidden size "
            f"{target.hidden_size} and {target.vocab_size} tokens needs {list(shape)}."
        )
    return tensor.to(target.dtype)


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
        found.append(_get(tensors, name, (size, target.hidden_size), target, path))
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
    return {name: _get(tensors, name, shape, target, path) for name, shape in shapes.items()}
