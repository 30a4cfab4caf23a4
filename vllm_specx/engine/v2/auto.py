"""n-gram lookahead and a trained draft together on Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_specx import config
from vllm_specx.draft.medusa_device import DeviceHeads
from vllm_specx.engine.v2.medusa import MedusaSpeculator
from vllm_specx.engine.v2.ngram_index import DeviceNgram, seeded
from vllm_specx.engine.v2.sources import Sources


class TwoSources:
    """The n-gram index, and what is known of both sources."""

    def __init__(
        self,
        settings: config.AutoConfig,
        vllm_config: Any,
        device: torch.device,
        req_states: Any,
        acceptance: Sequence[float] = (),
    ) -> None:
        """acceptance: see Sources."""
        self.req_states = req_states
        self.index = DeviceNgram(settings.ngram(), vllm_config, device, req_states)
        self.sources = Sources(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.speculative_config.num_speculative_tokens,
            acceptance,
            device,
        )

    def admit(self, row: int, params: Any) -> None:
        """See SpecxSpeculator."""
        self.index.admit(row, params)
        self.sources.admit(row, params is not None and seeded(params))

    def draft(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        trained: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write into slots, int64 [B, K], which source promises more. trained: int64 [B, depth], depth at
        most K; the others as in SpecxSpeculator.draft."""
        rows = input_batch.idx_mapping
        states = self.req_states
        lengths = states.total_len.gpu
        self.sources.learn(rows, states.all_token_ids.gpu, lengths, num_sampled)
        slots.fill_(-1)
        matched = self.index.draft(rows, slots)
        chosen = self.sources.choose(rows, lengths, matched, slots, trained)
        slots.copy_(torch.where(chosen < 0, last[:, None], chosen))


class AutoSpeculator(MedusaSpeculator):
    """`specx:auto` with Medusa heads: both draft in every step, and the device chooses."""

    name: ClassVar[str] = "auto"

    def use(self, heads: DeviceHeads) -> None:
        super().use(heads)
        settings = self.specx_config()
        assert isinstance(settings, config.AutoConfig)
        self.depth = min(settings.depth, heads.depth)
        self.both = TwoSources(
            settings, self.vllm_config, self.device, self.req_states, heads.acceptance
        )

    def admit(self, row: int, params: Any) -> None:
        self.both.admit(row, params)

    def end(self, row: int) -> None:
        self.both.index.end(row)

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        depth = min(slots.shape[1], self.depth)
        trained = self.chains(input_batch, hidden_states, num_sampled, last, depth)
        self.both.draft(input_batch, num_sampled, last, trained, slots)
