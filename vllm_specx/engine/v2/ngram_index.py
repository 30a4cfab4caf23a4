"""The n-gram lookahead on the device: each request's own text first, the shared pool where it knows more."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_specx import config
from vllm_specx.engine.pools import pool_of
from vllm_specx.engine.v2 import ngram_kernels, pool_kernels
from vllm_specx.engine.v2.ngram_torch import slots_for, windows
from vllm_specx.engine.v2.pool_torch import NOBODY, DevicePool, owner_of

logger = logging.getLogger(f"vllm.{__name__}")


class DeviceNgram:
    """What followed the longest match of a request's end, here or in an output of its pool.

    Without what V1's lookahead has beside it (draft/ngram.py): votes of several places, and lengths by
    estimated probability. matched: int32 [max_num_seqs], the lengths of the last matches, in the order of
    the batch; 0 without.
    """

    def __init__(
        self, settings: config.NgramConfig, vllm_config: Any, device: torch.device, req_states: Any
    ) -> None:
        rows = vllm_config.scheduler_config.max_num_seqs
        sizes = windows(settings.min_match, settings.max_match)
        self.req_states = req_states
        keep_on_device(req_states, device)
        self.longest = settings.max_match
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        slots = slots_for(vllm_config.model_config.max_model_len)
        with torch.device(device):
            self.table = torch.zeros(rows, len(sizes), slots, dtype=torch.int32)
            self.indexed = torch.zeros(rows, dtype=torch.int32)
            self.sizes = torch.tensor(sizes, dtype=torch.int32)
            self.matched = torch.zeros(rows, dtype=torch.int32)
            self.owners = torch.zeros(rows, dtype=torch.int64)
        shared = settings.pool
        self.pool = (
            DevicePool.empty(shared.max_tokens, len(sizes), device) if shared.enabled else None
        )
        self._sharing: set[int] = set()
        logger.info(
            "vllm_specx: n-gram lookahead on Model Runner V2, windows of %s tokens, %.2f MiB%s.",
            sizes,
            self.table.nbytes / 2**20,
            "" if self.pool is None else f", {self.pool.bytes / 2**20:.2f} MiB for the pool",
        )

    def admit(self, row: int, params: Any) -> None:
        """A request takes a row of the runner's request states. params: its SamplingParams.

        A seeded request at a temperature above 0 shares nothing: its text must not depend on others'."""
        self.table[row].zero_()
        self.indexed[row].zero_()
        owner = NOBODY
        if self.pool is not None and params is not None and not seeded(params):
            owner = owner_of(pool_of(params.extra_args))
        self.owners[row].fill_(owner)
        self._sharing.discard(row)
        if owner != NOBODY:
            self._sharing.add(row)

    def end(self, row: int) -> None:
        """The request of this row has ended; its text is still there."""
        if self.pool is None or row not in self._sharing:
            return
        self._sharing.discard(row)
        states = self.req_states
        pool_kernels.append(
            self.pool,
            states.all_token_ids.gpu,
            states.total_len.gpu,
            states.prompt_len.gpu,
            row,
            self.owners,
            self.sizes,
            self.longest,
        )

    def draft(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Write drafts into slots, int64 [B, K]; entries without one stay or become -1. rows: int64 [B].

        Returns int32 [B], the lengths of the matches."""
        matched = self.matched[: len(slots)]
        tokens, lengths = self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu
        ngram_kernels.propose(
            tokens,
            lengths,
            rows,
            self.indexed,
            self.table,
            self.sizes,
            self.longest,
            slots,
            self.vocab_size,
            matched,
        )
        if self.pool is not None:
            pool_kernels.look_up(
                self.pool,
                tokens,
                lengths,
                rows,
                self.owners,
                self.sizes,
                self.longest,
                matched,
                slots,
                self.vocab_size,
            )
        return matched


def keep_on_device(req_states: Any, device: torch.device) -> None:
    """Have the tokens of all requests in the device's memory, as vLLM does for its own ngram: otherwise
    they lie in the host's, and each look-up goes there. Before any request, right after req_states is
    made (v1/worker/gpu/model_runner.py)."""
    held = req_states.all_token_ids
    if hasattr(held, "_uva_buf"):
        req_states.all_token_ids = type(held)(
            tuple(held.gpu.shape), dtype=held.dtype, device=device
        )


def seeded(params: Any) -> bool:
    """Whether a request must say the same whatever was served before it."""
    return params.seed is not None and params.temperature > 0
