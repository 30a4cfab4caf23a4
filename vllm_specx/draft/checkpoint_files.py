"""The files of a draft checkpoint: found, read without running code, and checked.

What is common to all layouts; what the tensors mean is in checkpoints.py and eagle_checkpoints.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vllm_specx.config import ConfigError
from vllm_specx.draft.vocab import DraftVocab
from vllm_specx.messages import shown

Tensors = dict[str, torch.Tensor]
FORMAT = 1
TABLES = frozenset({"token_map", "d2t", "t2d"})
"""Tensors that hold ids or flags."""
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "state")
_MEDUSA = re.compile(r"^(model\.)?(medusa_heads?\.)?(\d+\.\d+\.|blocks\.\d+\.|lm_heads\.\d+\.)")
_EAGLE = re.compile(r"^(model\.)?(midlayer|layers\.\d+|transformer)\.self_attn\.")
_EAGLE_FC = re.compile(r"^(model\.)?(fusion_)?fc\.weight$")


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class TargetShape:
    """What a draft must fit.

    vocab_size: rows of the target's lm_head. dtype: of its activations. num_layers: decoder layers
    of the target; None if unknown.
    """

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype = torch.float32
    num_layers: int | None = None


def read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """All tensors and the configuration (empty if there is none) of a folder or file.

    A `token_map` may be in a .npy file of its own, named by `specx.token_map`: vLLM's EAGLE refuses
    tensors that it does not know. Raises CheckpointError.
    """
    files, config_file = find_files(path)
    config = read_config(config_file)
    tensors: Tensors = {}
    for file in files:
        tensors |= read_tensors(file)
    own = config.get("specx")
    if isinstance(own, dict) and own.get("token_map") is not None:
        tensors["token_map"] = _read_ids(own["token_map"], files[0].parent)
    return tensors, config


def _read_ids(name: Any, folder: Path) -> torch.Tensor:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".npy"):
        raise CheckpointError(
            f"{folder}: specx.token_map in config.json is {shown(name)}; it must be the name of a .npy "
            "file beside it."
        )
    try:
        ids = np.load(folder / name, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise CheckpointError(
            f"{folder / name} cannot be read ({reason}); it may be truncated, copy it again."
        ) from None
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        raise CheckpointError(f"{folder / name} does not hold whole numbers; copy it again.")
    return torch.from_numpy(ids.astype(np.int64))


def find_files(path: Path) -> tuple[list[Path], Path | None]:
    """The weights and the config.json of a folder or file. Raises CheckpointError."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise CheckpointError(f"{path} is none of {', '.join(_SUFFIXES)}.")
        config = path.with_name("config.json")
        return [path], config if config.is_file() else None
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; check 'heads'.")
    if (path / "heads" / "config.json").is_file():
        return find_files(path / "heads")
    for suffix in _SUFFIXES:
        if files := sorted(f for f in path.glob(f"*{suffix}") if f.stem not in _NOT_WEIGHTS):
            config = path / "config.json"
            return files, config if config.is_file() else None
    raise CheckpointError(f"{path} has no weights: none of {', '.join(_SUFFIXES)}.")


def read_config(file: Path | None) -> dict[str, Any]:
    """The mapping in a config.json; {} for None. Raises CheckpointError."""
    if file is None:
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must be a JSON mapping.")
    return config


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


def kind_of(names: Iterable[str], config: Mapping[str, Any]) -> Literal["medusa", "eagle"] | None:
    """What a checkpoint with these tensors holds; None: neither."""
    names = list(names)
    if config.get("model_type") == "medusa" or any(_MEDUSA.match(name) for name in names):
        return "medusa"
    attends = any(_EAGLE.match(name) for name in names)
    return "eagle" if attends and any(_EAGLE_FC.match(name) for name in names) else None


