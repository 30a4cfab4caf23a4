"""ngram_torch.py as Triton kernels: two launches a step, whatever was said, none of them waited for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specx.engine.v2.ngram_torch import MASK, MULTIPLIER

_BLOCK = 128
_SPREAD = 8
"""Programs that share the new tokens of one request and window: a decode step keeps one busy."""
_HASH_MULTIPLIER = tl.constexpr(MULTIPLIER)
_HASH_MASK = tl.constexpr(MASK)


@triton.jit
def _mixed(hashed, token):  # type: ignore[no-untyped-def]
    hashed = ((hashed ^ (token.to(tl.int64) & _HASH_MASK)) * _HASH_MULTIPLIER) & _HASH_MASK
    return hashed ^ (hashed >> 15)


@triton.jit  # type: ignore[untyped-decorator]
def _insert_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    rows_ptr,
    indexed_ptr,
    table_ptr,
    sizes_ptr,
    num_sizes,
    slots,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    level = tl.program_id(1)
    n = tl.load(sizes_ptr + level)
    length = tl.load(lengths_ptr + row)
    first = tl.maximum(tl.load(indexed_ptr + row) + 1, n)
    text = tokens_ptr + row * tokens_stride
    table = table_ptr + (row * num_sizes + level) * slots
    for start in range(first + tl.program_id(2) * BLOCK, length, SPREAD * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        hashed = tl.zeros([BLOCK], dtype=tl.int64)
        for j in range(n):
            hashed = _mixed(hashed, tl.load(text + place - n + j, mask=inside, other=0))
        tl.atomic_max(table + (hashed & (slots - 1)), place, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _look_up_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    rows_ptr,
    indexed_ptr,
    table_ptr,
    sizes_ptr,
    num_sizes,
    slots,
    longest,
    drafts_ptr,
    drafts_stride,
    k,
    vocab_size,
    matched_ptr,
    LONGEST: tl.constexpr,
    K: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    text = tokens_ptr + row * tokens_stride
    back = tl.arange(0, LONGEST)
    best = tl.zeros((), dtype=tl.int32)
    best_place = tl.zeros((), dtype=tl.int32)
    for level in range(num_sizes):
        n = tl.load(sizes_ptr + level)
        if length >= n:
            hashed = tl.zeros((), dtype=tl.int64)
            for j in range(n):
                hashed = _mixed(hashed, tl.load(text + length - n + j))
            place = tl.load(table_ptr + (row * num_sizes + level) * slots + (hashed & (slots - 1)))
            if (place >= n) & (place < length):
                within = (back < longest) & (back < place)
                here = tl.load(text + length - 1 - back, mask=within, other=0)
                there = tl.load(text + place - 1 - back, mask=within, other=0)
                differs = (here != there) | (back >= longest) | (back >= place)
                match = tl.min(tl.where(differs, back, LONGEST), axis=0)
                # A longer window's place is never the more recent one of equal matches.
                if (match >= n) & (match > best):
                    best = match
                    best_place = place
    ahead = tl.arange(0, K)
    wanted = ahead < tl.where(best > 0, k, 0)
    period = tl.maximum(length - best_place, 1)
    token = tl.load(text + best_place + ahead % period, mask=wanted, other=-1)
    known = wanted & (token >= 0) & (token < vocab_size)
    tl.store(drafts_ptr + request * drafts_stride + ahead, token.to(tl.int64), mask=known)
    tl.store(matched_ptr + request, best)
    tl.store(indexed_ptr + row, tl.maximum(length - 1, 0))


def propose(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    indexed: torch.Tensor,
    table: torch.Tensor,
    sizes: torch.Tensor,
    longest: int,
    drafts: torch.Tensor,
    vocab_size: int,
    matched: torch.Tensor,
) -> None:
    """ngram_torch.insert and then look_up; see there. sizes: int32 [windows]; drafts: int64 [B, K], rows
    of it may lie apart; matched: int32 [B], overwritten."""
    batch, k = drafts.shape
    slots, count = table.shape[2], table.shape[1]
    _insert_kernel[(batch, count, _SPREAD)](
        tokens,
        tokens.stride(0),
        lengths,
        rows,
        indexed,
        table,
        sizes,
        count,
        slots,
        SPREAD=_SPREAD,
        BLOCK=_BLOCK,
    )
    _look_up_kernel[(batch,)](
        tokens,
        tokens.stride(0),
        lengths,
        rows,
        indexed,
        table,
        sizes,
        count,
        slots,
        longest,
        drafts,
        drafts.stride(0),
        k,
        vocab_size,
        matched,
        LONGEST=triton.next_power_of_2(longest + 1),
        K=triton.next_power_of_2(k),
    )
