"""Draft heads in the worker: found, read, and given what they need of the target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from vllm_specx import config
from vllm_specx.draft.checkpoint_files import kind_of_checkpoint
from vllm_specx.draft.checkpoints import CheckpointError, TargetShape, load_heads
from vllm_specx.draft.draft_model import DraftModelDrafter
from vllm_specx.draft.draft_model_checkpoint import holds_model
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.paced import PacedDrafter
from vllm_specx.draft.proposer import Proposer
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.models.embedded import PREFIX
from vllm_specx.models.embedded import checkpoint as embedded_checkpoint

logger = logging.getLogger(f"vllm.{__name__}")


class MedusaProposer(EngineProposer):
    """`specx:medusa`: Medusa's parallel heads or sequential ones (draft/medusa.py).

    With tensor parallelism every rank holds all heads and the draft vocabulary's rows of the lm_head,
    gathered once at the start, so drafting communicates nothing.
    """

    name = "medusa"
    remembers = True

    def build(self) -> Proposer | None:
        return None

    def load_model(self, target_model: Any) -> None:
        settings = self.specx_config()
        assert isinstance(settings, config.MedusaConfig)
        drafter = medusa_drafter(self.vllm_config, settings, target_model, MedusaDrafter)
        self.proposer = paced(self, drafter)


def paced(
    proposer: EngineProposer, drafter: MedusaDrafter | EagleDrafter | DraftModelDrafter
) -> Proposer:
    """The drafter, left out where it does not pay; as it is, if the configuration says when to draft."""
    if not config.drafts_by_goodput(proposer.specx_config()):
        return drafter
    trees = config.tree_of(proposer.specx_config()) is not None
    return PacedDrafter(drafter, proposer.num_speculative_tokens, trees=trees)


M = TypeVar("M", bound=MedusaDrafter)


def medusa_drafter(
    vllm_config: Any, settings: config.MedusaConfig, target_model: Any, kind: type[M]
) -> M:
    """The heads that the configuration names, with what they need of the target."""
    head, embeddings = head_and_embeddings(target_model)
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    shape = TargetShape(model_config.hf_text_config.hidden_size, vocab_size, head.dtype)
    heads = load_heads(local_folder(settings.heads), shape)
    logger.info(
        "vllm_specx: %d %s heads from %s%s.",
        heads.depth,
        "sequential" if heads.conditioning == "hydra" else "parallel",
        settings.heads,
        f", {len(heads.vocab)} draft tokens" if heads.vocab else "",
    )
    return kind(settings, heads, lm_head=head[:vocab_size], embeddings=embeddings)


def trained_part(
    settings: config.SpecxConfig,
) -> config.MedusaConfig | config.EagleConfig | config.DraftModelConfig | None:
    """The keys of the trained draft, if there is one. Raises CheckpointError."""
    if isinstance(settings, config.AutoConfig):
        folder = local_folder(settings.heads)
        if holds_model(folder):
            if other := [
                key for key in ("vocab", "aux_layers") if getattr(settings, key) is not None
            ]:
                raise CheckpointError(
                    f"{settings.heads} is a draft model, which has no '{other[0]}'; take the key out."
                )
            return settings.draft_model()
        heads = kind_of_checkpoint(folder) == "medusa"
        return settings.medusa() if heads else settings.eagle()
    if isinstance(settings, config.MedusaConfig | config.EagleConfig | config.DraftModelConfig):
        return settings
    return None


def head_and_embeddings(target_model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's lm_head (its embeddings, if they are tied) and its embeddings: [padded vocabulary,
    hidden] each. Raises CheckpointError."""
    head = target_weight(target_model, "lm_head")
    embeddings = target_weight(target_model, "embed_tokens")
    head = embeddings if head is None else head
    if head is None:
        raise CheckpointError(
            f"{type(target_model).__name__} has neither lm_head nor embed_tokens where draft heads "
            "look for them; serve this target with specx:ngram."
        )
    return head, embeddings


def target_weight(target_model: Any, name: str) -> torch.Tensor | None:
    """[padded vocabulary, hidden]: all rows of the target's `lm_head` or `embed_tokens`, from all
    tensor-parallel ranks; None if it has none, or one that is no plain matrix (quantized)."""
    for owner in (target_model, *_inner(target_model)):
        layer = getattr(owner, name, None)
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
            return _gathered(weight.detach())
    return None


def _inner(model: Any) -> list[Any]:
    language = getattr(model, "get_language_model", None)
    found = [getattr(model, "model", None), language() if callable(language) else None]
    return [
        inner
        for owner in found
        if owner is not None
        for inner in (owner, getattr(owner, "model", None))
        if inner is not None
    ]


def _gathered(weight: torch.Tensor) -> torch.Tensor:
    from vllm.distributed import (
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    if get_tensor_model_parallel_world_size() == 1:
        return weight
    gathered: torch.Tensor = tensor_model_parallel_all_gather(weight, dim=0)
    return gathered


_DRAFT_FILES = ("*.json", "*.safetensors", "*.npy", "*.pt", "*.bin")


def local_folder(
    checkpoint: str, *, key: str = "heads", files: Sequence[str] = _DRAFT_FILES
) -> Path:
    """The checkpoint as a path, also of `embedded:NAME`; of a hub name, these files are downloaded. key: who names it, for
    messages. Raises CheckpointError."""
    if checkpoint.startswith(PREFIX):
        return embedded_checkpoint(checkpoint)
    path = Path(checkpoint).expanduser()
    if path.exists() or checkpoint.count("/") != 1:
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(checkpoint, allow_patterns=list(files)))
    except Exception as error:
        reason = str(error).split("\n")[0][:160]
        raise CheckpointError(
            f"{key} '{checkpoint}' is no local path and cannot be downloaded ({reason}); "
            "give the path of a folder."
        ) from None
