"""Who drafts: the n-gram lookahead or the trained draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from vllm_specx.config import AutoConfig, ConfigError, NgramConfig, parse
from vllm_specx.draft import gate
from vllm_specx.draft.auto import AutoDrafter
from vllm_specx.draft.gate import _PROBE_AFTER, _PROBE_SELDOM, _PROBE_STEPS, _PROBED, agreeing
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.paced import PacedDrafter
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.prospects import Prospects
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree

DEPTH = 4
COSTS = 1.0 + 0.02 * np.arange(64)
"""Memory-bound: verifying is nearly free."""


class Oracle:
    """Knows the texts; drafts as much as it is asked for, or `most`, every token wrong if told so."""

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = False
    depth: ClassVar[int] = DEPTH

    def __init__(
        self, texts: dict[str, list[int]], wrong: bool, acceptance: Sequence[float], most: int
    ) -> None:
        self.texts, self.wrong, self.most = texts, wrong, most
        self.acceptance = acceptance
        self.stops_early = most < DEPTH
        self.draft_steps = 0
        self.missed: tuple[str, ...] = ()
        self.asked: list[list[int]] = []

    def forwards(self, depth: int) -> int:
        return depth

    def propose(self, context: DraftContext) -> list[DraftTree]:
        self.asked.append(context.budgets.tolist())
        self.draft_steps = int(context.budgets.max())
        drafts = []
        for request, n, budget in zip(
            context.request_ids, context.num_tokens, context.budgets, strict=True
        ):
            last = int(n) + min(int(budget), self.most)
            following = np.array(self.texts[request][int(n) : last], np.int32)
            drafts.append(DraftTree.chain(following + self.wrong) if budget else EMPTY_DRAFT)
        return drafts


def decode(
    texts: dict[str, list[int]],
    *,
    wrong: bool = False,
    acceptance: Sequence[float] = (0.7,),
    costs: np.ndarray | None = COSTS,
    step_share: float = 0.1,
    begin: int = 20,
    cut: int = 64,
    most: int = DEPTH,
    alone: bool = False,
) -> tuple[Oracle, list[list[DraftTree]]]:
    """Decode the texts in a batch, as a target does that says them; all drafts by step. cut: tokens
    of a draft that are verified at most. step_share: what a forward of the draft costs, in steps. alone:
    without an n-gram lookahead."""
    oracle = Oracle(texts, wrong, acceptance, most)
    drafter: PacedDrafter | AutoDrafter = PacedDrafter(oracle, DEPTH)
    if not alone:
        ngram = NgramLookahead(NgramConfig(), len(texts), max_model_len=600, max_draft=16)
        drafter = AutoDrafter(ngram, oracle, depth=DEPTH)
    names = list(texts)
    token_ids = np.zeros((len(names), 600), np.int32)
    for row, name in enumerate(names):
        token_ids[row, : len(texts[name])] = texts[name]
    length = {name: begin for name in names}
    sampled = {name: [texts[name][begin - 1]] for name in names}
    made = []
    while all(length[name] + 24 < len(texts[name]) for name in names):
        num = np.array([length[name] for name in names], np.int32)
        drafts = drafter.propose(
            DraftContext(
                request_ids=names,
                rows=np.arange(len(names), dtype=np.int32),
                token_ids=token_ids,
                num_tokens=num,
                num_prompt_tokens=np.full(len(names), begin - 1, np.int32),
                sampled=[sampled[name] for name in names],
                budgets=np.full(len(names), 16, np.int32),
                temperatures=np.zeros(len(names), np.float32),
                pools=[None] * len(names),
                finished=[],
                vocab_size=50_000,
                costs=costs,
                draft_cost=None if costs is None else step_share * float(costs[0]),
            )
        )
        made.append(drafts)
        for name, draft in zip(names, drafts, strict=True):
            text, n = texts[name], length[name]
            right = agreeing(draft.tokens[:cut], text[n:])
            sampled[name] = text[n : n + right + 1]
            length[name] = n + right + 1
    return oracle, made


def fresh(count: int = 400, seed: int = 0) -> list[int]:
    """Text in which nothing comes back."""
    return np.random.default_rng(seed).permutation(40_000)[:count].tolist()


def repeating(count: int = 400) -> list[int]:
    """Text that goes round."""
    return (list(range(100, 130)) * 40)[:count]


def test_a_long_match_needs_no_trained_draft() -> None:
    oracle, made = decode({"r": repeating()}, begin=70)
    assert sum(any(asked) for asked in oracle.asked[2:]) <= len(oracle.asked) // 10
    assert np.mean([len(drafts[0].tokens) for drafts in made]) > 8


def test_new_text_is_the_trained_drafts() -> None:
    oracle, made = decode({"r": fresh()})
    assert all(any(asked) for asked in oracle.asked)
    assert [len(drafts[0].tokens) for drafts in made][-5:] == [DEPTH] * 5


def test_what_was_not_verified_is_no_evidence_against_the_draft() -> None:
    """Drafts that are always right, of which the scheduler has one token verified."""
    oracle, _ = decode({"r": fresh()}, cut=1)
    assert min(asked[0] for asked in oracle.asked[-5:]) > 2


def test_each_request_has_its_own_source() -> None:
    oracle, _ = decode({"new": fresh(), "again": repeating()}, begin=70, step_share=0.02)
    later = np.array(oracle.asked[5:])
    assert (later[:, 0] > 0).mean() > 0.9
    assert (later[:, 1] > 0).mean() < 0.2


@pytest.mark.parametrize("alone", [False, True])
def test_a_trained_draft_that_is_always_wrong_is_left_alone_but_for_probes(alone: bool) -> None:
    oracle, _ = decode({"r": fresh(600)}, wrong=True, alone=alone)
    asked = [budgets[0] for budgets in oracle.asked]
    late = asked[100:]
    assert 0 < sum(n > 0 for n in late) <= (len(late) // _PROBE_AFTER + 1) * _PROBE_STEPS


def test_what_never_pays_is_tried_less_and_less() -> None:
    oracle, _ = decode({"r": fresh(590)}, wrong=True, alone=True)
    tried = np.flatnonzero([budgets[0] > 0 for budgets in oracle.asked])
    pauses = [int(gap) for gap in np.diff(tried) if gap > 1]
    assert pauses == sorted(pauses)
    assert pauses[0] <= _PROBE_AFTER + 1 and pauses[-1] == _PROBE_SELDOM + 1


def test_probes_are_of_a_few_requests_and_of_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_PROBE_SELDOM", _PROBE_AFTER)
    oracle, _ = decode({str(n): fresh(580, n) for n in range(16)}, wrong=True, alone=True)
    probes = np.array([asked for asked in oracle.asked[60:] if any(asked)]) > 0
    assert len(probes) >= 8
    assert (probes.sum(1) == 16 // _PROBED).all()
    assert (probes[:_PROBE_STEPS] == probes[0]).all(), "some steps in a row"
    assert probes[: _PROBED * _PROBE_STEPS].any(0).all()


def test_a_draft_that_ends_early_is_judged_by_what_it_makes() -> None:
    """It is always right, but says one token of the four it is asked for: dear forwards do not pay."""
    for share, pays in ((0.1, True), (0.7, False)):
        oracle, _ = decode({"r": fresh(600)}, most=1, step_share=share, alone=True)
        late = [budgets[0] > 0 for budgets in oracle.asked[50:]]
        assert (np.mean(late) > 0.9) == pays


def test_alone_it_drafts_always_until_costs_are_known() -> None:
    oracle, _ = decode({"r": fresh(200)}, wrong=True, alone=True, costs=None)
    assert all(asked == [DEPTH] for asked in oracle.asked)


def test_a_dear_draft_must_promise_more() -> None:
    for share, expected in ((0.02, True), (1.5, False)):
        oracle, _ = decode({"r": fresh(200)}, acceptance=(0.3,), step_share=share, begin=20)
        assert (oracle.asked[0][0] > 0) == expected


def test_nothing_is_asked_where_verifying_is_dear() -> None:
    steep = 1.0 + 1.2 * np.arange(64)
    oracle, _ = decode({"r": fresh(200)}, acceptance=(0.5,), costs=steep)
    assert oracle.asked[0] == [0]


def test_prospects_follow_what_happens() -> None:
    prospects = Prospects(3, (0.6, 0.5))
    made, accepted = prospects.reach(["a"])
    assert made[0] == pytest.approx([1.0, 1.0, 1.0])
    assert accepted[0] == pytest.approx([0.6, 0.3, 0.15])
    always = np.array([[3, 3], [3, 1], [3, 0], [0, 1]])
    for _ in range(40):
        prospects.learn(["a", "b"], *always)
    made, reach = prospects.reach(["a", "b", "c"])
    assert made[1, 0] > 0.9 and made[1, 1] < 0.16 and made[0, 2] > 0.88
    assert reach[0, 2] > 0.6
    assert reach[1, 0] < 0.15
    assert reach[1, 0] < reach[2, 0] < reach[0, 0]
    for n in range(20):
        prospects.learn([f"other {n}"], *always[:, :1])
    assert prospects.reach(["b"])[1][0, 0] < 0.2, "more requests than there was room for"
    deep = Prospects(8)
    for n in range(12):
        deep.learn([f"{n}"], *np.array([[2], [2], [2], [0]]))
    assert deep.reach(["new"])[1][0, 7] > 0.2, "a draft that is always right, seen two deep"
    prospects.forget(["a", "b"])
    assert (prospects.reach(["a"])[1] == prospects.reach(["c"])[1]).all()


def test_accepted_tokens_of_a_chain() -> None:
    assert agreeing(np.array([1, 2, 3]), [1, 2, 9]) == 2
    assert agreeing(np.array([1, 2, 3]), [1, 2, 3, 4]) == 3
    assert agreeing(np.array([1, 2, 3]), [1]) == 1
    assert agreeing(np.array([], np.int32), [1]) == 0


def test_the_configuration_has_both_parts() -> None:
    settings = parse(
        {"proposer": "auto", "heads": "x", "vocab": 100, "pool": "off", "max_match": 8}
    )
    assert isinstance(settings, AutoConfig)
    assert settings.ngram().max_match == 8 and not settings.ngram().pool.enabled
    assert settings.eagle().vocab == settings.medusa().vocab == 100
    for broken, said in (
        ({"min_match": 9, "max_match": 8}, "min_match 9"),
        ({"aux_layers": [3, 2]}, "ascending"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse({"proposer": "auto", "heads": "x", **broken})
