"""The device's n-gram index: its Triton kernels, interpreted, against what they must compute.

Triton decides between compiling and interpreting when it is imported, so the tests of this file, and
those of test_v2_pool.py, run in a process of their own, which the first one starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.interpreted import check_tests
from vllm_specx.engine.v2 import ngram_torch

VOCAB = 50
POOL = str(Path(__file__).with_name("test_v2_pool.py"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_its_own_process = pytest.mark.skipif(
    not INTERPRETED, reason="test_in_a_process_of_its_own runs it"
)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own() -> None:
    check_tests(__file__, POOL)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("constants", [{}, {"k": 1, "drafts_stride": 1, "longest": 1}])
def test_kernels_compile_for_gpus(capability: int, constants: dict[str, int]) -> None:
    """To machine code, which needs no GPU; Triton makes arguments that are 1 constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_specx.engine.v2 import ngram_kernels, pool_kernels

    wide = {"SPREAD": 8, "BLOCK": 128, "LONGEST": 128 if not constants else 2, "K": 4}
    for kernel in (
        ngram_kernels._insert_kernel,
        ngram_kernels._look_up_kernel,
        pool_kernels._write_kernel,
        pool_kernels._index_kernel,
        pool_kernels._look_up_kernel,
    ):
        shared = kernel.fn.__module__ == pool_kernels.__name__
        types = {}
        for name in kernel.arg_names:
            long = ("rows_ptr", "drafts_ptr", "owner_ptr", "owners_ptr", "end_ptr", "grown_ptr")
            pointer = "*i64" if name in long or (shared and name == "table_ptr") else "*i32"
            types[name] = pointer if name.endswith("_ptr") else "i32"
        fixed = {n: v for n, v in {**wide, **constants}.items() if n in types}
        types.update(dict.fromkeys(fixed, "constexpr"))
        places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        source = ASTSource(fn=kernel, signature=types, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert len(made.asm["cubin"]) > 1000


@pytest.fixture(scope="module")
def kernels() -> Any:
    from vllm_specx.engine.v2 import ngram_kernels

    return ngram_kernels


class Both:
    """One index twice, by the kernels and by PyTorch."""

    def __init__(self, kernels: Any, rows: int, length: int, sizes: list[int], slots: int) -> None:
        self.kernels, self.sizes = kernels, sizes
        self.tokens = torch.zeros(rows, length, dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.tables = [torch.zeros(rows, len(sizes), slots, dtype=torch.int32) for _ in "ab"]
        self.indexed = [torch.zeros(rows, dtype=torch.int32) for _ in "ab"]

    def say(self, row: int, said: list[int]) -> None:
        start = int(self.lengths[row])
        said = said[: self.tokens.shape[1] - start]
        self.tokens[row, start : start + len(said)] = torch.tensor(said, dtype=torch.int32)
        self.lengths[row] += len(said)

    def propose(self, rows: list[int], k: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.tensor(rows)
        drafts = [torch.full((len(rows), k + 3), -7)[:, :k] for _ in "ab"]
        matched = torch.full((len(rows),), -1, dtype=torch.int32)
        self.kernels.propose(
            self.tokens,
            self.lengths,
            which,
            self.indexed[0],
            self.tables[0],
            torch.tensor(self.sizes, dtype=torch.int32),
            longest,
            drafts[0],
            VOCAB,
            matched,
        )
        arguments = (self.tokens, self.lengths, which)
        ngram_torch.insert(*arguments, self.indexed[1], self.tables[1], self.sizes)
        wanted = ngram_torch.look_up(
            *arguments, self.tables[1], self.sizes, longest, drafts[1], VOCAB
        )
        assert matched.tolist() == wanted.tolist()
        assert drafts[0].tolist() == drafts[1].tolist()
        assert torch.equal(*self.tables) and torch.equal(*self.indexed)
        return drafts[0], matched


texts_of = st.lists(st.integers(0, 3), min_size=0, max_size=40)


@in_its_own_process
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.tuples(texts_of, texts_of, st.integers(1, 5)), min_size=1, max_size=3),
    min_match=st.integers(1, 3),
    longest=st.integers(3, 20),
    slots=st.sampled_from([16, 64]),
)
def test_kernels_compute_what_is_said(
    kernels: Any, steps: Any, min_match: int, longest: int, slots: int
) -> None:
    """Small tables, so that windows collide; rows that say nothing; rows until they are full."""
    both = Both(kernels, 3, 64, ngram_torch.windows(min_match, longest), slots)
    for first, second, k in steps:
        both.say(2, first)
        both.say(0, second)
        both.propose([2, 0], k, longest)


@in_its_own_process
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1023, 1024, 1025, 1153])
def test_lengths_at_the_edges_of_blocks(kernels: Any, length: int) -> None:
    both = Both(kernels, 1, 1200, [2, 4], 2048)
    generator = torch.Generator().manual_seed(length)
    both.say(0, torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    both.propose([0], 4, 8)
    both.say(0, [1, 2, 3])
    both.propose([0], 4, 8)


@in_its_own_process
def test_the_longest_match_and_the_most_recent_of_equals(kernels: Any) -> None:
    both = Both(kernels, 1, 64, [1, 2, 4], 64)
    both.say(0, [1, 2, 3, 10, 9, 2, 3, 11, 8, 2, 3, 12, 7, 1, 2, 3])
    drafts, matched = both.propose([0], 2, 8)
    assert drafts.tolist() == [[12, 7]] and matched.tolist() == [2]
    both = Both(kernels, 1, 64, [1, 2, 3], 64)
    both.say(0, [1, 2, 3, 10, 9, 2, 3, 11, 8, 2, 3, 12, 7, 1, 2, 3])
    drafts, matched = both.propose([0], 2, 8)
    assert drafts.tolist() == [[10, 9]] and matched.tolist() == [3]


@in_its_own_process
def test_a_text_that_repeats_goes_on_repeating(kernels: Any) -> None:
    both = Both(kernels, 1, 64, [1, 2], 64)
    both.say(0, [5, 6, 7, 5, 6, 7, 5])
    drafts, _ = both.propose([0], 5, 8)
    assert drafts.tolist() == [[6, 7, 5, 6, 7]]


@in_its_own_process
def test_ids_outside_the_vocabulary_are_not_drafted(kernels: Any) -> None:
    both = Both(kernels, 1, 64, [1], 64)
    both.say(0, [5, VOCAB, 6, 5])
    drafts, _ = both.propose([0], 3, 8)
    assert drafts.tolist() == [[-7, 6, 5]]
