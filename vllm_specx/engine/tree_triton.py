"""The GPU kernel of tree attention, in Triton: paged K/V, a mask a tree, the context in parts.

Not run on a GPU yet: tested in Triton's interpreter and compiled for compute capability 8.0 and 9.0
(tests/engine/test_tree_triton.py); `python -m benchmarks.gpu` has what is to be run on one.

Each program takes some query rows of one tree and one kv head through a part of the context (flash-decoding,
pytorch.org/blog/flash-decoding; online softmax, arXiv 1805.02867), the first part with the tree's own keys.
Where there are more parts than one, each leaves its answer in float32 with the logarithm of its sum, and a
second launch puts them together. Grid and number of parts come from what the host knows; nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton import knobs

from vllm_specx.engine.tree_kernels import LEAST_PART, attend_kernel, merge_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_PARTS = 32
STAGES = 2
_TO_BASE_2 = 1.4426950408889634


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel can be used for a model."""
    return dtype in DTYPES and head_dim % 16 == 0 and head_dim <= 128


def parts_of(programs: int, processors: int, longest: int) -> int:
    """In how many parts the context goes: enough for two programs a multiprocessor of the GPU.

    programs: those of one part. longest: the most tokens that a context can have. None of them is a
    value on the device.
    """
    wanted = 2 * processors // max(programs, 1)
    return max(1, min(wanted, MOST_PARTS, -(-longest // LEAST_PART)))


@dataclass(frozen=True, slots=True)
class Rows:
    """The trees of a step, on the device. trees: int32 [n, COLUMNS] and visible: uint8, as
    TreePlan.packed says. count: trees; most: rows of the largest; total: rows of all."""

    trees: torch.Tensor
    visible: torch.Tensor
    count: int
    most: int
    total: int


def tile_of(queries: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """How many query rows a program has, how many keys it reads at once, and its warps: what registers hold
    on compute capability 8.0 and 9.0, float32 at head_dim 128 on the latter excepted.

    queries: rows of the largest tree times the query heads of a kv head.
    """
    most = 32 if dtype == torch.float32 else 64
    few = queries <= 16
    return 16 if few else most, most, 4 if few and dtype != torch.float32 else 8


def tree_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    rows: Rows,
    block_table: torch.Tensor,
    out: torch.Tensor,
    processors: int,
    parts: int | None = None,
) -> None:
    """Write the answers of all trees' rows into `out`; other rows of it are left as they are.

    q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; kv_cache [blocks, kv_heads, block,
    2 * head_dim], keys before values, as vLLM's FlashAttention and Triton backends have it (0.32 and 0.33),
    whatever the strides of its first three dimensions; one of DTYPES, the last dimension contiguous.
    block_table: int32 [requests, blocks]. All on one device. processors: multiprocessors of the GPU. parts: in
    how many the context goes, 1 to MOST_PARTS; by default as parts_of says.
    """
    _, heads, size = q.shape
    kv_heads, block = kv_cache.shape[1:3]
    group = heads // kv_heads
    queries, keys, warps = tile_of(rows.most * group, q.dtype)
    tiles = triton.cdiv(rows.most * group, queries)
    if parts is None:
        longest = block_table.shape[1] * block
        parts = parts_of(rows.count * tiles * kv_heads, processors, longest)
    width = triton.next_power_of_2(size)
    whole = parts == 1
    # Without parts they are not touched.
    answers = sums = out
    if not whole:
        answers = q.new_empty((parts, rows.total, heads, size), dtype=torch.float32)
        sums = q.new_empty((parts, rows.total, heads), dtype=torch.float32)
    attend_kernel[(rows.count * tiles, kv_heads, parts)](
        q,
        k,
        v,
        kv_cache,
        out,
        block_table,
        rows.trees,
        rows.visible,
        answers,
        sums,
        scale * _TO_BASE_2,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        *kv_cache.stride()[:3],
        block_table.stride(0),
        heads,
        tiles,
        parts,
        rows.total,
        GROUP=group,
        BLOCK=block,
        DIM=size,
        WIDTH=width,
        QUERIES=queries,
        KEYS=keys,
        WHOLE=whole,
        WIDER=knobs.runtime.interpret and q.dtype == torch.bfloat16,
        num_warps=warps,
        num_stages=STAGES,
    )
    if not whole:
        merge_kernel[(rows.count * rows.most, heads)](
            out,
            rows.trees,
            answers,
            sums,
            *out.stride()[:2],
            heads,
            rows.most,
            parts,
            rows.total,
            DIM=size,
            WIDTH=width,
            num_warps=1,
        )
