"""Lookahead decoding: the window against the paper's rules, what it makes of a toy target, and when it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.eagle_paths import paths
from tests.unit.test_tree_draft import check_shape
from vllm_specx.config import NgramConfig
from vllm_specx.control.cost import CostPrior
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.draft.guesses import FIRST_TOKENS, GuessPool
from vllm_specx.draft.jacobi_window import JacobiWindow
from vllm_specx.draft.lookahead_config import LookaheadConfig
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.spare_rows import PATIENCE, TRIAL, SpareRows
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine.steering import Steering
from vllm_specx.engine.tree_plan import plan_step
from vllm_specx.engine.tree_sampling import answers
from vllm_specx.engine.trees import Trees
from vllm_specx.verify.tree import visible, walk

LENGTH = 400
SIZES = st.tuples(st.integers(2, 9), st.integers(3, 7))


def node(level: int, column: int, window: int) -> int:
    """The row of a window's token among its nodes; -1: the last committed token, which is none of them."""
    return level * window + column - 1


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_what_the_tokens_of_a_window_see(size: tuple[int, int]) -> None:
    """Level 0 up to their own column, and their own column above them (arXiv 2402.02057, figure 2)."""
    window, ngram = size
    tree = JacobiWindow(*size, np.arange(20, dtype=np.int32)).tree(99)
    assert len(tree.tokens) == LookaheadConfig(window=window, ngram=ngram).rows
    mask, deep = visible(tree.parents), tree.depths()
    for level in range(ngram - 1):
        for column in range(window):
            row = node(level, column, window)
            above = {node(0, c, window) for c in range(column + 1)}
            above |= {node(x, column, window) for x in range(level + 1)}
            assert set((np.flatnonzero(mask[row + 1]) - 1).tolist()) == above | {-1}
            if row >= 0:
                assert deep[row] == column + level


@given(SIZES, st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_window_moves_up(size: tuple[int, int], text: list[int], seed: int) -> None:
    """Against columns kept as lists: one token drops off above, what the target says comes below."""
    window, ngram = size
    rng = np.random.default_rng(seed)
    words = np.array(text, np.int32)
    made = JacobiWindow(window, ngram, words)
    last = int(rng.integers(1000))
    start = [last, *made.tree(last).tokens.tolist()]
    columns = [[start[level * window + c] for level in range(ngram - 1)] for c in range(window)]
    twice = "".join(f" {t}" for t in text * ngram) + " "
    for column in columns[1:]:
        assert "".join(f" {t}" for t in column) + " " in twice, "it starts with pieces of the text"
    again = JacobiWindow(window, ngram, words.copy()).tree(last)
    assert again.tokens.tolist() == start[1:], "the same text gives the same window"
    for _ in range(2 * ngram):
        said = rng.integers(0, 1000, window).astype(np.int32)
        last = int(rng.integers(1000))
        ngrams = made.update(said)
        wanted = [[*column, int(token)] for column, token in zip(columns, said, strict=True)]
        assert ngrams.tolist() == wanted
        columns = [column[1:] for column in wanted]
        columns[0][0] = last
        levels = [[column[level] for column in columns] for level in range(ngram - 1)]
        assert made.tree(last).tokens.tolist() == [t for level in levels for t in level][1:]


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=60),
    st.integers(1, 6),
    st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_guesses_are_the_latest_ngrams(
    made: list[tuple[int, ...]], each: int, branching: int
) -> None:
    pool = GuessPool(each)
    for begin in range(0, len(made), 3):
        pool.add(np.array(made[begin : begin + 3], np.int32))
    for first in range(4):
        latest: dict[tuple[int, ...], int] = {}
        for start, *rest in made:
            if start == first:
                latest[tuple(rest)] = latest.pop(tuple(rest), 0) + 1
                if len(latest) > each:
                    del latest[next(iter(latest))]
        found = pool.after(first, branching)
        if not latest:
            assert found is None
            continue
        assert found is not None
        tree = DraftTree(found.tokens, found.parents)
        named = paths(tree)
        beginnings = {word[:n] for word in latest for n in range(1, 4)}
        assert set(named) <= beginnings and len(set(named)) == len(named)
        if branching == 3 and len({word[0] for word in latest}) <= 3:
            assert {path for path in named if len(path) == 1} == {(w[0],) for w in latest}
        assert found.depths.tolist() == [len(path) - 1 for path in named]
        for path, share, parent in zip(named, found.shares, found.parents, strict=True):
            times = {n: sum(t for w, t in latest.items() if w[: len(n)] == n) for n in named}
            above = times[named[parent]] if parent >= 0 else sum(latest.values())
            assert share == pytest.approx(times[path] / above)
        counts = [found.parents.tolist().count(p) for p in set(found.parents.tolist())]
        assert max(counts) <= branching


