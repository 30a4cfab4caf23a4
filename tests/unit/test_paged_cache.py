"""Pages of the draft's cache: nothing is lost, nothing foreign is read, nothing leaks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.draft.paged_cache import PAGE, PagedCache, Sequence

PAGES = 9
LENGTH = 120


def cache(layers: int = 1) -> PagedCache:
    """Nine pages."""
    return PagedCache(
        tokens=PAGES * PAGE,
        layers=layers,
        kv_heads=1,
        head_dim=2,
        feature=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def slots(sequence: Sequence, begin: int, end: int) -> torch.Tensor:
    """Of the entries [begin, end)."""
    return torch.tensor(
        [sequence.pages[(i - sequence.base) // PAGE] * PAGE + i % PAGE for i in range(begin, end)],
        dtype=torch.int64,
    )


def entry(tokens: np.ndarray, i: int) -> float:
    """What must be stored at position i: a function of the tokens up to i + 1, as exact as floats."""
    seed = 1
    for token in tokens[: i + 2].tolist():
        seed = (seed * 31 + token + 1) % 65521
    return float(seed)


def feature(tokens: np.ndarray, i: int) -> float:
    """A function of the tokens up to i."""
    return entry(tokens, i - 1) + 0.5


def write(pool: PagedCache, sequence: Sequence, tokens: np.ndarray, end: int) -> None:
    """The entries up to `end`, as the drafter does it."""
    begin = sequence.end
    pool.extend(sequence, end)
    values = torch.tensor([entry(tokens, i) for i in range(begin, end)])
    pool.kv[:, slots(sequence, begin, end)] = values[:, None, None]
    pages, positions = pool.register(sequence, tokens, end)
    for page, position in zip(pages, positions, strict=True):
        pool.edges[page] = feature(tokens, position)


def stored(pool: PagedCache, sequence: Sequence) -> list[float]:
    """The entries [start, end)."""
    return pool.kv[0, slots(sequence, sequence.start, sequence.end), 0, 0].tolist()


def expected(tokens: np.ndarray, sequence: Sequence) -> list[float]:
    return [entry(tokens, i) for i in range(sequence.start, sequence.end)]


def text(seed: int) -> np.ndarray:
    """Few different beginnings, so that prefixes are shared; alike up to places inside of pages."""
    rng = np.random.default_rng(seed % 2)
    tokens = rng.integers(0, 50, LENGTH).astype(np.int32)
    tokens[16 * (seed % 5) + seed % 3 :] += 1 + seed % 4
    return tokens


def check(pool: PagedCache, live: dict[int, tuple[np.ndarray, Sequence]]) -> None:
    """Every page is free, findable or held, and holders see what is theirs."""
    held: dict[int, int] = {}
    for tokens, sequence in live.values():
        assert stored(pool, sequence) == expected(tokens, sequence)
        for page in sequence.pages:
            held[page] = held.get(page, 0) + 1
    assert pool.used == len(held) and pool.available == PAGES - len(held)
    free = set(range(PAGES)) - set(held)
    assert set(pool._free) | set(pool._unused) == free
    assert len(pool._free) + len(pool._unused) == len(free)
    assert [pool._users[page] for page in range(PAGES)] == [held.get(p, 0) for p in range(PAGES)]
    named = {page for same in pool._registered.values() for page in same.values()}
    assert named == set(pool._name) and set(pool._unused) <= named
    assert all(pool._registered.values()), "an empty entry stays"


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "finish", "roll back", "begin", "skip"]),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.sampled_from([1, 2]))
def test_random_lives(lives: list[tuple[str, int, int]], layers: int) -> None:
    """Four requests at a time that grow, roll back, end, begin after prefixes, and skip."""
    pool = cache(layers)
    live: dict[int, tuple[np.ndarray, Sequence]] = {}
    for what, name, number in lives:
        if what == "begin" or name not in live:
            if name in live:
                pool.free(live[name][1])
            tokens, sequence = text(number), Sequence()
            live[name] = tokens, sequence
            hit = PAGE * (number % 5)
            if hit:
                edge = pool.adopt(sequence, tokens, hit)
                assert sequence.end == hit - (edge is not None)
                if edge is not None:
                    assert edge.tolist() == [feature(tokens, hit - 1)] * 2
        tokens, sequence = live[name]
        if what == "append":
            end = min(sequence.end + number, LENGTH - 1)
            if pool.missing(sequence, end) > pool.available:
                worst = max(live, key=lambda other: len(live[other][1].pages))
                pool.free(live.pop(worst)[1])
            elif end > sequence.end:
                write(pool, sequence, tokens, end)
        elif what == "roll back":
            pool.truncate(sequence, max(0, sequence.end - number))
        elif what == "skip":
            pool.adopt(sequence, tokens, min(sequence.end + number, LENGTH - 2))
        elif what == "finish":
            pool.free(live.pop(name)[1])
        check(pool, live)
    for _, sequence in live.values():
        pool.free(sequence)
    check(pool, {})
    assert pool.used == 0


def test_a_page_is_shared_and_copied_only_where_the_next_token_differs() -> None:
    pool = cache()
    a, b, c = Sequence(), Sequence(), Sequence()
    first = text(0)
    write(pool, a, first, 40)
    assert pool.used == 3
    assert pool.adopt(b, first, 32) is None
    assert b.pages == a.pages[:2] and pool.used == 3
    other = first.copy()
    other[32] += 1
    edge = pool.adopt(c, other, 32)
    assert edge is not None and c.end == 31
    assert c.pages[0] == a.pages[0] and c.pages[1] not in a.pages and pool.used == 4
    write(pool, c, other, 40)
    assert stored(pool, c) == expected(other, c)
    assert stored(pool, a) == expected(first, a)


def test_a_shared_page_is_copied_before_it_is_written_again() -> None:
    pool = cache()
    a, b = Sequence(), Sequence()
    tokens = text(0)
    write(pool, a, tokens, 40)
    pool.adopt(b, tokens, 32)
    pool.truncate(a, 20)
    assert a.pages[0] == b.pages[0] and a.pages[1] != b.pages[1]
    changed = tokens.copy()
    changed[21:] += 1
    write(pool, a, changed, 40)
    assert stored(pool, a) == expected(changed, a)
    assert stored(pool, b) == expected(tokens, b)


def test_without_a_page_to_copy_to_a_sequence_begins_again() -> None:
    pool = cache()
    a, b, full = Sequence(), Sequence(), Sequence()
    tokens = text(0)
    write(pool, a, tokens, 32)
    pool.adopt(b, tokens, 32)
    pool.extend(full, PAGE * (PAGES - 2))
    pool.truncate(a, 20)
    assert (a.start, a.end, a.pages) == (20, 20, [])
    other = tokens.copy()
    other[32] += 1
    assert pool.adopt(a, other, 32) is None
    assert (a.start, a.end, a.pages) == (32, 32, [])
    assert stored(pool, b) == expected(tokens, b)


def test_an_adopted_page_is_not_given_away() -> None:
    pool = cache()
    a, b = Sequence(), Sequence()
    tokens = text(0)
    write(pool, a, tokens, 32)
    pool.free(a)
    pool.adopt(b, tokens, 32)
    grown = Sequence()
    assert pool.available == PAGES - 2
    pool.extend(grown, PAGE * (PAGES - 2))
    assert not set(grown.pages) & set(b.pages)
    assert stored(pool, b) == expected(tokens, b)


def test_equal_pages_are_kept_once() -> None:
    pool = cache()
    a, b = Sequence(), Sequence()
    tokens = text(0)
    write(pool, a, tokens, 40)
    write(pool, b, tokens, 40)
    assert a.pages[:2] == b.pages[:2] and pool.used == 4


def test_the_pages_freed_longest_ago_go_first_and_a_prefix_goes_last() -> None:
    pool = cache()
    texts = [text(seed) for seed in (0, 1, 5)]
    for tokens in texts:
        sequence = Sequence()
        write(pool, sequence, tokens, 32)
        pool.free(sequence)
    assert pool.available == PAGES and len(pool._free) == 3
    grown = Sequence()
    write(pool, grown, np.arange(200, 200 + LENGTH, dtype=np.int32), 16 * 4)
    found = Sequence()
    pool.adopt(found, texts[0], 32)
    assert found.start == found.end == 32, "its last page was the first to go"
    pool.adopt(found, texts[0], 16)
    assert found.start == 0
    pool.adopt(found, texts[1], 32)
    assert found.start == 0


def test_freed_pages_come_back_clean() -> None:
    """What is masked out is multiplied by zero: not a number would stay one."""
    pool = cache()
    pool.kv.fill_(torch.nan)
    sequence = Sequence()
    pool.extend(sequence, 20)
    assert not pool.kv[:, slots(sequence, 0, 32)].isnan().any()


def test_layers_above_the_first_are_shared_only_if_all_before_was_known() -> None:
    for layers in (1, 2):
        pool = cache(layers)
        a, b = Sequence(), Sequence()
        tokens = text(0)
        pool.adopt(a, tokens, 16)
        write(pool, a, tokens, 48)
        pool.adopt(b, tokens, 48)
        assert b.start == (16 if layers == 1 else 48)


def test_hashes_do_not_depend_on_the_process() -> None:
    """All tensor-parallel ranks find the same pages."""
    pool = cache()
    sequence = Sequence()
    write(pool, sequence, np.arange(LENGTH, dtype=np.int32), 32)
    assert [digest.hex()[:8] for digest in sequence.digests] == ["998728c1", "451ae4fa"]


def test_pages_are_shared_only_within_a_key() -> None:
    pool = cache()
    tokens = text(0)
    first = Sequence(key="salt of a")
    write(pool, first, tokens, 40)
    for key, found in (("salt of b", False), (None, False), ("salt of a", True)):
        other = Sequence(key=key)
        assert pool.adopt(other, tokens, 32) is None
        assert (other.start == 0) == found
        pool.free(other)
    # Nor are equal pages that were written apart.
    other = Sequence(key="salt of b")
    write(pool, other, tokens, 40)
    assert not set(other.pages) & set(first.pages)
    assert stored(pool, first) == stored(pool, other) == expected(tokens, first)


def test_a_sequence_without_a_key_leaves_nothing_to_be_found() -> None:
    pool = cache()
    sequence = Sequence(key=None)
    write(pool, sequence, text(0), 40)
    pool.truncate(sequence, 20)
    write(pool, sequence, text(0), 40)
    assert stored(pool, sequence) == expected(text(0), sequence)
    pool.free(sequence)
    assert len(pool._free) == PAGES


def test_a_key_may_be_any_text_of_a_client() -> None:
    pool = cache()
    sequence = Sequence(key="\ud800\0")
    write(pool, sequence, text(0), 32)
    assert len(sequence.digests) == 2


def test_cleared_it_is_as_new() -> None:
    pool = cache()
    write(pool, Sequence(), text(0), 40)
    done = Sequence()
    write(pool, done, text(1), 40)
    pool.free(done)
    pool.clear()
    check(pool, {})
    assert len(pool._free) == PAGES
    assert pool.adopt(found := Sequence(), text(0), 32) is None and found.start == 32
