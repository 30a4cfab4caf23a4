"""The memory that requests share: isolation, bounds, what leaves first, what is not stored twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_driver import Request, Runner, lookahead, request

from vllm_specx.draft import ngram_kernels as kernels
from vllm_specx.draft import ngram_pool
from vllm_specx.draft.ngram import match_levels
from vllm_specx.draft.ngram_pool import Pool

EMPTY = np.zeros(0, np.int32)


def numbers(start: int, count: int = 40) -> list[int]:
    return list(range(start, start + count))


def array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def pool(max_tokens: int = 1024) -> Pool:
    return Pool(max_tokens, match_levels(1, 64))


def remembered(runner: Runner, tokens: list[int], name: str | None = "default") -> bool:
    """Whether a new request that starts like `tokens` is drafted how they go on."""
    probe = request("probe", tokens[:20], prompt=19, pool=name)
    (draft,) = runner.step([probe])
    runner.finished.append("probe")
    return draft[:4] == tokens[20:24]


def test_a_finished_request_is_drafted_from() -> None:
    runner = Runner(lookahead())
    prompt, output = numbers(100, 10), numbers(300)
    drafts = runner.serve(Request("a", 10, list(prompt)), output)
    assert not any(drafts)
    again = runner.serve(Request("b", 10, list(prompt)), output)
    assert len(again[0]) >= 4, "from the first output token on"
    assert again[0] == output[1 : 1 + len(again[0])]
    assert len(again) < 10


def test_prompts_are_not_stored() -> None:
    runner = Runner(lookahead())
    prompt = numbers(100)
    runner.serve(Request("a", 40, list(prompt)), numbers(300))
    assert runner.step([request("b", prompt[:20], pool="default")]) == [[]]


@pytest.mark.parametrize(("writer", "reader"), [(None, None), (None, "x"), ("x", None), ("x", "y")])
def test_no_name_and_other_names_share_nothing(writer: str | None, reader: str | None) -> None:
    runner = Runner(lookahead())
    runner.serve(Request("a", 1, [1], pool=writer), numbers(300))
    assert not remembered(runner, numbers(300), reader)
    runner.step([])
    assert runner.lookahead.pool.names == (writer is not None), "forgotten with the last request"


def test_switched_off() -> None:
    runner = Runner(lookahead(pool="off"))
    runner.serve(Request("a", 1, [1]), numbers(300))
    assert not remembered(runner, numbers(300))
    assert len(runner.lookahead.pool) == 0


@settings(max_examples=25, deadline=None)
@given(
    order=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=6, max_size=60)),
        min_size=2,
        max_size=12,
    )
)
def test_pools_are_isolated(order: list[tuple[int, list[int]]]) -> None:
    """Each pool has an alphabet of its own; a draft in another's alphabet would be a leak."""
    runner = Runner(lookahead(pool={"max_tokens": 1024}))
    for number, (which, output) in enumerate(order):
        alphabet = 100 * (which + 1)
        one = Request(f"r{number}", 2, [7, 7], pool=f"tenant-{which}")
        drafts = runner.serve(one, [alphabet + token for token in output])
        assert {token // 100 for draft in drafts for token in draft} <= {which + 1, 0}


def test_a_hash_collision_does_not_cross_pools() -> None:
    """Even where the index leads to another pool's document, it is not a candidate."""
    proposer = lookahead()
    runner = Runner(proposer)
    runner.serve(Request("a", 1, [1], pool="x"), numbers(300))
    runner.step([])
    proposer.pool.join("y")
    state = proposer.pool.arrays
    for level, length in enumerate(proposer.levels):
        # What a query of pool y finds now is where pool x wrote.
        place = int(state.state[kernels.TAIL]) + 22
        state.head[level, :] = place if length <= 16 else 0
        assert place < int(state.state[kernels.END])
    assert not remembered(runner, numbers(300), "y")
    state.documents[:, kernels.DOC_POOL] = 1
    assert remembered(runner, numbers(300), "y"), "the pool's number alone held it back"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700), st.booleans()), max_size=60),
)
def test_the_bound_holds_over_all_pools(added: list[tuple[int, int, bool]]) -> None:
    shared = pool(1024)
    ids = [shared.join(f"p{i}") for i in range(4)]
    for number, (which, length, use) in enumerate(added):
        shared.add(ids[which], array([number]), array(numbers(10 * number, length)))
        shared.index(500)
        if use:
            shared.arrays.documents[:, kernels.DOC_USED] = 1
        assert shared.used_tokens <= 1024
        span = int(shared.arrays.state[kernels.END] - shared.arrays.state[kernels.TAIL])
        assert span == shared.used_tokens
        assert len(shared._by_key) == len(shared)
    for pool_id in ids:
        shared.leave(pool_id)
    held = {document.pool for document in shared._documents}
    assert shared.names == len(held)


@pytest.mark.parametrize("again", [True, False])
def test_the_least_recently_used_leaves_first(again: bool) -> None:
    """Used: the same output came again, or drafts from it came true."""
    runner = Runner(lookahead(pool={"max_tokens": 1024}))
    useful, useless = numbers(100), numbers(200)
    runner.serve(Request("useful", 1, [1]), useful)
    runner.serve(Request("useless", 1, [1]), useless)
    for round_ in range(60):
        output = [300 + (7 * round_ + 13 * i) % 600 for i in range(60)]
        runner.serve(Request(f"other-{round_}", 1, [1]), output)
        if again:
            runner.serve(Request("useful", 1, [1]), useful)
            continue
        user = request("user", useful[:10], prompt=9)
        (draft,) = runner.step([user])
        assert draft[:4] == useful[10:14]
        user.tokens += draft[:4]
        user.sampled = draft[:4]
        runner.step([user])
        runner.finished.append("user")
    assert remembered(runner, useful)
    assert not remembered(runner, useless)


def test_the_same_again_is_stored_once_and_refreshed() -> None:
    shared = pool()
    which = shared.join("p")
    for _ in range(3):
        shared.add(which, array([1, 2]), array(numbers(10)))
        shared.add(which, array([1]), array([2, *numbers(10)]))
    assert len(shared) == 2, "where the output begins is part of what is the same"
    assert shared.arrays.documents[:2, kernels.DOC_USED].tolist() == [1, 1]


def test_the_same_text_in_two_pools_is_two_documents() -> None:
    shared = pool()
    for name in ("p", "q"):
        shared.add(shared.join(name), EMPTY, array(numbers(10)))
    assert len(shared) == 2


def test_positions_start_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool, "_LAST_POSITION", 3000)
    runner = Runner(lookahead(pool={"max_tokens": 1024}))
    for round_ in range(100):
        output = [100 + (round_ + 7 * i) % 800 for i in range(60)]
        runner.serve(Request(f"r{round_}", 1, [1]), output)
        assert remembered(runner, output)
        assert runner.lookahead.pool.arrays.state[kernels.END] < 3000 + 1024 + 512


def test_a_long_output_is_indexed_over_several_steps() -> None:
    shared = pool(1 << 16)
    which = shared.join("p")
    shared.add(which, EMPTY, array(numbers(0, 10_000)))
    for _ in range(10):
        before = int(shared.arrays.state[kernels.INDEXED])
        shared.index(1000)
        assert int(shared.arrays.state[kernels.INDEXED]) - before <= 1001
    shared.index(10)
    assert shared.arrays.state[kernels.INDEXED] == shared.arrays.state[kernels.END]
