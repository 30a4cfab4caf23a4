"""The GPU kernel of tree attention by itself: is it right, and what does it take?

    python -m benchmarks.gpu --out FOLDER --only tree_kernel

Its answers beside float64's, for all types and sizes of heads that it takes; and its time for trees of 32 and 64
nodes beside that of vLLM's FlashAttention for chains of as many tokens, bfloat16, heads as in an 8B Llama (32
of 128, 8 for keys and values), batch 1 and 8, contexts of 100, 1500 and 16000 tokens. Writes
FOLDER/tree_kernel.json; without a GPU it says so and does nothing. Not run on a GPU yet.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.provenance import describe
from vllm_specx.engine import tree_gpu
from vllm_specx.engine.tree_plan import TreePlan
from vllm_specx.verify.tree import visible
from vllm_specx.verify.tree_attention import attend_rows

NAME = "tree_kernel"
BLOCK = 16
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of a right answer's error; answers are means of normal values."""


@dataclass(frozen=True)
class Shape:
    """batch: requests, each with a tree of so many nodes after so many tokens."""

    batch: int
    context: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a line of the result."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}


def right_shapes() -> Iterator[Shape]:
    """What is compared with float64."""
    for dtype, head_dim in itertools.product(BOUNDS, (64, 80, 96, 128)):
        for heads, kv_heads in ((2, 2), (3, 1), (16, 2)):
            for context in (0, 127, 1500):
                yield Shape(2, context, 40, heads, kv_heads, head_dim, dtype)


def timed_shapes() -> Iterator[Shape]:
    """What is timed, and compared too."""
    for batch, context, nodes in itertools.product((1, 8), (100, 1500, 16000), (32, 64)):
        yield Shape(batch, context, nodes)


class Step:
    """One step of decoding: every request has its pages, in random order, with room for the tree's rows."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, rows = shape, shape.nodes + 1
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device).to(shape.dtype)

        pages = -(-(shape.context + rows) // BLOCK)
        self.cache = normal(shape.batch * pages, BLOCK, shape.kv_heads, 2 * shape.head_dim)
        self.cache = self.cache.transpose(1, 2)
        order = torch.randperm(shape.batch * pages, generator=generator, device=device)
        self.table = order.view(shape.batch, pages).int()
        self.q = normal(shape.batch * rows, shape.heads, shape.head_dim)
        self.k, self.v = (
            normal(shape.batch * rows, shape.kv_heads, shape.head_dim) for _ in range(2)
        )
        self.out = torch.zeros_like(self.q)
        self.scale = shape.head_dim**-0.5
        # Two children of each node.
        self.mask = visible(np.arange(shape.nodes, dtype=np.int32) // 2 - 1)
        requests = np.arange(shape.batch, dtype=np.int64)
        counts = np.full(shape.batch, rows, np.int64)
        self.plan = TreePlan(
            [],
            requests * rows,
            counts,
            np.full(shape.batch, shape.context, np.int64),
            requests,
            np.tile(self.mask.ravel(), shape.batch).view(np.uint8),
            True,
            np.arange(shape.batch * rows, dtype=np.int64),
        )
        self.rows = tree_gpu.rows_of(self.plan, device)
        self.processors = tree_gpu.processors_of(device)
        # What FlashAttention wants instead.
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.starts = torch.arange(0, (shape.batch + 1) * rows, rows, **whole)
        self.lengths = torch.full((shape.batch,), shape.context + rows, **whole)

    def tree(self) -> None:
        """Our kernel."""
        from vllm_specx.engine.tree_triton import tree_rows

        tree_rows(
            self.q,
            self.k,
            self.v,
            self.cache,
            self.scale,
            self.rows,
            self.table,
            self.out,
            self.processors,
        )

    def chain(self, kernel: Any, version: int) -> None:
        """FlashAttention over as many rows, whose keys and values it reads from the cache."""
        shape, rows = self.shape, self.shape.nodes + 1
        keys, values = self.cache.transpose(1, 2).split(shape.head_dim, dim=-1)
        kernel(
            q=self.q,
            k=keys,
            v=values,
            out=self.out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=rows,
            seqused_k=self.lengths,
            max_seqlen_k=shape.context + rows,
            softmax_scale=self.scale,
            causal=True,
            block_table=self.table,
            fa_version=version,
        )

    def error(self) -> float:
        """The kernel's largest error."""
        self.tree()
        count, worst = self.shape.nodes + 1, 0.0
        mask = torch.from_numpy(self.mask).to(self.q.device)
        for i in range(self.shape.batch):
            rows = slice(i * count, (i + 1) * count)
            context = tree_gpu.read_pages(self.cache, self.table[i], self.shape.context)
            q, k, v, *before = (
                x.double() for x in (self.q[rows], self.k[rows], self.v[rows], *context)
            )
            exact = attend_rows(q, k, v, before[0], before[1], mask, self.scale)
            worst = max(worst, float((self.out[rows].double() - exact).abs().max()))
        return worst


def milliseconds(step: Step) -> dict[str, float]:
    """Of our kernel and of FlashAttention, each the median of many runs without the L2 cache's help."""
    from triton.testing import do_bench
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    version = get_flash_attn_version(head_size=step.shape.head_dim)
    return {
        "tree_ms": do_bench(step.tree, return_mode="median"),
        "chain_ms": do_bench(
            lambda: step.chain(flash_attn_varlen_func, version), return_mode="median"
        ),
        "flash_attention": version,
    }


def run(out: Path) -> int:
    """The exit status: 1 if an answer was wrong."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("gpu: the kernel of tree attention is for NVIDIA GPUs, and there is none: left out.")
        return 0
    device = torch.device("cuda")
    right = [{**shape.row, "error": Step(shape, device).error()} for shape in right_shapes()]
    timed = []
    for shape in timed_shapes():
        step = Step(shape, device)
        timed.append({**shape.row, "error": step.error(), **milliseconds(step)})
        print(json.dumps(timed[-1]), flush=True)
    wrong = [row for row in [*right, *timed] if not row["error"] < bound_of(row)]
    result = {
        **describe(),
        "gpu": torch.cuda.get_device_name(device),
        "right": right,
        "timed": timed,
        "wrong": wrong,
    }
    (out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in wrong:
        print(f"gpu: the kernel of tree attention is wrong: {json.dumps(row)}")
    return 1 if wrong else 0


def bound_of(row: dict[str, Any]) -> float:
    """The error that a line of the result may have."""
    return BOUNDS[getattr(torch, row["dtype"])]