def kind_of_checkpoint(path: Path) -> Literal["medusa", "eagle"]:
    """What a folder or file holds. Raises CheckpointError."""
    tensors, config = read_checkpoint(path)
    kind = kind_of(tensors, config)
    if kind is None and isinstance(own := config.get("specx"), dict) and "conditioning" in own:
        kind = "medusa"
    if kind is None:
        found = ", ".join(sorted(tensors)[:3]) or "nothing"
        raise CheckpointError(
            f"{path} has neither Medusa heads nor an EAGLE draft; it holds {found}."
        )
    return kind


def own_block(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The `specx` block of our own checkpoints; {} in others. Raises CheckpointError."""
    own = config.get("specx")
    own = own if isinstance(own, dict) else {}
    if own.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path} has format {own['format']!r}, and this version reads {FORMAT}; update vllm_specx."
        )
    return own


def acceptance_of(own: Mapping[str, Any], path: Path) -> tuple[float, ...]:
    """`acceptance` of a specx block: by depth, from 0 to 1. Raises CheckpointError."""
    said = own.get("acceptance", [])
    if not isinstance(said, list) or not all(
        isinstance(a, int | float) and not isinstance(a, bool) and 0 <= a <= 1 for a in said
    ):
        raise CheckpointError(
            f"{path}: specx.acceptance in config.json must be a list of numbers from 0 to 1."
        )
    return tuple(float(a) for a in said)


def check_numbers(tensors: Tensors, path: Path) -> None:
    """Refuse quantized weights and values that are not finite. Raises CheckpointError."""
    for name, tensor in tensors.items():
        if name in TABLES:
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{path}: '{name}' is {str(tensor.dtype).removeprefix('torch.')}; "
                "quantized heads are not read, save them as bfloat16 or float32."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path}: '{name}' has values that are not finite.")


def check_target(key: str, made_for: Any, mine: int, path: Path) -> None:
    """Refuse a size in the configuration that is not the target's. Raises CheckpointError."""
    if isinstance(made_for, int) and made_for != mine:
        raise CheckpointError(
            f"{path} was made for a target with {key} {made_for}, but this target has {mine}; "
            "use heads that were trained for it."
        )


def vocab_of(tensors: Tensors, said: Any, target: TargetShape, path: Path) -> DraftVocab | None:
    """The draft vocabulary that `token_map` or `d2t` says; None for no map.

    said: its size in the configuration, if any. Raises CheckpointError and VocabError.
    """
    for name in ("token_map", "d2t"):
        if name in tensors:
            table = tensors[name]
            if table.is_floating_point() or table.dtype == torch.bool or table.dim() != 1:
                kind = str(table.dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{path}: '{name}' must be a list of whole numbers, not {kind} of shape "
                    f"{list(table.shape)}; the checkpoint is damaged, copy it again."
                )
            break
    else:
        return None
    vocab = (
        DraftVocab(table.to(torch.int64), target.vocab_size)
        if name == "token_map"
        else DraftVocab.from_d2t(table, target.vocab_size)
    )
    if isinstance(said, int) and said != len(vocab):
        raise CheckpointError(
            f"{path}: {name} has {len(vocab)} tokens, but the configuration says {said}."
        )
    return vocab


def without_identity(vocab: DraftVocab | None) -> DraftVocab | None:
    """None for a map of every token of the target to itself."""
    if vocab is None or len(vocab) < vocab.target_size:
        return vocab
    return None if torch.equal(vocab.token_ids, torch.arange(len(vocab))) else vocab


def get(
    tensors: Tensors, name: str, shape: tuple[int, ...], target: TargetShape, path: Path
) -> torch.Tensor:
    """The tensor of that name and shape in the target's dtype. Raises CheckpointError."""
    if name not in tensors:
        raise CheckpointError(f"{path} has no '{name}'; it may be incomplete, copy it again.")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(tensor.shape)}, but a target with hidden size "
            f"{target.hidden_size} and {target.vocab_size} tokens needs {list(shape)}."
        )
    return tensor.to(target.dtype)
