"""pool_torch.py as Triton kernels: one launch a step, three for a request that has ended; none is waited
for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_specx.engine.v2 import pool_torch
from vllm_specx.engine.v2.ngram_kernels import _mixed
from vllm_specx.engine.v2.ngram_torch import MASK
from vllm_specx.engine.v2.pool_torch import DevicePool

_BLOCK = 128
_SPREAD = 8
_BARRIER = tl.constexpr(pool_torch.BARRIER)
_SHORTEST = tl.constexpr(pool_torch.SHORTEST)
_NOBODY = tl.constexpr(pool_torch.NOBODY)
_HASH_MASK = tl.constexpr(MASK)


@triton.jit
def _document(lengths_ptr, prompts_ptr, row, tail, size):  # type: ignore[no-untyped-def]
    length = tl.load(lengths_ptr + row)
    prompt = tl.load(prompts_ptr + row)
    before = tl.minimum(prompt, tail)
    output = tl.minimum(length - prompt, size // 2 - before - 1)
    output = tl.where(output >= _SHORTEST, output, 0)
    return prompt - before, before, output


@triton.jit(do_not_specialize=["row"])  # type: ignore[untyped-decorator]
def _write_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    prompts_ptr,
    row,
    owner_ptr,
    ring_ptr,
    owners_ptr,
    end_ptr,
    grown_ptr,
    size,
    tail,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, before, output = _document(lengths_ptr, prompts_ptr, row, tail, size)
    end = tl.load(end_ptr)
    owner = tl.load(owner_ptr + row)
    kept = before + output
    taken = tl.where(output > 0, kept + 1, 0)
    if tl.program_id(0) == 0:
        tl.store(grown_ptr, taken.to(tl.int64))
    text = tokens_ptr + tl.cast(row, tl.int64) * tokens_stride + first
    # Offset 0 and kept + 1 are the barriers.
    for start in range(tl.program_id(0) * BLOCK, tl.where(output > 0, kept + 2, 0), SPREAD * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < kept + 2
        said = (offset > 0) & (offset <= kept)
        token = tl.load(text + offset - 1, mask=said, other=_BARRIER)
        place = (end + offset) & (size - 1)
        tl.store(ring_ptr + place, token, mask=inside)
        tl.store(owners_ptr + place, owner, mask=inside)


@triton.jit(do_not_specialize=["row"])  # type: ignore[untyped-decorator]
def _index_kernel(  # type: ignore[no-untyped-def]
    lengths_ptr,
    prompts_ptr,
    row,
    owner_ptr,
    ring_ptr,
    end_ptr,
    table_ptr,
    sizes_ptr,
    size,
    tail,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    level = tl.program_id(0)
    n = tl.load(sizes_ptr + level)
    _, before, output = _document(lengths_ptr, prompts_ptr, row, tail, size)
    end = tl.load(end_ptr)
    owner = tl.load(owner_ptr + row)
    table = table_ptr + level.to(tl.int64) * size
    last = tl.where(output > 0, before + output, 0)
    for start in range(tl.maximum(before, n) + tl.program_id(1) * BLOCK, last, SPREAD * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < last
        place = end + 1 + at
        hashed = tl.zeros([BLOCK], dtype=tl.int64) + (owner & _HASH_MASK)
        for j in range(n):
            where = (place - n + j) & (size - 1)
            hashed = _mixed(hashed, tl.load(ring_ptr + where, mask=inside, other=0))
        tl.atomic_max(table + (hashed & (size - 1)), place, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _look_up_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    rows_ptr,
    owner_ptr,
    ring_ptr,
    owners_ptr,
    end_ptr,
    table_ptr,
    sizes_ptr,
    num_sizes,
    size,
    longest,
    matched_ptr,
    drafts_ptr,
    drafts_stride,
    k,
    vocab_size,
    LONGEST: tl.constexpr,
    K: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    owner = tl.load(owner_ptr + row)
    length = tl.load(lengths_ptr + row)
    end = tl.load(end_ptr)
    oldest = tl.maximum(end - size + 1, 0)
    text = tokens_ptr + row * tokens_stride
    back = tl.arange(0, LONGEST)
    best = tl.load(matched_ptr + request)
    best_place = tl.zeros((), dtype=tl.int64)
    for level in range(num_sizes):
        n = tl.load(sizes_ptr + level)
        if (owner != _NOBODY) & (length >= n):
            hashed = tl.zeros((), dtype=tl.int64) + (owner & _HASH_MASK)
            for j in range(n):
                hashed = _mixed(hashed, tl.load(text + length - n + j))
            level_table = table_ptr + tl.cast(level, tl.int64) * size
            place = tl.load(level_table + (hashed & (size - 1)))
            if (place >= oldest + n) & (place < end):
                within = (back < longest) & (back < place - oldest) & (back < length)
                here = tl.load(text + length - 1 - back, mask=within, other=0)
                there = tl.load(ring_ptr + ((place - 1 - back) & (size - 1)), mask=within, other=0)
                differs = (here != there) | ~within
                match = tl.min(tl.where(differs, back, LONGEST), axis=0)
                mine = tl.load(owners_ptr + (place & (size - 1))) == owner
                if mine & (match >= n) & (match > best):
                    best = match
                    best_place = place
    ahead = tl.arange(0, K)
    wanted = ahead < tl.where(best_place > 0, k, 0)
    inside = ahead < tl.where(best_place > 0, tl.minimum(end - best_place, k), 0)
    token = tl.load(ring_ptr + ((best_place + ahead) & (size - 1)), mask=inside, other=_BARRIER)
    stop = tl.min(tl.where(token == _BARRIER, ahead, K), axis=0)
    known = (ahead < stop) & (token >= 0) & (token < vocab_size)
    drafted = tl.where(known, token, -1).to(tl.int64)
    tl.store(drafts_ptr + request * drafts_stride + ahead, drafted, mask=wanted)
    tl.store(matched_ptr + request, best)


def append(
    pool: DevicePool,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    row: int,
    owners: torch.Tensor,
    sizes: torch.Tensor,
    tail: int,
) -> None:
    """pool_torch.append; see there. owners: int64 [R], of each row; sizes: int32 [windows]."""
    size = len(pool.tokens)
    _write_kernel[(_SPREAD,)](
        tokens,
        tokens.stride(0),
        lengths,
        prompts,
        row,
        owners,
        pool.tokens,
        pool.owners,
        pool.end,
        pool.grown,
        size,
        tail,
        SPREAD=_SPREAD,
        BLOCK=_BLOCK,
    )
    _index_kernel[(len(sizes), _SPREAD)](
        lengths,
        prompts,
        row,
        owners,
        pool.tokens,
        pool.end,
        pool.table,
        sizes,
        size,
        tail,
        SPREAD=_SPREAD,
        BLOCK=_BLOCK,
    )
    pool.end.add_(pool.grown)


def look_up(
    pool: DevicePool,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    sizes: torch.Tensor,
    longest: int,
    matched: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
) -> None:
    """pool_torch.look_up; see there. sizes: int32 [windows]; rows of drafts may lie apart."""
    batch, k = drafts.shape
    _look_up_kernel[(batch,)](
        tokens,
        tokens.stride(0),
        lengths,
        rows,
        owners,
        pool.tokens,
        pool.owners,
        pool.end,
        pool.table,
        sizes,
        len(sizes),
        len(pool.tokens),
        longest,
        matched,
        drafts,
        drafts.stride(0),
        k,
        vocab_size,
        LONGEST=triton.next_power_of_2(longest + 1),
        K=triton.next_power_of_2(k),
    )
