"""n-gram lookahead beside vLLM's own EAGLE-3 on Model Runner V2."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_specx import config
from vllm_specx.engine.guard import Guard
from vllm_specx.engine.translate import settings_of
from vllm_specx.engine.v2.auto import TwoSources
from vllm_specx.engine.v2.captured import cut_to


class AutoEagleSpeculator(EagleSpeculator):
    """`specx:auto` with an EAGLE-3 draft that vLLM's speculator serves: it makes `depth` tokens at most,
    and the device chooses between them and what the n-gram lookahead has."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device)
        # A chosen n-gram has no distribution of the draft behind it: all drafts are one-hot.
        self.draft_logits = None
        settings = settings_of(vllm_config)
        assert isinstance(settings, config.AutoConfig)
        self.depth = min(settings.depth, self.num_speculative_steps)
        self.both = TwoSources(settings, vllm_config, device, req_states)
        self.drafts = torch.zeros_like(self.draft_tokens)
        self.guard = Guard("auto")

    def admit(self, row: int, params: Any) -> None:
        """See SpecxSpeculator."""
        self.both.admit(row, params)

    def end(self, row: int) -> None:
        """See SpecxSpeculator."""
        self.both.index.end(row)

    def capture(self) -> None:
        """vLLM's, for as many tokens as it will be asked for."""
        with cut_to(self.speculative_config, self.depth):
            super().capture()

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [requests, max K]; see BaseSpeculator.propose."""
        k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        depth = min(k, self.depth)
        trained = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            *args,
            num_speculative_tokens=depth,
            **kwargs,
        )
        drafts = self.drafts[: input_batch.num_reqs]
        if k == 0 or kwargs.get("dummy_run"):
            return drafts
        with torch.inference_mode():
            last = last_sampled[input_batch.idx_mapping, 0]
            slots, made = drafts[:, :k], trained[: len(drafts), :depth]

            def step() -> bool:
                self.both.draft(input_batch, num_sampled, last, made, slots)
                return True

            if not self.guard.run(step, False):
                slots.copy_(last[:, None].expand_as(slots))
                slots[:, :depth] = made
        return drafts
