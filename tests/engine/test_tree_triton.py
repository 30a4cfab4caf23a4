"""The GPU kernel of tree attention, interpreted, against a dense float64 reference; and that it compiles.

Triton decides between compiling and interpreting when it is imported, so the tests with the kernel, and those
of test_tree_gpu.py that need it, run in a process of their own, which the first one starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.interpreted import check_tests
from vllm_specx.draft.tree import DraftTree, IntArray
from vllm_specx.engine.tree_gpu import move, read_pages, rows_of
from vllm_specx.engine.tree_plan import TreePlan, plan_step
from vllm_specx.verify.tree_attention import attend_rows

TRIAL = str(Path(__file__).with_name("test_tree_trial.py"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_its_own_process = pytest.mark.skipif(
    not INTERPRETED, reason="test_in_a_process_of_its_own runs it"
)
CPU = torch.device("cpu")
ERRORS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Answers are sums of normal values with weights that sum to one; those in 16 bits are rounded to 11 and 8."""


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    check_tests(__file__, TRIAL)


@dataclass(frozen=True)
class Case:
    """A step: of each request its committed tokens before this step, and the parents of its tree, or how
    many rows it has without one."""

    requests: list[tuple[int, IntArray | int]]
    kv_heads: int
    group: int
    head_dim: int
    block: int
    dtype: torch.dtype
    parts: int | None
    heads_first: bool = False
    """The cache's strides: kv heads before places in a block, or after them."""
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """What the kernel gets, and of each tree what it should see."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    plan: TreePlan
    contexts: list[tuple[torch.Tensor, torch.Tensor]]


def step_of(case: Case) -> Step:
    random = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(case.dtype)

    lengths = [length for length, _ in case.requests]
    counts = [rows if isinstance(rows, int) else len(rows) + 1 for _, rows in case.requests]
    pages = [-(-length // case.block) for length in lengths]
    total, double = sum(pages) + 2, 2 * case.head_dim
    shape = (total, case.kv_heads, case.block, double)
    # What is not of a context must not be looked at.
    cache = torch.full(shape, torch.nan, dtype=case.dtype)
    if not case.heads_first:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    places = torch.randperm(total, generator=random)
    table = torch.full((len(pages), max([*pages, 1]) + 1), total + 7, dtype=torch.int32)
    contexts = []
    for i, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        own, places = places[:count], places[count:]
        table[i, :count] = own
        keys, values = (normal(case.kv_heads, length, case.head_dim) for _ in range(2))
        for p in range(length):
            cache[own[p // case.block], :, p % case.block] = torch.cat(
                (keys[:, p], values[:, p]), 1
            )
        contexts.append((keys, values))
    drafted = {
        f"r{i}": DraftTree(np.zeros(len(rows), np.int32), rows)
        for i, (_, rows) in enumerate(case.requests)
        if not isinstance(rows, int)
    }
    plan, _, _ = plan_step(
        drafted,
        {name: tree.tokens.tolist() for name, tree in drafted.items()},
        {f"r{i}": i for i in range(len(counts))},
        np.array(counts),
        np.array(lengths),
        drafted,
    )
    assert plan is not None
    heads = case.kv_heads * case.group
    # As in the model, q, k and v are slices of one tensor, and there are rows to fill up a graph's size.
    qkv = normal(sum(counts) + 3, heads + 2 * case.kv_heads, case.head_dim)
    q, k, v = qkv.split([heads, case.kv_heads, case.kv_heads], 1)
    return Step(q, k, v, cache, table, plan, contexts)


def error_of(
    case: Case,
    step: Step | None = None,
    scale: float | None = None,
    masks: list[torch.Tensor] | None = None,
) -> float:
    """The largest error of the kernel against float64; other rows must be as before. masks: those of the
    plan."""
    from vllm_specx.engine.tree_triton import tree_rows

    made = step or step_of(case)
    q, k, v, plan = made.q, made.k, made.v, made.plan
    scale = case.head_dim**-0.5 if scale is None else scale
    out = torch.full_like(q, 7.0, memory_format=torch.contiguous_format)
    rows = rows_of(plan, CPU)
    tree_rows(q, k, v, made.cache, scale, rows, made.table, out, 16, case.parts)
    worst, untouched = 0.0, torch.ones(len(out), dtype=torch.bool)
    for tree, mask in zip(plan.trees, masks or plan.masks(), strict=True):
        part = slice(tree.row, tree.row + tree.size)
        untouched[part] = False
        context = made.contexts[tree.request]
        states = (x.double() for x in (q[part], k[part], v[part], *context))
        exact = attend_rows(*states, mask, scale)
        assert torch.isfinite(out[part]).all()
        worst = max(worst, float((out[part].double() - exact).abs().max()))
    assert (out[untouched] == 7.0).all(), "rows of others are left alone"
    return worst


@st.composite
def trees(draw: st.DrawFn) -> IntArray:
    """At least one node, now and then more than a program's rows or keys."""
    size = draw(st.integers(1, 12) | st.sampled_from([30, 64, 70]))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    return np.array([random.integers(-1, j) for j in range(size)], np.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([16, 32, 48]))
    edge = st.integers(0, 9).map(lambda n: n * block) | st.integers(1, 9).map(
        lambda n: n * block - 1
    )
    length = st.integers(0, 300) | edge
    others = draw(st.lists(st.tuples(length, st.integers(1, 20)), max_size=2))
    with_trees = draw(st.lists(st.tuples(length, trees()), min_size=1, max_size=3))
    return Case(
        draw(st.permutations([*others, *with_trees])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3, 8])),
        draw(st.sampled_from([64, 80, 96, 128])),
        block,
        draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        draw(st.sampled_from([None, 1, 2, 3, 32])),
        draw(st.booleans()),
        draw(st.integers(0, 2**32 - 1)),
    )