def test_guesses_are_forgotten_where_there_are_too_many() -> None:
    pool = GuessPool(2)
    for first in range(FIRST_TOKENS + 10):
        pool.add(np.array([[first, 1, 2]], np.int32))
    assert len(pool) == FIRST_TOKENS
    assert pool.after(9, 4) is None and pool.after(10, 4) is not None


# A toy target: after each token one other, all tokens in one circle, so that a text never repeats itself.
CIRCLE = 300
Target = Callable[[Sequence[int]], int]


def around(text: Sequence[int]) -> int:
    return (text[-1] + 1) % CIRCLE


def scattered(seed: int) -> list[int]:
    """A prompt with tokens that are still to be said, none followed by what follows it then."""
    chosen = np.random.default_rng(seed).choice(np.arange(10, 100, 2), 30, replace=False)
    return [*chosen.tolist(), 5]


class Step:
    """What the engine does, for a batch: the target verifies the drafts, and says what it is asked."""

    def __init__(self, proposer: NgramLookahead, target: Target) -> None:
        self.proposer, self.target = proposer, target
        self.windows = self.steps = 0
        self.answered = 99  # of the rows that are asked, at most

    def serve(
        self, prompts: Sequence[Sequence[int]], length: int, **changes: Any
    ) -> list[list[int]]:
        names = [f"r{i}" for i in range(len(prompts))]
        texts = [[*prompt, self.target(prompt)] for prompt in prompts]
        table = np.zeros((len(prompts), LENGTH), np.int32)
        sampled = [text[-1:] for text in texts]
        said: dict[str, np.ndarray] = {}
        while min(map(len, texts)) < length:
            for row, text in zip(table, texts, strict=True):
                row[: len(text)] = text
            context = DraftContext(
                request_ids=names,
                rows=np.arange(len(names), dtype=np.int32),
                token_ids=table,
                num_tokens=np.array([len(text) for text in texts], np.int32),
                num_prompt_tokens=np.array([len(p) for p in prompts], np.int32),
                sampled=sampled,
                budgets=np.full(len(names), 64, np.int32),
                temperatures=np.zeros(len(names), np.float32),
                pools=["default"] * len(names),
                finished=[],
                vocab_size=CIRCLE,
                answers=said,
            )
            drafts = self.proposer.propose(replace(context, **changes))
            self.steps += 1
            sampled, said = [], {}
            for name, text, draft in zip(names, texts, drafts, strict=True):
                if len(draft.tokens) > draft.window:
                    check_shape(draft.candidates())
                sampled.append(self._verify(text, draft))
                if draft.asked:
                    self.windows += 1
                    rows = range(len(draft.tokens) - draft.asked, len(draft.tokens))
                    rows = rows[: self.answered]
                    said[name] = np.array([self._after(text, draft, j) for j in rows], np.int32)
            for text, tokens in zip(texts, sampled, strict=True):
                text += tokens
        return [text[:length] for text in texts]

    def _after(self, text: list[int], draft: DraftTree, j: int) -> int:
        path: list[int] = []
        while j >= 0:
            path.insert(0, int(draft.tokens[j]))
            j = int(draft.parents[j])
        return self.target([*text, *path])

    def _verify(self, text: list[int], draft: DraftTree) -> list[int]:
        return walk(draft, lambda j: self._after(text, draft, j))[0]


def lookahead(when: str = "always", **changes: Any) -> NgramLookahead:
    keys = {"window": 6, "ngram": 4, "when": when}
    made: dict[str, Any] = {"min_probability": 0.0, "tree": {"nodes": 24}, "lookahead": keys}
    return NgramLookahead(NgramConfig.model_validate({**made, **changes}), 2, LENGTH, 64)


def alone(prompt: Sequence[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(around(text))
    return text


def test_ngrams_that_the_text_does_not_have_are_accepted() -> None:
    prompts = [scattered(0), scattered(1)]
    with_windows, without = Step(lookahead(), around), Step(lookahead(lookahead=None), around)
    expected = [alone(prompt, 150) for prompt in prompts]
    assert with_windows.serve(prompts, 150) == expected
    assert without.serve(prompts, 150) == expected
    assert with_windows.proposer.lookahead is not None
    assert with_windows.proposer.lookahead.gained[""] > 60
    assert with_windows.steps < 0.75 * without.steps
    assert with_windows.windows == 2 * with_windows.steps


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": np.array([0.7], np.float32)},
        {"chains": {0}},
        {"budgets": np.zeros(1, np.int32)},
    ],
)
def test_requests_that_have_no_window(changes: dict[str, Any]) -> None:
    made = Step(lookahead(), around)
    made.serve([scattered(0)], 60, **changes)
    assert made.windows == 0 and made.steps > 10


