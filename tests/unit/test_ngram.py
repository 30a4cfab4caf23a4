"""What NgramLookahead drafts, when it drafts nothing, and what it survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_driver import Request, Runner, lookahead, request

from vllm_specx.draft import ngram_kernels as kernels
from vllm_specx.draft.ngram import NgramLookahead

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


def test_a_copy_is_drafted_as_it_goes_on() -> None:
    (draft,) = Runner(lookahead(token_cost=0.001)).step(
        [request("a", [*PHRASE, 1, 2, *PHRASE[:4]])]
    )
    assert draft[:4] == PHRASE[4:]


def test_a_loop_is_drafted_beyond_the_known_text() -> None:
    """A continuation that reaches the end goes on in the draft itself, as LZ77 copies do."""
    (draft,) = Runner(lookahead(token_cost=0.001)).step([request("a", [1, 2, 3] * 20)])
    assert draft == [1, 2, 3] * 5 + [1]


def test_what_is_new_is_not_drafted() -> None:
    assert Runner(lookahead()).step([request("a", list(range(100)))]) == [[]]


def test_frequent_and_recent_continuations_win() -> None:
    once, often = [*PHRASE, 50], [*PHRASE, 60]
    runner = Runner(lookahead(token_cost=0.001))
    (draft,) = runner.step([request("a", [*often, 1, *often, 2, *once, 3, *often, 4, *PHRASE])])
    assert draft[0] == 60


def test_after_a_replaced_token_the_copy_is_found_again() -> None:
    """A renamed variable: the source goes on after the token that was replaced."""
    source = list(range(100, 160))
    proposer = lookahead(token_cost=0.001)
    runner = Runner(proposer)
    copy = Request("a", 60, list(source))
    output = [*source[:30], 900, *source[31:]]
    runner.serve(copy, output[:31])
    runner.finished.clear()
    assert proposer._record[proposer._slots["a"], kernels.ALIGNED_SOURCE] == kernels.FROM_PROMPT
    shadow = proposer._shadow_tokens[proposer._slots["a"]]
    assert shadow[:4].tolist() == source[31:35]


def test_budgets_are_respected() -> None:
    runner = Runner(lookahead(max_draft=16, token_cost=0.001))
    loops = [request(f"r{i}", [1, 2, 3] * 20) for i in range(4)]
    assert [len(draft) for draft in runner.step(loops, budget=[0, 1, 5, 99])] == [0, 1, 5, 16]


@settings(max_examples=100, deadline=None)
@given(
    contexts=st.lists(
        st.lists(st.integers(-1, 12), min_size=1, max_size=80), min_size=1, max_size=4
    ),
    budgets=st.lists(st.integers(0, 20), min_size=4, max_size=4),
)
def test_drafts_are_valid_whatever_the_context(
    contexts: list[list[int]], budgets: list[int]
) -> None:
    """Ids that are no tokens (placeholders, ids outside the vocabulary) are never drafted."""
    runner = Runner(lookahead(token_cost=0.001))
    requests = [request(f"r{i}", tokens) for i, tokens in enumerate(contexts)]
    for _ in range(2):
        drafts = runner.step(requests, budgets[: len(requests)], vocab_size=10)
        for draft, budget, one in zip(drafts, budgets, requests, strict=False):
            assert len(draft) <= budget
            assert all(0 <= token < 10 for token in draft)
            assert set(draft) <= set(one.tokens), "nothing is drafted that was not there"


def test_prefill_drafts_nothing_and_loses_nothing() -> None:
    runner = Runner(lookahead(token_cost=0.001))
    tokens = [1, 2, 3] * 20
    chunk = Request("a", 60, tokens[:30], sampled=[])
    assert runner.step([chunk]) == [[]]
    assert runner.step([request("a", tokens, prompt=60)])[0][:3] == [1, 2, 3]


def test_an_empty_batch() -> None:
    assert Runner(lookahead()).step([]) == []


def test_preempted_and_back_in_another_row() -> None:
    """Drafts are the same as without the interruption."""
    moved, stayed = (Runner(lookahead(token_cost=0.001)) for _ in range(2))
    text = [*PHRASE, 1, 2, *PHRASE, 3, *PHRASE[:5]]
    other = request("b", [5, 6] * 20)
    for runner in (moved, stayed):
        runner.step([request("a", text[:-2]), other])
    moved.step([other])
    moved.step([request("c", [9, 8, 7] * 9), other])
    again = request("a", text)
    again.sampled = text[-2:]
    assert moved.step([other, again], rows=[5, 2])[1] == stayed.step([again])[0]


def test_more_preempted_requests_than_slots() -> None:
    """The longest unseen are forgotten; nobody in the batch is."""
    proposer = lookahead(max_batch=2, token_cost=0.001)
    runner = Runner(proposer)
    for i in range(20):
        drafts = runner.step([request(f"r{i}", [1, 2, 3] * 20), request("stays", [4, 5] * 30)])
        assert drafts[0] and drafts[1]
    assert len(proposer._slots) <= 4
    assert runner.step([request("r0", [1, 2, 3] * 20)])[0][:3] == [1, 2, 3]


def test_more_requests_than_promised_draft_nothing() -> None:
    runner = Runner(lookahead(max_batch=1, token_cost=0.001))
    drafts = runner.step([request(f"r{i}", [1, 2, 3] * 20) for i in range(4)])
    assert [bool(draft) for draft in drafts] == [True, True, False, False]


def test_an_id_that_comes_again_is_a_new_request() -> None:
    runner = Runner(lookahead(token_cost=0.001, pool="off"))
    runner.step([request("a", [1, 2, 3] * 20)])
    runner.finished.append("a")
    assert runner.step([request("a", [1])]) == [[]]


def test_memory_follows_the_live_requests() -> None:
    proposer = lookahead(max_batch=4)
    runner = Runner(proposer)
    for i in range(200):
        runner.serve(Request(f"r{i}", 300, list(range(300))), [1, 2, 3, 4, 5, 6])
    runner.step([])
    assert proposer._arena.size == 1 << 15
    assert len(proposer._slots) == 0
    assert len(proposer._free) == 8


def test_read_only_and_strided_inputs() -> None:
    """Memory the kernels were not compiled for is copied, not compiled for in mid-service."""
    proposer = lookahead(token_cost=0.001)
    runner = Runner(proposer)
    one = request("a", [1, 2, 3] * 20)
    expected = runner.step([one])
    compiled = len(kernels.step.signatures)  # type: ignore[attr-defined]
    runner.token_ids = np.asfortranarray(runner.token_ids)
    assert runner.step([one]) == expected
    wide = np.zeros((8, 1024), np.int32)
    runner.token_ids = wide[:, ::2]
    assert runner.step([one]) == expected
    assert len(kernels.step.signatures) == compiled  # type: ignore[attr-defined]


def test_min_probability_decides_alone() -> None:
    tokens = [*PHRASE, 1, 2, *PHRASE[:4]]
    lengths = []
    for minimum in (0.0, 0.3, 0.6, 0.999):
        (draft,) = Runner(lookahead(min_probability=minimum)).step([request("a", tokens)])
        lengths.append(len(draft))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 0


def expected_rate(
    reach: kernels.FloatArray, lengths: list[int], costs: kernels.FloatArray
) -> float:
    gain = len(lengths) + sum(float(reach[i, :k].sum()) for i, k in enumerate(lengths))
    return gain / float(costs[sum(lengths)])


@settings(max_examples=100, deadline=None)
@given(
    p=st.lists(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=3),
    rises=st.lists(st.floats(0.0, 2.0), min_size=9, max_size=9),
)
def test_lengths_are_the_best_of_all(p: list[list[float]], rises: list[float]) -> None:
    """The chosen draft lengths against every combination of lengths, for costs of any shape."""
    reach = np.cumprod(np.array(p), axis=1)
    size = len(p)
    lengths = np.zeros(size, np.int64)
    full = np.full(size, 3, np.int64)
    costs = np.cumsum([1.0, *rises])
    kernels.choose_lengths(reach, full, full, costs, -1.0, lengths)
    careful = reach**kernels.CAUTION
    best = max(expected_rate(careful, list(k), costs) for k in np.ndindex(*[4] * size))
    assert expected_rate(careful, lengths.tolist(), costs) == pytest.approx(best)


def test_costs_go_on_in_a_straight_line() -> None:
    """Costs known for fewer tokens than are predicted: as if the line had been written out."""
    reach = np.cumprod(np.full((2, 8), 0.95), axis=1)
    full = np.full(2, 8, np.int64)
    answers = []
    for costs in (1 + 0.05 * np.arange(3), 1 + 0.05 * np.arange(17)):
        lengths = np.zeros(2, np.int64)
        kernels.choose_lengths(reach, full, full, costs, -1.0, lengths)
        answers.append(lengths.tolist())
    assert answers[0] == answers[1]
    assert 0 < answers[0][0] <= 8


def test_a_step_up_in_the_costs_is_respected() -> None:
    """Measured costs are not lines: where one more token is dear, the draft ends before it."""
    reach = np.cumprod(np.full((1, 8), 0.9), axis=1)
    full = np.full(1, 8, np.int64)
    lengths = np.zeros(1, np.int64)
    costs = np.array([1.0, 1.01, 1.02, 1.03, 3.0, 3.01, 3.02, 3.03, 3.04])
    kernels.choose_lengths(reach, full, full, costs, -1.0, lengths)
    assert lengths.tolist() == [3]


def test_costs_of_the_engine_go_before_the_usual_ones() -> None:
    """DraftContext.costs decide the length, unless token_cost is configured."""
    dear = 1.0 + np.arange(33.0)
    tokens = [*PHRASE, 1, 2, *PHRASE[:2]]
    usual, engine, given_one = (
        len(Runner(lookahead(**keys), costs=costs).step([request("a", tokens)])[0])
        for keys, costs in (({}, None), ({}, dear), ({"token_cost": 0.001}, dear))
    )
    assert engine == 0 < usual <= given_one


def test_drafts_are_shorter_where_tokens_cost_more() -> None:
    tokens = [*PHRASE, 1, 2, *PHRASE[:2]]
    lengths = [
        len(Runner(lookahead(token_cost=cost)).step([request("a", tokens)])[0])
        for cost in (0.001, 0.05, 0.9)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_warm_up_compiles_everything(tmp_path: Path) -> None:
    """After warm_up nothing is compiled, also where the cache folder is fresh."""
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from vllm_specx.config import NgramConfig
from vllm_specx.draft import ngram_kernels as kernels
from vllm_specx.draft.ngram import NgramLookahead
from ngram_driver import Request, Runner
proposer = NgramLookahead(NgramConfig(), 8, 512, 16)
proposer.warm_up()
names = [n for n in dir(kernels) if hasattr(getattr(kernels, n), "signatures")]
before = {n: len(getattr(kernels, n).signatures) for n in names}
runner = Runner(proposer)
for i in range(3):
    runner.serve(Request(f"r{i}", 5, [1, 2, 3, 4, 5]), [7, 8, 9] * 60)
after = {n: len(getattr(kernels, n).signatures) for n in names}
print(json.dumps([before, after]))
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before == after
    assert before["step"] == before["index_pool"] == before["rebuild_own"] == 1
    assert list(tmp_path.rglob("*.nbi")), "kept on disk"


def test_no_writable_cache_folder() -> None:
    """A read-only installation without a home still works."""
    code = """
import numba.core.caching as caching
class Nowhere(caching._CacheLocator):
    @classmethod
    def from_function(cls, function, path):
        return None
caching.CacheImpl._locator_classes = [Nowhere]
from vllm_specx.draft import ngram_kernels
print(ngram_kernels.length_bucket(20))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "8\n", done.stderr


def test_proposing_is_cheap() -> None:
    """A coarse guard; benchmarks/ngram_cost.py measures. 2% of an 8.7 ms step is 174 us."""
    proposer: NgramLookahead = lookahead(max_draft=32)
    runner = Runner(proposer)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50, 500).tolist()
    times = []
    for end in range(300, 500):
        one = request("a", tokens[:end])
        one.sampled = tokens[end - 1 : end]
        start = time.perf_counter()
        runner.step([one])
        times.append(time.perf_counter() - start)
    assert np.median(times) < 1e-3
