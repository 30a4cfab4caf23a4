"""What training needs of the target's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_specx.train.errors import TrainError

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
_LM_HEADS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True)
class TargetWeights:
    """embeddings: [V, hidden]; lm_head: [V, hidden] (the embeddings, if they are tied)."""

    name: str
    architectures: list[str]
    embeddings: torch.Tensor
    lm_head: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head."""
        return int(self.lm_head.shape[0])


def folder_of(target: str) -> Path:
    """The checkpoint folder of a path or a hub name (downloaded by huggingface_hub)."""
    folder = Path(target).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(target, allow_patterns=["*.safetensors", "*.json", "*.jinja"])
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise TrainError(
            f"the target {target} is neither a folder nor on the hub ({reason})."
        ) from None


def load_target(target: str) -> TargetWeights:
    """Read the embeddings and lm_head of a safetensors checkpoint. Raises TrainError."""
    folder = folder_of(target)
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainError(f"the target {folder} has no readable config.json ({error}).") from None
    embeddings = _first(folder, _EMBEDDINGS)
    lm_head = _first(folder, _LM_HEADS)
    if lm_head is None and config.get("tie_word_embeddings", True):
        lm_head = embeddings
    if embeddings is None or lm_head is None:
        raise TrainError(f"the target {folder} has no safetensors with embed_tokens and lm_head.")
    architectures = list(config.get("architectures") or [])
    return TargetWeights(folder.name, architectures, embeddings, lm_head)


def _first(folder: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            present = set(weights.keys())
            for name in names:
                if name in present:
                    tensor: torch.Tensor = weights.get_tensor(name)
                    return tensor
    return None
