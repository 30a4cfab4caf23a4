"""Draft heads on Model Runner V2: chains made on the device."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specx import config
from vllm_specx.draft.medusa_device import DeviceHeads
from vllm_specx.engine.heads import medusa_drafter, trained_part
from vllm_specx.engine.v2.base import SpecxSpeculator

logger = logging.getLogger(f"vllm.{__name__}")


class MedusaSpeculator(SpecxSpeculator, DraftModelSpeculator):
    """`specx:medusa` as chains of the step's K tokens.

    A DraftModelSpeculator, because V2 shows the target to no other kind; there are no attention layers
    behind it. Every rank holds all heads, as on V1 (engine/heads.py).
    """

    name: ClassVar[str] = "medusa"

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        DraftModelSpeculator.__init__(self, vllm_config, device)
        self._prepare(vllm_config, device, req_states)
        self.draft_logits = None
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []

    def load_model(self, target_model: Any) -> None:
        """Called by the runner after the target is loaded. Raises CheckpointError."""
        settings = trained_part(self.specx_config())
        assert isinstance(settings, config.MedusaConfig)
        self.use(medusa_drafter(self.vllm_config, settings, target_model, DeviceHeads))

    def use(self, heads: DeviceHeads) -> None:
        """The heads that draft, once they are there."""
        self.heads = heads
        self.model = heads.network
        if self.name == "medusa" and self.max_k > heads.depth:
            logger.warning(
                "vllm_specx: num_speculative_tokens is %d, but there are %d heads; set it to %d.",
                self.max_k,
                heads.depth,
                heads.depth,
            )

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Not used: load_model does all of it."""
        raise NotImplementedError

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """The heads attend to nothing."""

    def chains(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """int64 [B, depth] of the heads; the others as in draft()."""
        accepted = (num_sampled - 1).clamp(min=0)
        rows = input_batch.logits_indices[input_batch.cu_num_logits[:-1] + accepted]
        return self.heads.chains(hidden_states[rows], last, depth)

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        depth = min(slots.shape[1], self.heads.depth)
        slots[:, :depth] = self.chains(input_batch, hidden_states, num_sampled, last, depth)
