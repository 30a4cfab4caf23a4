"""n-gram lookahead and a trained draft in the worker (draft/auto.py)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_specx import config
from vllm_specx.draft.auto import AutoDrafter
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.proposer import Proposer
from vllm_specx.draft.prospects import Prospects
from vllm_specx.engine.eagle import eagle_drafter
from vllm_specx.engine.heads import medusa_drafter, trained_part
from vllm_specx.engine.proposers import EngineProposer

logger = logging.getLogger(f"vllm.{__name__}")
_OVERHEAD = 0.01
"""Of a draft step beyond reading its weights, in decode steps of the target."""


class AutoProposer(EngineProposer):
    """`specx:auto`: per request and step the n-gram lookahead or the trained draft."""

    name = "auto"
    remembers = True

    def build(self) -> Proposer | None:
        self.aux_layers = self._settings().aux_layers or ()
        return None

    def _settings(self) -> config.AutoConfig:
        settings = self.specx_config()
        assert isinstance(settings, config.AutoConfig)
        return settings

    def load_model(self, target_model: Any) -> None:
        settings = self._settings()
        part = trained_part(settings)
        trained: MedusaDrafter | EagleDrafter
        if isinstance(part, config.MedusaConfig):
            trained = medusa_drafter(self, part, target_model)
            depth = min(settings.depth, trained.depth)
        else:
            assert part is not None
            trained = eagle_drafter(self, part, target_model)
            depth = settings.depth
        depth = min(depth, self.num_speculative_tokens)
        share = _OVERHEAD + trained.step_bytes() / _bytes(target_model)
        self.proposer = AutoDrafter(
            self.lookahead(settings.ngram()),
            trained,
            depth=depth,
            step_share=share,
            prospects=Prospects(depth, trained.acceptance),
        )
        logger.info(
            "vllm_specx: beside it the n-gram lookahead; a step of the draft is taken to cost %.1f%% of "
            "a step of the target.",
            100 * share,
        )


def _bytes(model: Any) -> int:
    """What a forward of the target reads: its weights, but of an untied embedding only rows."""
    found: dict[int, torch.Tensor] = {p.data_ptr(): p for p in model.parameters()}
    embeddings = [p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight")]
    heads = [p for name, p in model.named_parameters() if "lm_head" in name]
    if heads and embeddings and heads[0].data_ptr() != embeddings[0].data_ptr():
        found.pop(embeddings[0].data_ptr(), None)
    return sum(p.numel() * p.element_size() for p in found.values())