def test_no_window_goes_beyond_the_longest_text() -> None:
    """Rows have positions, and the rotary table ends."""
    made = lookahead()
    rows = LookaheadConfig(window=6, ngram=4).rows
    table = np.zeros((1, LENGTH), np.int32)
    for left, window in ((rows + 1, True), (rows, False)):
        count = LENGTH - left
        table[0, :count] = np.arange(count)
        (draft,) = made.propose(
            DraftContext(
                request_ids=[f"r{left}"],
                rows=np.zeros(1, np.int32),
                token_ids=table,
                num_tokens=np.array([count], np.int32),
                num_prompt_tokens=np.array([9], np.int32),
                sampled=[[count - 1]],
                budgets=np.array([left - 1], np.int32),
                temperatures=np.zeros(1, np.float32),
                pools=[None],
                finished=[],
                vocab_size=1000,
            )
        )
        assert draft.window == (rows if window else 0)
        assert count - 1 + draft.depth() < LENGTH


def test_answers_that_are_not_whole_change_nothing() -> None:
    """A step's budget may cut the rows that were asked."""
    made = Step(lookahead(), around)
    made.answered = 5
    prompt = scattered(0)
    assert made.serve([prompt], 80) == [alone(prompt, 80)]
    assert made.windows == made.steps
    assert made.proposer.lookahead is not None
    assert not len(made.proposer.lookahead._requests["r0"].guesses)


def straight(fixed: float, token: float, size: int = 256) -> np.ndarray:
    return fixed + token * np.arange(size, dtype=np.float64)


def steps(
    spare: SpareRows, count: int, costs: np.ndarray, brings: float, batch: int = 1, rows: int = 27
) -> list[bool]:
    """Steps in which a window brings so much, in expectation; whether each had windows."""
    made: list[bool] = []
    left = 0.0
    for _ in range(count):
        on = spare.pay(batch, 4 * batch, rows * batch, batch, costs)
        made.append(on)
        left += brings * batch * on
        gained, left = int(left), left % 1.0
        spare.learn(batch, batch + gained, batch * on, gained)
    return made


FREE, DEAR = straight(1.0, 0.002), straight(1.0, 0.05)


def test_rows_that_cost_more_than_they_could_bring_are_never_tried() -> None:
    assert not any(steps(SpareRows(), 3000, DEAR, 0.9))


def test_rows_that_pay_stay() -> None:
    assert all(steps(SpareRows(), 3000, FREE, 0.4))


def test_rows_that_bring_nothing_are_tried_ever_more_seldom() -> None:
    made = steps(SpareRows(), 6000, FREE, 0.0)
    starts = [i for i in range(1, 6000) if made[i] and not made[i - 1]]
    assert made[0] and sum(made) == TRIAL * (1 + len(starts))
    gaps = np.diff([0, *starts])
    assert gaps[0] == TRIAL + PATIENCE and (gaps[1:] > 1.5 * gaps[:-1]).all() and len(starts) >= 3


def test_rows_are_left_to_others_in_large_batches() -> None:
    """27 rows are free beside one request, not beside 32 of them."""
    knee = np.maximum(1.0, 0.5 + 0.01 * np.arange(256, dtype=np.float64))
    for trial in (10, 200):  # it is tried still, or has been
        spare = SpareRows()
        assert all(steps(spare, trial, knee, 0.5))
        assert not any(steps(spare, 50, knee, 0.5, batch=32))
        assert all(steps(spare, 50, knee, 0.5)), "what it brings is known still"


def test_by_costs_a_window_comes_and_goes() -> None:
    for costs, some in ((FREE, True), (DEAR, False)):
        made = Step(lookahead("auto", min_probability=None), around)
        prompt = scattered(2)
        assert made.serve([prompt], 120, costs=costs) == [alone(prompt, 120)]
        assert (made.windows > 0) == some


# What the engine makes of it.


def with_window(candidates: DraftTree, last: int = 5) -> DraftTree:
    window = JacobiWindow(3, 3, np.arange(10, 30, dtype=np.int32)).tree(last)
    return candidates.beside(window, 3)


BRANCHED = DraftTree(
    np.array([1, 2, 3], np.int32), np.array([-1, -1, 0], np.int32), np.ones(3, np.float32)
)


@pytest.mark.parametrize("candidates", [BRANCHED, DraftTree.chain([4, 5]), DraftTree.chain([])])
def test_a_draft_with_a_window(candidates: DraftTree) -> None:
    both = with_window(candidates)
    size, rows = len(candidates.tokens), 5
    assert len(both.tokens) == size + rows and (both.window, both.asked) == (rows, 3)
    back = both.candidates()
    assert back.tokens.tolist() == candidates.tokens.tolist()
    assert back.parents.tolist() == candidates.parents.tolist() and back.window == 0
    assert both.best_path().tokens.tolist() == candidates.best_path().tokens.tolist()
    for n in range(len(both.tokens) + 1):
        part = both.prefix(n)
        assert part.window == max(n - size, 0) and part.asked == max(n - size - 2, 0)
    mask = visible(both.parents)
    assert not mask[size + 1 :, 1 : size + 1].any(), "the window sees none of the candidates"


