"""A draft model in the worker: found, read, compared with the target's vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from vllm_specx import config
from vllm_specx.draft.draft_model import DraftModelDrafter, longest
from vllm_specx.draft.draft_model_checkpoint import DraftModelWeights, load_draft_model
from vllm_specx.draft.proposer import Proposer
from vllm_specx.draft.sampling import Source
from vllm_specx.draft.vocabularies import Draftable, draftable, read_vocabulary
from vllm_specx.engine.draft_probs import DraftProbs
from vllm_specx.engine.heads import local_folder, paced
from vllm_specx.engine.proposers import EngineProposer

logger = logging.getLogger(f"vllm.{__name__}")
_CACHE_BYTES = 2**31
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


class DraftModelProposer(EngineProposer):
    """`specx:draft_model`: a small language model (draft/draft_model.py).

    With tensor parallelism every rank holds the whole draft and a K/V cache of its own, so drafting
    communicates nothing, and the draft's heads need not divide by the ranks. All of it is allocated with
    the target's weights, before vLLM looks how much memory is left; what a step needs beside it is not.
    """

    name = "draft_model"
    remembers = True
    """Its tokens depend on the request alone (but for rounding, which follows the batch); how many there
    are depends on how earlier drafts fared, on step times and on room in the cache."""

    def build(self) -> Proposer | None:
        return None

    def load_model(self, target_model: Any) -> None:
        settings = self.specx_config()
        assert isinstance(settings, config.DraftModelConfig)
        self._drafter = draft_model_drafter(self, settings, target_model)
        self.proposer = paced(self, self._drafter)
        if settings.probabilistic:
            self.draft_probs = DraftProbs(self.vocab_size)

    def sources(self) -> Mapping[str, Source]:
        return self._drafter.sources


def draft_model_drafter(
    proposer: EngineProposer, settings: config.DraftModelConfig, target_model: Any
) -> DraftModelDrafter:
    """The draft that the configuration names, on the target's device."""
    weights, ids = read_draft_model(settings, proposer.vllm_config.model_config)
    room = longest(settings, weights, proposer.max_model_len)
    if room < proposer.max_model_len:
        logger.info(
            "vllm_specx: %s reads %d tokens, so longer requests, up to max_model_len %d, are not drafted "
            "for; max_model_len beside the method says otherwise.",
            settings.draft,
            room,
            proposer.max_model_len,
        )
    drafter = DraftModelDrafter(
        settings,
        weights,
        ids,
        max_batch=proposer.max_batch,
        max_model_len=proposer.max_model_len,
        cache_tokens=min(proposer.max_batch * room, _CACHE_BYTES // _bytes_a_token(weights)),
        device=next(target_model.parameters()).device,
        # Of the engine, and so of every rank: they draw the same drafts.
        seed=proposer.vllm_config.model_config.seed or 0,
    )
    logger.info(
        "vllm_specx: draft model %s, %d layers, %d tokens in common with the target; %.2f GiB with its "
        "K/V cache.",
        settings.draft,
        len(weights.layers),
        ids.size - len(ids.never),
        drafter.memory() / 2**30,
    )
    return drafter


def read_draft_model(
    settings: config.DraftModelConfig, model_config: Any, *, values: bool = True
) -> tuple[DraftModelWeights, Draftable]:
    """The draft, and what it may draft for the target of vLLM's ModelConfig. values: see
    load_draft_model. Raises CheckpointError."""
    folder = local_folder(settings.draft, key="draft", files=_FILES)
    auto = settings.dtype == "auto"
    dtype = model_config.dtype if auto else getattr(torch, settings.dtype)
    weights = load_draft_model(folder, dtype, values=values)
    ids = draftable(
        read_vocabulary(model_config.tokenizer, model_config.tokenizer_revision),
        read_vocabulary(folder),
        rows=(model_config.get_vocab_size(), len(weights.lm_head)),
        names=(model_config.model, settings.draft),
    )
    return weights, ids


def _bytes_a_token(weights: DraftModelWeights) -> int:
    """Of the draft's cache."""
    shape = weights.shape
    entry = 2 * len(weights.layers) * shape.kv_heads * shape.head_dim
    return entry * weights.embeddings.element_size()
