"""The n-gram lookahead on Model Runner V2: index and drafts stay on the device."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch

from vllm_specx import config
from vllm_specx.engine.v2 import ngram_kernels
from vllm_specx.engine.v2.base import SpecxSpeculator
from vllm_specx.engine.v2.ngram_torch import slots_for, windows

logger = logging.getLogger(f"vllm.{__name__}")


class NgramSpeculator(SpecxSpeculator):
    """`specx:ngram`: what followed the longest match of a request's end in its own text.

    Without what V1's lookahead has beside it (draft/ngram.py): the pool that requests share, and lengths
    by estimated probability; how much is drafted is up to the controller.
    """

    name: ClassVar[str] = "ngram"

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self._prepare(vllm_config, device, req_states)
        settings = self.specx_config()
        assert isinstance(settings, config.NgramConfig)
        sizes = windows(settings.min_match, settings.max_match)
        self.longest = settings.max_match
        slots = slots_for(vllm_config.model_config.max_model_len)
        with torch.device(device):
            self.table = torch.zeros(self.max_batch, len(sizes), slots, dtype=torch.int32)
            self.indexed = torch.zeros(self.max_batch, dtype=torch.int32)
            self.sizes = torch.tensor(sizes, dtype=torch.int32)
            self.matched = torch.zeros(self.max_batch, dtype=torch.int32)
        self._occupants: list[str | None] = [None] * self.max_batch
        logger.info(
            "vllm_specx: n-gram lookahead on Model Runner V2, windows of %s tokens, %.2f MiB.",
            sizes,
            self.table.nbytes / 2**20,
        )

    def draft(
        self,
        input_batch: Any,
        hidden_states: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self._forget(input_batch)
        ngram_kernels.propose(
            self.req_states.all_token_ids.gpu,
            self.req_states.total_len.gpu,
            input_batch.idx_mapping,
            self.indexed,
            self.table,
            self.sizes,
            self.longest,
            slots,
            self.vocab_size,
            self.matched[: len(slots)],
        )

    def _forget(self, input_batch: Any) -> None:
        """Empty the tables of rows that another request has taken over; the host knows which."""
        for request_id, row in zip(
            input_batch.req_ids, input_batch.idx_mapping_np.tolist(), strict=True
        ):
            if self._occupants[row] != request_id:
                self._occupants[row] = request_id
                self.table[row].zero_()
                self.indexed[row].zero_()
