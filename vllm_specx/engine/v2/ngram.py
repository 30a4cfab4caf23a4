"""The n-gram lookahead on Model Runner V2: index and drafts stay on the device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_specx import config
from vllm_specx.engine.v2.base import SpecxSpeculator
from vllm_specx.engine.v2.ngram_index import DeviceNgram


class NgramSpeculator(SpecxSpeculator):
    """`specx:ngram`; how much is drafted is up to the controller."""

    name: ClassVar[str] = "ngram"

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self._prepare(vllm_config, device, req_states)
        settings = self.specx_config()
        assert isinstance(settings, config.NgramConfig)
        self.index = DeviceNgram(settings, vllm_config, device, req_states)

    def admit(self, row: int, params: Any) -> None:
        self.index.admit(row, params)

    def end(self, row: int) -> None:
        self.index.end(row)

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        slots.fill_(-1)
        self.index.draft(input_batch.idx_mapping, slots)
        slots.copy_(torch.where(slots < 0, last[:, None], slots))
