"""The GPU kernels of tree attention; tree_triton.py says what they do and how they are launched."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_specx.engine.tree_plan import COLUMNS

LEAST_PART = 128
"""Tokens of context; a multiple of what a program reads at once."""
_LEAST = tl.constexpr(LEAST_PART)
_COLUMNS = tl.constexpr(COLUMNS)
_NOTHING = tl.constexpr(-1e30)
"""A score that counts for nothing, and differs from itself by 0."""


@triton.jit
def _span(context, parts):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.cdiv(tl.cdiv(context, parts), _LEAST), 1) * _LEAST


@triton.jit  # type: ignore[untyped-decorator]
def _product(a, b, to, WIDER: tl.constexpr):  # type: ignore[no-untyped-def]
    # For bfloat16 in the interpreter, which multiplies its bits as whole numbers.
    if WIDER:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, to, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _fold(q, keys, values, sees, scale, top, total, answer, WIDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """One more block of keys and values [n, dim] in the running softmax."""
    nothing = tl.zeros([q.shape[0], keys.shape[0]], dtype=tl.float32)
    scores = tl.where(sees, _product(q, tl.trans(keys), nothing, WIDER) * scale, _NOTHING)
    higher = tl.maximum(top, tl.max(scores, 1))
    weight = tl.exp2(scores - higher[:, None])
    less = tl.exp2(top - higher)
    answer = _product(weight.to(values.dtype), values, answer * less[:, None], WIDER)
    return higher, total * less + tl.sum(weight, 1), answer


@triton.jit(do_not_specialize=["tiles", "parts", "all_rows"])  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    trees_ptr,
    visible_ptr,
    answers_ptr,
    sums_ptr,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    heads,
    tiles,
    parts,
    all_rows,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDER: tl.constexpr,
):
    tree = trees_ptr + (tl.program_id(0) // tiles) * _COLUMNS
    tile = tl.program_id(0) % tiles
    kv = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(tree).to(tl.int64)
    rows = tl.load(tree + 1)
    context = tl.load(tree + 2)
    request = tl.load(tree + 3).to(tl.int64)
    before = tl.load(tree + 4).to(tl.int64)
    visible = visible_ptr + tl.load(tree + 5)
    span = _span(context, parts)
    begin = part * span
    if (tile * QUERIES >= rows * GROUP) | ((part > 0) & (begin >= context)):
        return
    end = tl.minimum(begin + span, context)

    query = tile * QUERIES + tl.arange(0, QUERIES)
    row = query // GROUP
    head = kv * GROUP + query % GROUP
    real = (row < rows)[:, None]
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    q_at = q_ptr + (first + row)[:, None] * q_row + head[:, None] * q_head + dim[None, :]
    q = tl.load(q_at, mask=real & inside[None, :], other=0.0)
    top = tl.full([QUERIES], _NOTHING, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    answer = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    of_keys = tl.arange(0, KEYS)

    pages = table_ptr + request * table_row
    cache = cache_ptr + kv.to(tl.int64) * cache_head
    for start in range(begin, end, KEYS):
        at = start + of_keys
        known = at < end
        page = tl.load(pages + at // BLOCK, mask=known, other=0).to(tl.int64)
        slot = cache + page * cache_block + (at % BLOCK) * cache_slot
        entry = slot[:, None] + dim[None, :]
        there = known[:, None] & inside[None, :]
        keys = tl.load(entry, mask=there, other=0.0)
        values = tl.load(entry + DIM, mask=there, other=0.0)
        top, total, answer = _fold(
            q, keys, values, known[None, :], scale, top, total, answer, WIDER
        )
    for start in range(0, tl.where(part == 0, rows, 0), KEYS):
        at = start + of_keys
        known = at < rows
        there = known[:, None] & inside[None, :]
        keys_at = k_ptr + kv * k_head + (first + at)[:, None] * k_row + dim[None, :]
        keys = tl.load(keys_at, mask=there, other=0.0)
        values_at = v_ptr + kv * v_head + (first + at)[:, None] * v_row + dim[None, :]
        values = tl.load(values_at, mask=there, other=0.0)
        mask_at = visible + row[:, None] * rows + at[None, :]
        sees = tl.load(mask_at, mask=real & known[None, :], other=0) != 0
        top, total, answer = _fold(q, keys, values, sees, scale, top, total, answer, WIDER)

    answer = answer / total[:, None]
    if WHOLE:
        out_at = out_ptr + (first + row)[:, None] * out_row + head[:, None] * out_head
        written = answer.to(out_ptr.dtype.element_ty)
        tl.store(out_at + dim[None, :], written, mask=real & inside[None, :])
    else:
        place = (part * all_rows + before + row) * heads + head
        answers_at = answers_ptr + place[:, None] * DIM + dim[None, :]
        tl.store(answers_at, answer, mask=real & inside[None, :])
        tl.store(sums_ptr + place, top + tl.log2(total), mask=row < rows)


@triton.jit(do_not_specialize=["most", "parts", "all_rows"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    trees_ptr,
    answers_ptr,
    sums_ptr,
    out_row,
    out_head,
    heads,
    most,
    parts,
    all_rows,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tree = trees_ptr + (tl.program_id(0) // most) * _COLUMNS
    row = tl.program_id(0) % most
    head = tl.program_id(1)
    if row >= tl.load(tree + 1):
        return
    context = tl.load(tree + 2)
    there = tl.maximum(tl.cdiv(context, _span(context, parts)), 1)
    place = (tl.load(tree + 4).to(tl.int64) + row) * heads + head
    step = all_rows.to(tl.int64) * heads
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    top = tl.load(sums_ptr + place)
    total = tl.full((), 1.0, dtype=tl.float32)
    answer = tl.load(answers_ptr + place * DIM + dim, mask=inside, other=0.0)
    for part in range(1, there):
        at = place + part * step
        sum_of_part = tl.load(sums_ptr + at)
        higher = tl.maximum(top, sum_of_part)
        less = tl.exp2(top - higher)
        weight = tl.exp2(sum_of_part - higher)
        of_part = tl.load(answers_ptr + at * DIM + dim, mask=inside, other=0.0)
        answer = answer * less + of_part * weight
        total = total * less + weight
        top = higher
    out_at = out_ptr + (tl.load(tree).to(tl.int64) + row) * out_row + head * out_head + dim
    tl.store(out_at, (answer / total).to(out_ptr.dtype.element_ty), mask=inside)
