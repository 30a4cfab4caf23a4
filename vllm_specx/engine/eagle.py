"""EAGLE drafts in the worker: found, read, and given what they need of the target."""

from __future__ import annotations

import logging
from typing import Any

from vllm_specx import config
from vllm_specx.draft.checkpoints import CheckpointError, TargetShape
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.eagle_checkpoints import load_eagle, most_frequent
from vllm_specx.draft.eagle_weights import EagleWeights
from vllm_specx.draft.paged_cache import PAGE
from vllm_specx.draft.proposer import Proposer
from vllm_specx.engine.heads import head_and_embeddings, local_folder, paced
from vllm_specx.engine.proposers import EngineProposer

logger = logging.getLogger(f"vllm.{__name__}")
_CACHE_BYTES = 2**30


class EagleProposer(EngineProposer):
    """`specx:eagle`: EAGLE and EAGLE-3 drafts (draft/eagle.py).

    With tensor parallelism every rank holds the whole draft, the draft vocabulary's rows of the
    lm_head, all rows of the embeddings (gathered once, unless the draft has its own) and a K/V cache of
    its own, so drafting communicates nothing. All of it is allocated with the target's weights, before
    vLLM looks how much memory is left; what a step needs beside it, some hundred MiB at most for usual
    drafts, is not, as vLLM's profiling run does not draft.
    """

    name = "eagle"
    remembers = True

    def build(self) -> Proposer | None:
        self.aux_layers = self._settings().aux_layers or ()
        return None

    def _settings(self) -> config.EagleConfig:
        settings = self.specx_config()
        assert isinstance(settings, config.EagleConfig)
        return settings

    def load_model(self, target_model: Any) -> None:
        self.proposer = paced(self, eagle_drafter(self, self._settings(), target_model))


def eagle_drafter(
    proposer: EngineProposer, settings: config.EagleConfig, target_model: Any
) -> EagleDrafter:
    """The draft that the configuration names, with what it needs of the target."""
    head, embeddings = head_and_embeddings(target_model)
    model_config = proposer.vllm_config.model_config
    weights = read_draft(settings, target_shape(model_config, head.dtype))
    embeddings = weights.embeddings if embeddings is None else embeddings
    if embeddings is None:
        raise CheckpointError(
            f"{settings.heads} has no embed_tokens, and {type(target_model).__name__} none where a draft "
            "looks for them; use a checkpoint with its own, or specx:ngram."
        )
    tokens = settings.cache_tokens or min(
        proposer.max_batch * proposer.max_model_len,
        _CACHE_BYTES // _bytes_a_token(weights, head.element_size()),
    )
    drafter = EagleDrafter(
        settings,
        weights,
        lm_head=head[: proposer.vocab_size],
        embeddings=embeddings,
        max_batch=proposer.max_batch,
        max_model_len=proposer.max_model_len,
        cache_tokens=tokens,
    )
    logger.info(
        "vllm_specx: EAGLE-%d from %s%s; %.2f GiB with its K/V cache.",
        weights.version,
        settings.heads,
        f", {len(weights.vocab)} draft tokens" if weights.vocab else "",
        drafter.memory() / 2**30,
    )
    return drafter


def _bytes_a_token(weights: EagleWeights, element_size: int) -> int:
    """Of the draft's cache: keys, values, and the page's share of the feature it keeps."""
    shape = weights.shape
    entry = 2 * len(weights.layers) * shape.kv_heads * shape.head_dim
    return (entry + -(-shape.hidden_size // PAGE)) * element_size


def target_shape(model_config: Any, dtype: Any) -> TargetShape:
    """What a draft must fit, of vLLM's ModelConfig."""
    text = model_config.hf_text_config
    return TargetShape(
        text.hidden_size, model_config.get_vocab_size(), dtype, num_layers=text.num_hidden_layers
    )


def read_draft(settings: config.EagleConfig, target: TargetShape) -> EagleWeights:
    """The draft that the configuration asks for. Raises CheckpointError if it does not fit."""
    folder = local_folder(settings.heads)
    weights = load_eagle(folder, target, aux_layers=settings.aux_layers)
    if settings.vocab is not None:
        weights = most_frequent(weights, settings.vocab, settings.heads)
    return weights
