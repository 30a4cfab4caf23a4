"""The speculator of each proposer that Model Runner V2 serves."""

from __future__ import annotations

from typing import Any

import torch

from vllm_specx import config
from vllm_specx.engine.translate import SELECTED


def build(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """For a configuration that choice.runner_of gives to V2."""
    settings = config.parse(vllm_config.additional_config[SELECTED])
    if isinstance(settings, config.MedusaConfig):
        from vllm_specx.engine.v2.medusa import MedusaSpeculator

        return MedusaSpeculator(vllm_config, device, req_states)
    if isinstance(settings, config.NgramConfig):
        from vllm_specx.engine.v2.ngram import NgramSpeculator

        return NgramSpeculator(vllm_config, device, req_states)
    raise NotImplementedError(f"specx:{settings.proposer} on Model Runner V2")
