"""What our speculators share: K of the step, slots without a draft, faults that cost drafts only."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specx import config
from vllm_specx.engine.guard import Guard
from vllm_specx.engine.translate import settings_of

logger = logging.getLogger(f"vllm.{__name__}")


class SpecxSpeculator(BaseSpeculator):
    """Drafts nothing: each slot holds the request's last token, as an ordinary draft that may be
    rejected. A subclass overwrites slots in `draft`.

    V2 has no empty slots (its forward reads whatever is there, so -1 would be no token); a slot that
    says nothing costs its verification and is never wrong, because drafts are verified whatever they are.
    vLLM's NgramGPUSpeculator fills its own in the same way.
    """

    name: ClassVar[str] = "nothing"
    supports_mm_inputs = False
    draft_logits = None
    """Drafts are certain of their tokens: the rejection sampler takes them as one-hot."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self._prepare(vllm_config, device, req_states)

    def _prepare(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.req_states = req_states
        self.speculative_config = vllm_config.speculative_config
        self.max_k: int = self.speculative_config.num_speculative_tokens
        self.max_batch: int = vllm_config.scheduler_config.max_num_seqs
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.drafts = torch.zeros(self.max_batch, self.max_k, dtype=torch.int64, device=device)
        self.guard = Guard(self.name)

    def specx_config(self) -> config.SpecxConfig:
        """The validated `additional_config["specx"]`."""
        return settings_of(self.vllm_config)

    def admit(self, row: int, params: Any) -> None:
        """A request takes a row of the runner's request states. params: its SamplingParams, or None."""

    def end(self, row: int) -> None:
        """The request of this row has ended; its row still holds what it said."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Drafting is a handful of kernels after the target's forward, launched one by one."""

    def capture(self) -> None:
        """Nothing is captured."""

    @torch.inference_mode()
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
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [requests, max K] on the device, of which the first K columns are used.

        Shapes as in BaseSpeculator.propose. K=0 drafts nothing and launches nothing. Only shapes that
        the host knows are used: batch size and K.
        """
        size = input_batch.num_reqs
        drafts = self.drafts[:size]
        k = self.max_k if num_speculative_tokens is None else num_speculative_tokens
        if k == 0 or (dummy_run and not is_profile):
            return drafts
        slots = drafts[:, :k]
        last = last_sampled[input_batch.idx_mapping, 0]
        slots.copy_(last[:, None].expand(size, k))

        def step() -> bool:
            self.draft(input_batch, last_hidden_states, num_sampled, last, slots)
            return True

        if not self.guard.run(step, False):
            slots.copy_(last[:, None].expand(size, k))
        return drafts

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write drafts into slots, int64 [B, K], whose entries are the last tokens.

        hidden_states: [tokens, hidden] of the target's forward; num_sampled: int [B], the tokens that
        the step committed, 0 in a prefill that goes on; last: int64 [B], the last of them.
        """
