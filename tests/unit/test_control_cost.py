"""The step time that is learned while serving."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.control import MEASURED_MS, SLOW_MS, step_seconds
from vllm_specx.control.cost import CostModel, CostPrior


def visit(
    cost: CostModel,
    steps: int,
    seed: int = 0,
    batches: tuple[int, ...] = (1, 4, 8, 16, 32),
    ks: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8),
    outliers: float = 0.03,
    factor: float = 1.0,
) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        batch, k = int(random.choice(batches)), int(random.choice(ks))
        seconds = factor * step_seconds(batch, batch * k) * float(random.lognormal(0, 0.03))
        if random.random() < outliers:
            seconds *= float(random.uniform(2, 100))
        cost.observe(batch, batch * (1 + k), seconds)


def errors(cost: CostModel, batches: tuple[int, ...], ks: tuple[int, ...]) -> np.ndarray:
    return np.array(
        [cost.time(b, b * (1 + k)) / step_seconds(b, b * k) - 1 for b in batches for k in ks]
    )


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_usable_after_fifty_steps(batch: int) -> None:
    for seed in range(4):
        cost = CostModel(32, 32 * 17)
        visit(cost, 50, seed, (batch,))
        off = errors(cost, (batch,), (0, 1, 2, 4, 6, 8))
        assert np.median(np.abs(off)) < 0.06
        assert np.abs(off).max() < 0.25


def test_the_whole_measured_surface() -> None:
    cost = CostModel(32, 32 * 17)
    visit(cost, 1500)
    off = errors(cost, (1, 4, 8, 16, 32), (0, 1, 2, 3, 4, 6, 8))
    assert np.median(np.abs(off)) < 0.03
    assert np.abs(off).max() < 0.15
    assert cost.error < 0.05


def test_sizes_between_those_that_were_seen() -> None:
    cost = CostModel(32, 32 * 17)
    visit(cost, 1500, batches=(1, 8, 32))
    assert np.abs(errors(cost, (4, 16), (0, 1, 2, 4))).max() < 0.35


def test_the_first_step_may_be_a_compilation() -> None:
    cost = CostModel(32, 32 * 17)
    cost.observe(1, 1, 30.0)
    visit(cost, 50, batches=(1,), outliers=0)
    assert np.abs(errors(cost, (1,), (0, 1, 2, 4))).max() < 0.15


def test_a_single_slow_step_of_a_new_size_is_not_believed() -> None:
    cost = CostModel(32, 32 * 17)
    visit(cost, 100, batches=(8,), ks=(0, 1, 2), outliers=0)
    before = cost.time(8, 40)
    cost.observe(8, 40, 20 * before)
    assert cost.time(8, 40) < 1.2 * before


def test_a_machine_that_becomes_slower_is_followed_everywhere() -> None:
    cost = CostModel(32, 32 * 17)
    visit(cost, 400, batches=(8,))
    visit(cost, 80, seed=9, batches=(8,), ks=(2, 3), factor=1.4)
    assert cost.time(8, 24) == pytest.approx(1.4 * step_seconds(8, 16), rel=0.06)
    assert cost.time(8, 8) == pytest.approx(1.4 * step_seconds(8, 0), rel=0.2)


def test_two_machines() -> None:
    for table in (MEASURED_MS, SLOW_MS):
        cost = CostModel(4, 4 * 33)
        random = np.random.default_rng(0)
        for _ in range(200):
            k = int(random.choice(list(table[1])))
            cost.observe(1, 1 + k, 1e-3 * table[1][k] * float(random.lognormal(0, 0.02)))
        for k, ms in table[1].items():
            assert 1000 * cost.time(1, 1 + k) == pytest.approx(ms, rel=0.08)


def test_draft_steps_are_told_from_verified_tokens() -> None:
    """A draft step costs 1 ms, a token 0.1 ms; K changes, so that the two can be told apart."""
    random = np.random.default_rng(0)
    cost = CostModel(8, 8 * 9, CostPrior(draft_step=0.0005))
    before = 0
    for _ in range(400):
        k = int(random.integers(0, 7))
        seconds = 0.010 + 1e-4 * (1 + before) + 1e-3 * k
        cost.observe(1, 1 + before, seconds * float(random.lognormal(0, 0.02)), draft_steps=k)
        before = k
    assert cost.draft_step(1) == pytest.approx(0.001, rel=0.2)
    assert cost.time(1, 5, 4) == pytest.approx(0.0145, rel=0.05)
    assert cost.times(1, [1, 5], [0, 4]).tolist() == pytest.approx([0.0101, 0.0145], rel=0.05)


def test_draft_steps_that_are_timed_are_known_at_once() -> None:
    """As many draft steps as tokens of the next step, and three times as dear as was thought: without their
    times it cannot be told which of the two costs."""
    random = np.random.default_rng(0)
    cost = CostModel(8, 8 * 9, CostPrior(draft_step=0.0004))

    def watch(batch: int, step: float, each: int) -> None:
        for _ in range(each):
            noise = float(random.lognormal(0, 0.02))
            spent = 4 * step * noise
            seconds = (0.010 + 1e-4 * (4 * batch + batch)) * noise + spent
            cost.observe(batch, 5 * batch, seconds, draft_steps=4, draft_seconds=spent)

    watch(1, 0.0012, 15)
    assert cost.draft_step(1) == pytest.approx(0.0012, rel=0.03)
    assert cost.time(1, 5, 4) == pytest.approx(0.0153, rel=0.03)
    assert cost.time(1, 5) == pytest.approx(0.0105, rel=0.03)
    cost.observe(1, 5, 0.1, draft_steps=4, draft_seconds=0.08)
    assert cost.draft_step(1) == pytest.approx(0.0012, rel=0.03), "one slow step"
    watch(8, 0.003, 15)
    assert cost.draft_step(8) == pytest.approx(0.003, rel=0.03)
    assert cost.draft_step(1) == pytest.approx(0.0012, rel=0.03)
    assert 0.0012 < cost.draft_step(4) < 0.003


def test_ragged_steps_have_their_price() -> None:
    cost = CostModel(8, 8 * 9)
    random = np.random.default_rng(0)
    for step in range(400):
        ragged = step % 2 == 0
        k = int(random.integers(1, 4))
        seconds = (
            step_seconds(8, 8 * k) * (1.2 if ragged else 1.0) * float(random.lognormal(0, 0.02))
        )
        cost.observe(8, 8 * (1 + k), seconds, ragged=ragged)
    assert cost.ragged == pytest.approx(1.2, rel=0.06)
    assert cost.time(8, 24, ragged=True) / cost.time(8, 24) == pytest.approx(cost.ragged)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 32), st.integers(0, 16), st.floats(1e-4, 10.0)),
        max_size=60,
    )
)
def test_more_tokens_never_take_less_time(steps: list[tuple[int, int, float]]) -> None:
    cost = CostModel(32, 32 * 17)
    for batch, k, seconds in steps:
        cost.observe(batch, batch * (1 + k), seconds)
    for batch in (1, 3, 8, 11, 32):
        times = cost.times(batch, np.arange(batch, batch * 17))
        assert (times > 0).all()
        assert np.isfinite(times).all()
        assert (np.diff(times) >= -1e-12).all()
        totals = np.array([batch, 2 * batch])
        assert (cost.times(batch, totals + 1) - cost.times(batch, totals) >= -1e-12).all()
        assert times[3] == pytest.approx(cost.time(batch, batch + 3))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_ignored(seconds: float) -> None:
    cost = CostModel(4, 40)
    cost.observe(1, 2, seconds)
    assert cost.observations == 0


def test_the_prior_follows_the_model() -> None:
    small, large = (CostPrior.from_model(b, on_gpu=True) for b in (2e9, 140e9))
    assert large.fixed > 10 * small.fixed
    assert large.token / large.fixed < 0.01
    assert CostPrior.from_model(2e9, on_gpu=False).token / small.fixed > small.token / small.fixed
    cpu = CostModel(4, 40, CostPrior.from_model(270e6, on_gpu=False))
    assert cpu.time(1, 5) > cpu.time(1, 1)


def test_caution_until_steps_without_drafts_are_known() -> None:
    """Three slow steps without drafts, and many with one: that one token does not look free."""
    cost = CostModel(32, 32 * 33)
    random = np.random.default_rng(0)
    for n in (5, 9, 2, 7, 12, 3) * 20:
        cost.observe(1, 1 + n, (0.030 + 0.002 * n) * float(random.lognormal(0, 0.02)))
    for _ in range(3):
        cost.observe(4, 4, 0.0385)
    for _ in range(40):
        cost.observe(4, 5, 0.038 * float(random.lognormal(0, 0.02)))
    known = cost.times(4, 4 + np.arange(9.0))
    assert known[1] - known[0] < 0.001
    told = cost.cautious(4, 8)
    assert told[0] == known[0]
    assert 0.001 < told[1] - told[0] < 0.003
    assert (told >= known).all()
    for _ in range(12):
        cost.observe(4, 4, 0.0378 * float(random.lognormal(0, 0.02)))
    assert cost.cautious(4, 8)[:2] == pytest.approx(cost.times(4, [4, 5]))


@pytest.mark.parametrize("batch", [8, 32])
def test_what_the_first_draft_token_of_a_batch_costs_is_kept_apart(batch: int) -> None:
    """A jump between no draft token and one, as where a matrix product needs one more tile."""
    cost = CostModel(32, 32 * 33)
    random = np.random.default_rng(0)
    jump = 0.006
    for _ in range(60):
        for n in (0, 1, 2, 4):
            seconds = 0.040 + 0.001 * n + (jump if n else 0.0)
            cost.observe(batch, batch + n, seconds * float(random.lognormal(0, 0.02)))
    first = float(np.diff(cost.times(batch, [batch, batch + 1]))[0])
    assert first == pytest.approx(0.001 + jump, abs=0.0015)


def test_a_size_that_was_only_seen_while_something_slowed_it_is_not_believed_for_ever() -> None:
    """Steps with drafts were slow when they were measured, and so there are none any more."""
    cost = CostModel(32, 32 * 6)
    visit(cost, 100, batches=(1,), ks=(0,))
    for _ in range(40):
        visit(cost, 1, batches=(1,), ks=(2,), factor=2.5)
        visit(cost, 1, batches=(1,), ks=(0,))
    taken_for = cost.time(1, 3) / step_seconds(1, 2)
    assert taken_for > 1.5
    visit(cost, 1500, seed=1, batches=(1,), ks=(0,), outliers=0.0)
    later = cost.time(1, 3) / step_seconds(1, 2)
    assert later - 1 < 0.5 * (taken_for - 1)
    visit(cost, 40, seed=2, batches=(1,), ks=(2,), outliers=0.0)
    assert cost.time(1, 3) == pytest.approx(step_seconds(1, 2), rel=0.1)
