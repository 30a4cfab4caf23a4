"""Attention of tree rows: the CPU kernel and plain PyTorch against a dense float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.draft.tree import IntArray
from vllm_specx.engine import tree_native
from vllm_specx.engine.tree_attention import read_context
from vllm_specx.verify.tree import visible
from vllm_specx.verify.tree_attention import attend_rows

BLOCK = 32


@dataclass(frozen=True)
class Made:
    """What a step has; keys, values: of each tree's context [kv_heads, length, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rows: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """Trees over a paged cache in CPU_ATTN's layout "vec", its pages in any order."""

    parents: list[IntArray]
    lengths: list[int]
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int
    between: int = 0
    """Rows of other requests before each tree."""

    def build(self) -> Made:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)

        pages = [-(-length // BLOCK) for length in self.lengths]
        total = sum(pages) + 2
        cache = torch.full((total, self.kv_heads, BLOCK, 2 * self.head_dim), 50.0).to(self.dtype)
        places = torch.randperm(total, generator=random)
        table = torch.zeros(len(pages), max([*pages, 1]), dtype=torch.int32)
        keys, values = [], []
        split = cache.view(total, self.kv_heads, 2, BLOCK * self.head_dim)
        for i, (count, length) in enumerate(zip(pages, self.lengths, strict=True)):
            own, places = places[:count], places[count:]
            table[i, :count] = own
            keys.append(normal(self.kv_heads, length, self.head_dim))
            values.append(normal(self.kv_heads, length, self.head_dim))
            for p in range(length):
                page = split[own[p // BLOCK]]
                at = p % BLOCK
                page[:, 0].view(-1, self.head_dim, BLOCK)[:, :, at] = keys[i][:, p]
                page[:, 1].view(-1, BLOCK, self.head_dim)[:, at] = values[i][:, p]
        rows = np.array([len(p) + 1 for p in self.parents], np.int64)
        first = np.cumsum(rows + self.between) - rows
        count = int((rows + self.between).sum())
        heads = self.kv_heads * self.group
        # As in the model, q, k and v are slices of one tensor.
        qkv = normal(count, heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        return Made(q, k, v, cache, table, keys, values, rows, first)


def run(case: Case) -> tuple[float, float]:
    """The largest errors of the kernel and of PyTorch against float64."""
    made = case.build()
    q, k, v, cache = made.q, made.k, made.v, made.cache
    rows, first = made.rows, made.first
    masks = [visible(parents) for parents in case.parents]
    scale = case.head_dim**-0.5
    out = torch.full_like(q, 7.0, memory_format=torch.contiguous_format)
    requests = np.arange(len(rows), dtype=np.int64)
    tree_native.tree_rows(
        q,
        k,
        v,
        cache,
        scale,
        first,
        rows,
        np.array(case.lengths, np.int64),
        requests,
        made.table,
        np.concatenate([mask.ravel() for mask in masks]).view(np.uint8),
        out,
    )
    kernel, plain = 0.0, 0.0
    untouched = torch.ones(len(out), dtype=torch.bool)
    for i, mask in enumerate(masks):
        part = slice(int(first[i]), int(first[i] + rows[i]))
        untouched[part] = False
        sees = torch.from_numpy(mask)
        exact = attend_rows(
            q[part].double(),
            k[part].double(),
            v[part].double(),
            made.keys[i].double(),
            made.values[i].double(),
            sees,
            scale,
        )
        context = read_context(cache, made.table[i], case.lengths[i])
        alone = attend_rows(q[part], k[part], v[part], *context, sees, scale)
        kernel = max(kernel, float((out[part].double() - exact).abs().max()))
        plain = max(plain, float((alone.double() - exact).abs().max()))
    assert (out[untouched] == 7.0).all(), "rows of others are left alone"
    return kernel, plain


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 3))
    parents = []
    for _ in range(count):
        size = draw(st.integers(1, 40))
        parents.append(np.array([draw(st.integers(-1, j - 1)) for j in range(size)], np.int32))
    return Case(
        parents,
        [draw(st.integers(0, 150)) for _ in range(count)],
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 3, 4])),
        draw(st.sampled_from([64, 80, 96, 128])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2)),
    )


needs_compiler = pytest.mark.skipif(
    tree_native.library() is None, reason="no C++ compiler here: the kernel cannot be built"
)


@needs_compiler
@given(cases())
@settings(max_examples=40, deadline=None)
def test_against_float64(case: Case) -> None:
    """Both work in float32; bfloat16 answers are rounded once, to 8 bits."""
    kernel, plain = run(case)
    assert max(kernel, plain) < (2e-5 if case.dtype == torch.float32 else 0.03)


@needs_compiler
def test_a_wrong_mask_is_seen() -> None:
    """Siblings that see each other."""
    parents = np.array([-1, -1, 0, 1], np.int32)
    case = Case([parents], [5], 1, 1, 64, torch.float32, 3)
    made = case.build()
    q, k, v = made.q, made.k, made.v
    right = visible(parents)
    wrong = right.copy()
    wrong[2, 1] = True
    answers = [
        attend_rows(q, k, v, made.keys[0], made.values[0], torch.from_numpy(mask), 0.125)
        for mask in (right, wrong)
    ]
    assert (answers[0] - answers[1]).abs().max() > 0.01
    assert run(case)[0] < 2e-5


@needs_compiler
def test_scores_that_overflow_a_naive_softmax() -> None:
    case = Case([np.array([-1, 0, 0], np.int32)], [40], 1, 1, 64, torch.float32, 4)
    made = case.build()
    q, k, v = made.q * 40, made.k * 40, made.v * 40
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    mask = visible(case.parents[0])
    tree_native.tree_rows(
        q,
        k,
        v,
        made.cache,
        1.0,
        made.first,
        made.rows,
        np.array([40], np.int64),
        np.zeros(1, np.int64),
        made.table,
        mask.ravel().view(np.uint8),
        out,
    )
    exact = attend_rows(
        q.double(),
        k.double(),
        v.double(),
        made.keys[0].double(),
        made.values[0].double(),
        torch.from_numpy(mask),
        1.0,
    )
    assert torch.isfinite(out).all()
    assert torch.allclose(out.double(), exact, rtol=1e-3, atol=1e-2)
