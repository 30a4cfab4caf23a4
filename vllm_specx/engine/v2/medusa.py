"""Draft heads on Model Runner V2: chains made on the device."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specx import config
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.engine.heads import medusa_drafter
from vllm_specx.engine.v2.base import SpecxSpeculator

logger = logging.getLogger(f"vllm.{__name__}")


class DeviceHeads(MedusaDrafter):
    """MedusaDrafter whose chains stay on the device; no step waits for the host."""

    @property
    def network(self) -> torch.nn.Module:
        """The heads without the lm_head."""
        network = self._parallel if self._parallel is not None else self._sequential
        assert network is not None
        return network

    def chains(self, hidden: torch.Tensor, last: torch.Tensor, depth: int) -> torch.Tensor:
        """int64 [B, depth], the likeliest tokens. hidden: [B, hidden] at the last accepted rows; last:
        int64 [B], the token that follows; depth: at most the number of heads."""
        state = hidden.to(self._dtype)
        if self._parallel is not None:
            return self._targets(self.logits(state, depth).argmax(-1)).T
        assert self._sequential is not None
        tokens, token = [], last
        for _ in range(depth):
            state = self._sequential(state, self._embed(token))
            token = self._targets(self._logits(state).argmax(-1))
            tokens.append(token)
        return torch.stack(tokens, 1)


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
        settings = self.specx_config()
        assert isinstance(settings, config.MedusaConfig)
        self.heads = medusa_drafter(self.vllm_config, settings, target_model, DeviceHeads)
        self.model = self.heads.network
        depth = self.heads.depth
        if self.max_k > depth:
            logger.warning(
                "vllm_specx: num_speculative_tokens is %d, but %s has %d heads; set it to %d.",
                self.max_k,
                settings.heads,
                depth,
                depth,
            )

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Not used: load_model does all of it."""
        raise NotImplementedError

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """The heads attend to nothing."""

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        depth = min(slots.shape[1], self.heads.depth)
        accepted = (num_sampled - 1).clamp(min=0)
        rows = input_batch.logits_indices[input_batch.cu_num_logits[:-1] + accepted]
        slots[:, :depth] = self.heads.chains(hidden_states[rows], last, depth)
