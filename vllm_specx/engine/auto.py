"""n-gram lookahead and a trained draft in the worker (draft/auto.py)."""

from __future__ import annotations

from typing import Any

from vllm_specx import config
from vllm_specx.draft.auto import AutoDrafter
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.proposer import Proposer, TrainedDrafter
from vllm_specx.engine.draft_model import draft_model_drafter
from vllm_specx.engine.eagle import eagle_drafter
from vllm_specx.engine.heads import medusa_drafter, trained_part
from vllm_specx.engine.proposers import EngineProposer


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
        trained: TrainedDrafter
        if isinstance(part, config.MedusaConfig):
            trained = medusa_drafter(self.vllm_config, part, target_model, MedusaDrafter)
        elif isinstance(part, config.DraftModelConfig):
            trained = draft_model_drafter(self, part, target_model)
        else:
            assert part is not None
            trained = eagle_drafter(self, part, target_model)
        tree = settings.tree
        depth = min(settings.depth if tree is None else tree.depth, self.num_speculative_tokens)
        self.proposer = AutoDrafter(
            self.lookahead(settings.ngram()), trained, depth=depth, trees=tree is not None
        )
