"""The speculator of each proposer that Model Runner V2 serves."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specx import config
from vllm_specx.engine.translate import settings_of
from vllm_specx.engine.v2.choice import GIVEN


def build(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """For a configuration that choice.runner_of gives to V2."""
    settings = settings_of(vllm_config)
    if isinstance(settings, config.AutoConfig):
        if vllm_config.speculative_config.method == GIVEN:
            from vllm_specx.engine.v2.auto_eagle import AutoEagleSpeculator

            return AutoEagleSpeculator(vllm_config, device, req_states)
        from vllm_specx.engine.v2.auto import AutoSpeculator

        return AutoSpeculator(vllm_config, device, req_states)
    if isinstance(settings, config.MedusaConfig):
        from vllm_specx.engine.v2.medusa import MedusaSpeculator

        return MedusaSpeculator(vllm_config, device, req_states)
    if isinstance(settings, config.NgramConfig):
        from vllm_specx.engine.v2.ngram import NgramSpeculator

        return NgramSpeculator(vllm_config, device, req_states)
    raise NotImplementedError(f"specx:{settings.proposer} on Model Runner V2")
