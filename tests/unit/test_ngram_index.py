"""The n-gram index against brute force, and built step by step against built at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_driver import Runner, lookahead, request

from vllm_specx.draft import ngram_kernels as kernels
from vllm_specx.draft.ngram import NgramLookahead, match_levels
from vllm_specx.draft.ngram_arena import SMALLEST, Arena

# Shorter than MAX_WALK, so that no chain is cut.
texts = st.lists(st.integers(0, 2), min_size=2, max_size=kernels.MAX_WALK - 1)


def match_length(a: list[int], b: list[int], most: int) -> int:
    """Equal tokens at the ends of two texts."""
    m = 0
    while m < min(len(a), len(b), most) and a[len(a) - 1 - m] == b[len(b) - 1 - m]:
        m += 1
    return m


def reference(
    context: list[int],
    prompt: int,
    documents: list[tuple[list[int], list[int]]],
    levels: list[int],
    max_match: int,
) -> list[tuple[bool, int, int]]:
    """(from the pool, continuation place, match length): by levels, then own before pool, then
    the most recent first. A place in the pool is counted as the ring counts."""
    own = [
        (c, match_length(context[:c], context, max_match)) for c in range(len(context) - 1, 0, -1)
    ]
    shared = []
    start = 1
    for tail, output in documents:
        text = tail + output
        for c in range(len(tail) + 1, len(text)):
            shared.append((start + 1 + c, match_length(text[:c], context, max_match)))
        start += 1 + len(text)
    found: list[tuple[bool, int, int]] = []
    for i in range(len(levels) - 1, -1, -1):
        above = levels[i + 1] if i + 1 < len(levels) else max_match + 1
        room = min(kernels.MAX_CANDIDATES, len(found) + kernels.MAX_CANDIDATES // 2)
        mine = [(False, c, m) for c, m in own if levels[i] <= m < above]
        found += mine[: room - len(found)]
        theirs = [(True, c, m) for c, m in reversed(shared) if levels[i] <= m < above]
        found += theirs[: kernels.MAX_CANDIDATES - len(found)]
        if len(found) >= kernels.ENOUGH_CANDIDATES:
            break
    return found


def candidates(proposer: NgramLookahead, name: str) -> list[tuple[bool, int, int]]:
    source, place, length = (np.zeros(kernels.MAX_CANDIDATES + 1, np.int64) for _ in range(3))
    count = kernels.find_candidates(
        proposer._arrays,
        proposer.pool.arrays,
        proposer._slots[name],
        proposer.levels,
        proposer.config.max_match,
        True,
        source,
        place,
        length,
    )
    pooled = source[:count] == kernels.FROM_POOL
    return list(zip(pooled.tolist(), place[:count].tolist(), length[:count].tolist(), strict=True))


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 64), (2, 8), (3, 5)])
@settings(max_examples=150, deadline=None)
@given(context=texts, prompt=st.integers(1, 31))
def test_own_matches_equal_brute_force(
    min_match: int, max_match: int, context: list[int], prompt: int
) -> None:
    proposer = lookahead(min_match=min_match, max_match=max_match)
    Runner(proposer).step([request("a", context, prompt=min(prompt, len(context)))])
    levels = match_levels(min_match, max_match).tolist()
    assert candidates(proposer, "a") == reference(context, prompt, [], levels, max_match)


@settings(max_examples=150, deadline=None)
@given(
    context=texts,
    documents=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), min_size=4, max_size=9)),
        max_size=3,
        unique_by=lambda document: (tuple(document[0]), tuple(document[1])),
    ),
)  # fmt: skip
def test_pool_matches_equal_brute_force(
    context: list[int], documents: list[tuple[list[int], list[int]]]
) -> None:
    proposer = lookahead()
    pool = proposer.pool.join("default")
    for tail, output in documents:
        proposer.pool.add(pool, np.array(tail, np.int32), np.array(output, np.int32))
    Runner(proposer).step([request("a", context)])
    expected = reference(context, 1, documents, proposer.levels.tolist(), 64)
    assert candidates(proposer, "a") == expected


def snapshot(proposer: NgramLookahead, name: str) -> list[list[int]]:
    record = proposer._record[proposer._slots[name]]
    offset, length, capacity = (
        int(record[k]) for k in (kernels.OFFSET, kernels.LENGTH, kernels.CAPACITY)
    )
    arena = proposer._arena
    levels = len(proposer.levels)
    return [
        arena.tokens[offset : offset + length].tolist(),
        arena.prev[offset : offset + length].ravel().tolist(),
        arena.head[offset * levels : (offset + capacity) * levels].tolist(),
        arena.counts[offset : offset + capacity].tolist(),
    ]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=10, max_size=400),
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=30),
)
def test_incremental_equals_rebuilt(tokens: list[int], steps: list[int]) -> None:
    grown = lookahead()
    runner = Runner(grown)
    end = 1
    for size in [*steps, len(tokens)]:
        runner.step([request("a", tokens[:end])])
        end = min(len(tokens), end + size)
    runner.step([request("a", tokens)])
    # The same capacity as the one that grew, so that hashes fall into the same places.
    capacity = int(grown._record[grown._slots["a"], kernels.CAPACITY])
    at_once = lookahead()
    at_once._arena.capacity_for = lambda length: capacity  # type: ignore[method-assign]
    Runner(at_once).step([request("a", tokens)])
    assert snapshot(grown, "a") == snapshot(at_once, "a")


def test_another_history_is_noticed() -> None:
    """A request whose tokens are not those seen before, or fewer, is indexed anew."""
    for second in ([7, 8, 9] * 20, [1, 2, 3] * 5, [1, 2, 3] * 19 + [4, 4, 4, 4]):
        proposer, fresh = lookahead(), lookahead()
        runner = Runner(proposer)
        runner.step([request("a", [1, 2, 3] * 20)])
        again = runner.step([request("a", second)])
        assert again == Runner(fresh).step([request("a", second)])
        assert sorted(candidates(proposer, "a")) == sorted(candidates(fresh, "a"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_arena_pieces_never_overlap(actions: list[tuple[bool, int]]) -> None:
    arena = Arena(levels=2, size=1024)
    held: list[tuple[int, int]] = []
    for release, number in actions:
        if release and held:
            arena.release(*held.pop(number % len(held)))
        else:
            capacity = arena.capacity_for(number)
            assert capacity >= number
            held.append((arena.allocate(capacity), capacity))
        taken = sorted(held)
        for (start, size), (after, _) in pairwise(taken):
            assert start + size <= after
        assert all(start + size <= arena.size for start, size in taken)
    for piece in held:
        arena.release(*piece)
    assert arena.allocate(arena.size) == 0, "free pieces merge"
    assert arena.capacity_for(1) == SMALLEST


def test_arena_keeps_contents_when_it_grows() -> None:
    proposer = lookahead()
    runner = Runner(proposer)
    tokens = [5, 6, 7, 8] * 100
    runner.step([request("a", tokens)])
    before = snapshot(proposer, "a")
    proposer._arena.allocate(4 * proposer._arena.size)
    proposer._arrays = proposer._gather()
    assert snapshot(proposer, "a") == before