@in_its_own_process
@given(cases())
@settings(max_examples=25, deadline=None)
def test_against_float64(case: Case) -> None:
    assert error_of(case) < ERRORS[case.dtype]


def binary_tree(nodes: int) -> IntArray:
    return np.arange(nodes, dtype=np.int32) // 2 - 1


@in_its_own_process
@pytest.mark.parametrize(
    ("head_dim", "length"), [(64, 0), (80, 127), (96, 128), (128, 129), (64, 1500), (128, 1500)]
)
def test_parts_of_the_context(head_dim: int, length: int) -> None:
    """As many parts as there can be, more than there is context for, one, and as the GPU would have."""
    from vllm_specx.engine.tree_triton import MOST_PARTS

    for parts in (1, 5, MOST_PARTS, None):
        case = Case([(length, binary_tree(20))], 1, 2, head_dim, 16, torch.float32, parts)
        assert error_of(case) < ERRORS[torch.float32]


@in_its_own_process
@pytest.mark.parametrize("parts", [1, 3])
def test_a_wrong_mask_is_seen(parts: int) -> None:
    """Siblings that see each other."""
    case = Case([(300, np.array([-1, -1, 0, 1], np.int32))], 1, 1, 64, 16, torch.float32, parts)
    made = step_of(case)
    assert error_of(case, made) < ERRORS[torch.float32]
    right = made.plan.masks()
    made.plan.visible[2 * 5 + 1] = 1
    assert error_of(case, made, masks=right) > 100 * ERRORS[torch.float32]


@in_its_own_process
@pytest.mark.parametrize("parts", [1, 3])
def test_scores_that_overflow_a_naive_softmax(parts: int) -> None:
    case = Case([(300, binary_tree(9))], 1, 3, 64, 16, torch.float32, parts)
    made = step_of(case)
    made.q.mul_(40)
    made.k.mul_(40)
    assert error_of(case, made, scale=1.0) < 1e-2


def test_how_many_parts() -> None:
    from vllm_specx.engine.tree_triton import LEAST_PART, MOST_PARTS, parts_of

    assert parts_of(1, 132, 10**6) == MOST_PARTS
    assert parts_of(24, 132, 10**6) == 11
    assert parts_of(24, 132, 3 * LEAST_PART) == 3
    assert parts_of(10**4, 132, 10**6) == 1
    assert parts_of(1, 132, 1) == 1


def test_moves_within_the_cache_are_as_if_at_once() -> None:
    """Slot 5 gives what it had before slot 3 goes there."""
    cache = torch.arange(3 * 2 * 4 * 6.0).view(3, 2, 4, 6)
    pages = torch.arange(3, dtype=torch.int32)
    keys, values = (x.clone() for x in read_pages(cache, pages, 12))
    move(cache, torch.tensor([3, 5, 10]), torch.tensor([5, 8, 3]))
    moved = list(range(12))
    moved[5], moved[8], moved[3] = 3, 5, 10
    now = read_pages(cache, pages, 12)
    assert torch.equal(now[0], keys[:, moved]) and torch.equal(now[1], values[:, moved])


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("bf16", 64), ("bf16", 80), ("bf16", 128), ("fp16", 128), ("fp32", 64)]
)
def test_kernels_compile_for_gpus(capability: int, head_dim: int, kind: str) -> None:
    """To machine code, which needs no GPU, and with no more shared memory than the smallest of them has."""
    from vllm_specx.engine import tree_kernels, tree_triton

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    width = 1 << (head_dim - 1).bit_length()
    shape: dict[str, Any] = {
        "DIM": head_dim,
        "WIDTH": width,
        "GROUP": 4,
        "BLOCK": 16,
        "WIDER": False,
    }
    for queries, whole in ((4, True), (4, False), (132, True), (132, False)):
        tile, keys, warps = tree_triton.tile_of(queries, dtype)
        fixed = {**shape, "QUERIES": tile, "KEYS": keys, "WHOLE": whole}
        made = compiled(tree_kernels.attend_kernel, kind, fixed, capability, warps)
        assert made.metadata.shared <= 99 * 1024
    compiled(tree_kernels.merge_kernel, kind, shape, capability, 1)


def compiled(kernel: Any, kind: str, constants: dict[str, Any], capability: int, warps: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_specx.engine.tree_triton import STAGES

    own = {"table_ptr": "*i32", "trees_ptr": "*i32", "visible_ptr": "*u8", "scale": "fp32"}
    own |= {"answers_ptr": "*fp32", "sums_ptr": "*fp32"}
    types, places, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        pointer = f"*{kind}" if name.endswith("_ptr") else "i32"
        types[name] = "constexpr" if name in constants else own.get(name, pointer)
        if name in constants:
            places[(place,)] = constants[name]
        elif types[name].startswith("*") or name.endswith(("_row", "_head", "_block", "_slot")):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=aligned)
    options = {"num_warps": warps, "num_stages": STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(made.asm["cubin"]) > 1000
    return made