def params(**changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "structured_outputs": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "bad_words": None,
            "min_tokens": 0,
            "logit_bias": None,
            "allowed_token_ids": None,
            "min_p": 0.0,
            "logprobs": None,
            "seed": None,
            "temperature": 0.0,
            **changes,
        }
    )


def test_windows_go_to_vllm_behind_the_drafts() -> None:
    """They take no part of what a request may draft, and chains have none."""
    trees = Trees()
    trees._usable = True
    draft = with_window(BRANCHED)
    of = {"a": params(), "b": params(min_tokens=3), "c": params()}
    lists = trees.lists([draft] * 3, ["a", "b", "c"], [3, 3, 0], of.__getitem__, 1000)
    assert lists == [draft.tokens.tolist(), [1, 3], []]
    assert trees.beyond == {"a": 5}
    assert dict(trees.counts["tree_fallbacks"]) == {"min_tokens": 1}
    assert trees.lists([draft], ["a"], [2], of.__getitem__, 1000) == [[1, 2]]
    assert trees.beyond == {}


def test_what_the_target_says_after_the_lowest_level() -> None:
    """Of the right rows, where other requests have logits beside them; none of those that were cut off."""
    draft, other = with_window(BRANCHED), with_window(DraftTree.chain([4]))
    scheduled = {"a": [7, 8], "b": draft.tokens.tolist(), "c": other.tokens.tolist()[:4]}
    index = {"a": 0, "b": 1, "c": 2}
    plan, _, _ = plan_step(
        {"b": draft, "c": other}, scheduled, index, np.array([3, 9, 5]), np.array([9, 20, 30])
    )
    assert plan is not None
    logits = torch.randn(17, 50, generator=torch.Generator().manual_seed(0))
    said = answers(plan, logits)
    assert set(said) == {1, 2}
    likeliest = logits.argmax(-1).tolist()
    assert said[1].tolist() == likeliest[9:12]
    assert said[2].tolist() == likeliest[16:17]
    plan.trees = [replace(tree, tree=tree.tree.candidates()) for tree in plan.trees]
    assert answers(plan, logits) == {}


@pytest.mark.parametrize(
    ("scheduled", "rows", "hits", "drafted", "beside"),
    [
        (30, 27, 1, 3, 27),
        (10, 27, 0, 3, 7),
        (2, 27, 2, 2, 0),
        (30, 27, 5, 5, 25),
        (30, 0, 1, 30, 0),
    ],
)
def test_rows_cost_time_and_are_no_drafts(
    monkeypatch: pytest.MonkeyPatch,
    scheduled: int,
    rows: int,
    hits: int,
    drafted: int,
    beside: int,
) -> None:
    """Of a draft of 30 tokens; the scheduler may cut it. A row that is accepted is a draft."""
    steering = Steering(
        ControllerConfig(),
        method="custom_class",
        self_paced=True,
        max_k=59,
        max_requests=2,
        asynchronous=False,
        prior=CostPrior(),
    )
    seen: list[dict[str, Any]] = []
    observe = steering.controller.observe
    monkeypatch.setattr(
        steering.controller,
        "observe",
        lambda ids, **told: (seen.append(told), observe(ids, **told)),
    )
    steering.add(SimpleNamespace(request_id="a", sampling_params=None))
    request = SimpleNamespace(
        num_output_tokens=1, num_computed_tokens=9, num_tokens=10, num_output_placeholders=0
    )
    for step in range(20):
        draft = list(range(30))
        steering.windows(["a"], [draft], {"a": rows} if rows else {})
        output = SimpleNamespace(
            scheduled_spec_decode_tokens={"a": draft[:scheduled]},
            num_scheduled_tokens={"a": 1 + scheduled},
            num_invalid_spec_tokens=None,
        )
        steering.scheduled(output, {"a": request}, float(step))
        before = steering.before_output(output)
        request.num_output_tokens += hits + 1
        steering.finished_step(output, [tuple(range(hits + 1))], {"a": 0}, before)
        steering.took(0)
    assert len(seen) == 20
    for told in seen:
        assert (told["drafted"], told["accepted"], told["beside"]) == ([drafted], [hits], beside)
    cost = steering.controller.cost
    assert cost.visits(1, 1 + scheduled) > 1 > cost.visits(1, 1 + scheduled // 2)
