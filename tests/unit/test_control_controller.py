"""The choice of K: against brute force, under noise, over time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.control import best_static, plain_rate, run, step_seconds
from vllm_specx.control.acceptance import ACCEPT
from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostPrior
from vllm_specx.control.policy import Rule, rule_for
from vllm_specx.control.settings import ControllerConfig

ALWAYS = ControllerConfig(per_request="always", probe_share=0.0, hysteresis=0.0)


def taught(
    survival: Any,
    max_k: int,
    config: ControllerConfig = ALWAYS,
    draft_step: float = 0.0,
    **options: Any,
) -> tuple[Controller, list[str]]:
    """A controller that knows the step times and each request's acceptance: survival [B, max_k]."""
    survival = np.asarray(survival, float)
    batch = len(survival)
    options.setdefault("varying", False)
    controller = Controller(
        config, max_k, max_requests=8, prior=CostPrior(draft_step=draft_step), **options
    )
    random = np.random.default_rng(0)
    for _ in range(300):
        drafts = int(random.integers(0, batch * max_k + 1))
        steps = int(random.integers(0, max_k + 1))
        seconds = step_seconds(batch, drafts) + draft_step * steps
        controller.cost.observe(batch, batch + drafts, seconds, steps)
    ids = [f"r{i}" for i in range(batch)]
    for request_id in ids:
        controller.add(request_id)
    slots = controller._find(ids)
    controller.acceptance.survival[slots] = survival[:, None]
    controller.acceptance.expected[slots, :, 1:] = survival.cumsum(1)[:, None]
    return controller, ids


def goodput(controller: Controller, survival: Any, k: Any) -> float:
    survival, k = np.asarray(survival), np.asarray(k)
    batch, depth = survival.shape
    tokens = batch + (survival * (np.arange(depth) < k[:, None])).sum()
    return float(tokens / controller.cost.time(batch, batch + int(k.sum()), int(k.max())))


def brute_force(controller: Controller, survival: Any) -> float:
    batch, depth = np.asarray(survival).shape
    every = itertools.product(range(depth + 1), repeat=batch)
    return max(goodput(controller, survival, k) for k in every)


survivals = st.integers(1, 3).flatmap(
    lambda batch: st.lists(
        st.lists(st.floats(0.02, 1.0), min_size=5, max_size=5), min_size=batch, max_size=batch
    )
)


@settings(max_examples=50, deadline=None)
@given(survivals, st.sampled_from([0.0, 0.0004, 0.002, 0.01]))
def test_the_best_of_all_k_vectors(rates: list[list[float]], draft_step: float) -> None:
    survival = np.cumprod(rates, axis=1)
    controller, ids = taught(survival, 5, draft_step=draft_step)
    k = controller.decide(ids).k
    assert goodput(controller, survival, k) >= 0.999 * brute_force(controller, survival)


@pytest.mark.parametrize(
    "rates",
    [
        [[0.8] * 5, [0.8] * 5],
        [[0.7, 0.5, 0.3, 0.2, 0.1]],
        [[0.95] * 5, [0.1] * 5, [0.95] * 5],
        [[0.02] * 5] * 3,
    ],
)
def test_known_shapes_and_both_other_modes(rates: list[list[float]]) -> None:
    survival = np.cumprod(rates, axis=1)
    controller, ids = taught(survival, 5)
    best = brute_force(controller, survival)
    assert goodput(controller, survival, controller.decide(ids).k) == pytest.approx(best, rel=1e-3)
    auto, ids = taught(survival, 5, ControllerConfig(probe_share=0.0, hysteresis=0.0))
    assert goodput(auto, survival, auto.decide(ids).k) >= 0.985 * best
    uniform, ids = taught(survival, 5, ALWAYS.model_copy(update={"per_request": "never"}))
    decision = uniform.decide(ids)
    ks = [goodput(uniform, survival, np.full(len(rates), k)) for k in range(6)]
    assert len(set(decision.k.tolist())) == 1
    assert decision.uniform
    assert ks[decision.uniform_k] == pytest.approx(max(ks), rel=1e-6)


def test_two_populations_get_two_k() -> None:
    survival = np.cumprod([[0.95] * 6, [0.05] * 6] * 4, axis=1)
    controller, ids = taught(survival, 6)
    k = controller.decide(ids).k
    assert k[::2].min() >= 3
    assert k[1::2].max() == 0


def test_ragged_prices_lead_to_one_k() -> None:
    survival = np.cumprod([[0.9] * 6, [0.7] * 6] * 2, axis=1)
    config = ControllerConfig(probe_share=0.0, hysteresis=0.0)
    controller, ids = taught(survival, 6, config)
    controller.cost._ragged = float(np.log(1.5))
    decision = controller.decide(ids)
    assert decision.uniform
    assert len(set(decision.k.tolist())) == 1


def test_limits_opt_outs_and_fixed_k() -> None:
    survival = np.cumprod([[0.95] * 6] * 4, axis=1)
    controller, ids = taught(survival, 6)
    controller.add("r0", Rule(fixed_k=0))
    controller.add("r1", Rule(fixed_k=2))
    assert controller.decide(ids, limits=[9, 9, 3, -4]).k.tolist() == [0, 2, 3, 0]
    assert controller.decide(ids, limits=[9, 1, 9, 9]).k.tolist()[:2] == [0, 1]


def test_static_disabled_and_bounds() -> None:
    assert Controller(ControllerConfig(static_k=3), 8).decide(["a", "b"]).k.tolist() == [3, 3]
    off = Controller(ControllerConfig(enabled=False), 8)
    off.add("b", Rule(fixed_k=0))
    assert off.decide(["a", "b"]).k.tolist() == [8, 0]
    survival = np.cumprod([[0.02] * 6] * 2, axis=1)
    low, ids = taught(survival, 6, ControllerConfig(k_min=2, probe_share=0.0))
    assert low.decide(ids).k.tolist() == [2, 2]
    high = Controller(ControllerConfig(k_max=4, probe_share=0.0), 6, varying=False)
    done = run(2, lambda step: np.full(6, 0.99), 60, controller=high, max_k=6)
    assert np.max(done.ks) == 4
    assert Controller(ControllerConfig(), 8).decide([]).k.shape == (0,)


@pytest.mark.parametrize("varying", [True, False])
def test_drafts_that_are_there_already_are_cut_where_they_do_not_pay(varying: bool) -> None:
    survival = np.cumprod([[0.95] * 6, [0.1] * 6] * 4, axis=1)
    controller, ids = taught(survival, 6, varying=varying)
    k = controller.decide(ids, offered=[6, 6, 0, 6, 2, 6, 6, 6]).k
    assert k[[0, 4]].tolist() == [k[0], 2]
    assert k[0] >= 3
    assert k[2] == 0
    assert k[[1, 3, 5, 7]].max() == 0
    sure = np.ones((8, 6))
    assert controller.decide(ids, offered=[6] * 8, promise=sure).k.sum() > k.sum()


def test_what_the_proposer_promises_is_calibrated() -> None:
    controller = Controller(ControllerConfig(), 6, varying=True)
    ids = ["a", "b"]
    for _ in range(100):
        decision = controller.decide(ids, offered=[6, 6], promise=np.full((2, 6), 0.9))
        k = decision.k
        controller.observe(
            ids,
            drafted=k,
            accepted=[0, 0],
            offered=[6, 6],
            allowed=[6, 6],
            seconds=0.02 + 0.002 * int(k.sum()),
        )
    assert decision.k.sum() <= 2
    assert controller.steps == 100


def test_starting_k_until_there_is_evidence() -> None:
    controller = Controller(ControllerConfig(probe_share=0.0), 16, varying=False)
    for name in ("code", "reasoning", "creative"):
        controller.add(name, rule_for({"specx_scenario": name}, 0.0, 16))
    k = dict(
        zip(
            ("code", "reasoning", "creative"),
            controller.decide(["code", "reasoning", "creative"]).k.tolist(),
            strict=True,
        )
    )
    assert k["code"] <= 5
    assert k["reasoning"] <= 3
    assert k["creative"] <= 1
    done = run(1, lambda step: np.full(16, 0.97), 60, controller=controller)
    assert done.ks[-1][0] > 5


CELLS = [(b, a) for b in (1, 4, 8, 16, 32) for a in (0.15, 0.4, 0.6, 0.8, 0.92)]


def cell(batch: int, rate: float, steps: int = 1000, **options: Any) -> tuple[float, float]:
    rates = np.full(16, rate)
    done = run(batch, lambda step: rates, steps, seed=batch, **options)
    return done.rate / plain_rate(batch), done.rate / best_static(batch, rates)[1]


@pytest.mark.parametrize("uniform", [False, True])
def test_never_slower_than_none_and_rarely_than_the_best_static(uniform: bool) -> None:
    found = {(b, a): cell(b, a, uniform=uniform) for b, a in CELLS}
    assert {c: r for c, r in found.items() if r[0] < 0.98} == {}
    assert {c: r for c, r in found.items() if r[1] < 0.95} == {}
    assert sum(r[1] < 0.975 for r in found.values()) <= len(found) // 5


def test_never_slower_where_drafting_costs() -> None:
    """A draft step of a tenth of a plain step, acceptance that falls with depth."""
    for batch in (1, 8):
        for first in (0.1, 0.5, 0.85):
            rates = first * 0.9 ** np.arange(8)
            cost = 0.1 * step_seconds(1, 0)
            done = run(
                batch,
                lambda step, rates=rates: rates,
                1200,
                max_k=8,
                draft_step=cost,
                prior=CostPrior(draft_step=0.0008),
            )
            assert done.rate >= 0.98 * plain_rate(batch)
            assert done.rate >= 0.95 * best_static(batch, rates, 8, draft_step=cost)[1]


@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("uniform", [False, True])
def test_no_flapping_under_steady_load(batch: int, uniform: bool) -> None:
    for rate in (0.3, 0.55, 0.8):
        done = run(batch, lambda step, rate=rate: np.full(16, rate), 700, seed=3, uniform=uniform)
        late = [i for i in done.steady_changes() if i >= 100]
        for start in range(100, 700, 100):
            assert sum(start <= i < start + 100 for i in late) <= 10  # 5 and what was saved before
        assert len(late) <= 30


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0.05, 0.9), (0.9, 0.05), (0.5, 0.95)])
def test_a_change_of_work_is_followed_within_thirty_steps(
    batch: int, uniform: bool, before: float, after: float
) -> None:
    """30 steps after the change, the choice is worth 0.85 of the best one."""
    good = 0
    for seed in range(4):
        done = run(
            batch,
            lambda step: np.full(16, before if step < 400 else after),
            440,
            seed=seed,
            uniform=uniform,
        )
        k = [k for k, probe in zip(done.ks[430:], done.probes[430:], strict=True) if not probe][-1]
        rates = np.cumprod(np.full(16, after))
        tokens = batch + sum(rates[:x].sum() for x in k)
        best = best_static(batch, np.full(16, after))[1]
        good += tokens / step_seconds(batch, float(k.sum())) >= 0.85 * best
    assert good >= 3


def test_probing_is_bounded() -> None:
    for batch in (1, 8, 32):
        controller = Controller(ControllerConfig(), 16, varying=False)
        rates = np.full(16, 0.02)
        done = run(
            batch, lambda step, rates=rates: rates, 2000, controller=controller, count_from=200
        )
        late = controller.stats()
        assert late["probes"] > 0
        assert late["probe_share"] <= 0.0105
        assert done.rate >= 0.98 * plain_rate(batch)
    silent = Controller(ControllerConfig(probe_share=0.0), 16, varying=False)
    run(8, lambda step: np.full(16, 0.02), 300, controller=silent)
    assert silent.probes == 0


def test_batch_goes_up_and_down() -> None:
    controller = Controller(ControllerConfig(), 16, varying=False)
    rates = np.full(16, 0.75)
    chosen = {}
    for batch in (1, 8, 32, 8, 1):
        done = run(
            batch, lambda step: rates, 300, controller=controller, seed=batch, count_from=100
        )
        chosen[batch] = float(np.mean(done.ks[-1]))
        assert done.rate >= 0.95 * best_static(batch, rates)[1]
    assert chosen[1] > chosen[32]


def test_the_same_inputs_give_the_same_choices() -> None:
    runs = [
        run(
            4,
            lambda step: np.full(16, 0.7),
            300,
            controller=Controller(ControllerConfig(), 16, varying=False),
        )
        for _ in range(2)
    ]
    assert [k.tolist() for k in runs[0].ks] == [k.tolist() for k in runs[1].ks]


def test_prefill_steps_teach_acceptance_and_no_time() -> None:
    controller = Controller(ControllerConfig(), 8, varying=False)
    ids = ["a"]
    for _ in range(60):
        k = controller.decide(ids).k
        controller.observe(ids, drafted=k, accepted=k, seconds=5.0, pure_decode=False)
    assert controller.cost.observations == 0
    slot = controller._find(ids)
    assert controller.acceptance.survival[slot, ACCEPT, 0] > 0.9


def test_requests_come_go_and_return() -> None:
    """Ids that were never added, removed twice, seen after their end; more requests than slots."""
    controller = Controller(ControllerConfig(), 8, max_requests=300, varying=True)
    random = np.random.default_rng(0)
    alive = [f"r{i}" for i in range(200)]
    for step in range(120):
        if step % 3 == 0:
            gone = alive.pop(int(random.integers(len(alive))))
            controller.remove(gone)
            controller.remove(gone)
            alive.append(f"n{step}")
        batch = [alive[i] for i in sorted(random.choice(len(alive), 20, replace=False))]
        k = controller.decide(batch).k
        offered = np.minimum(k, random.integers(0, 9, 20))
        hits = np.minimum(offered, random.integers(0, 9, 20))
        controller.observe(
            batch,
            drafted=offered,
            accepted=hits,
            offered=offered,
            allowed=k,
            seconds=0.02,
            kept=np.minimum(hits + 1, random.integers(0, 9, 20)),
        )
    assert len(controller._slots) <= 200
    assert np.isfinite(controller.acceptance.survival).all()


def test_trace_explains_each_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    config = ControllerConfig(trace=str(path))
    traced = Controller(config, 16, varying=False)
    done = run(3, lambda step: np.full(16, 0.7), 150, controller=traced)
    traced.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert [line["drafted"] for line in lines] == [k.tolist() for k in done.ks]
    late = lines[50:]
    time_error = np.median([abs(x["expected_seconds"] / x["seconds"] - 1) for x in late])
    tokens = sum(x["tokens"] for x in late)
    assert time_error < 0.1
    assert abs(sum(x["expected_tokens"] for x in late) / tokens - 1) < 0.1
    plain = run(
        3,
        lambda step: np.full(16, 0.7),
        150,
        controller=Controller(ControllerConfig(), 16, varying=False),
    )
    assert [k.tolist() for k in plain.ks] == [k.tolist() for k in done.ks]


@pytest.mark.parametrize("varying", [True, False])
def test_what_uneven_steps_cost_is_part_of_what_is_foreseen(varying: bool, tmp_path: Path) -> None:
    """Steps that verify one draft token of eight requests are a tenth slower than plain ones."""
    trace = tmp_path / "trace.jsonl"
    controller = Controller(ControllerConfig(trace=str(trace)), 4, varying=varying)
    ids = [str(i) for i in range(8)]
    for step in range(300):
        drafted = np.zeros(8, np.int64)
        drafted[step % 8] = step % 2
        controller.decide(ids)
        seconds = 0.050 if step % 2 else 0.045
        controller.observe(ids, drafted=drafted, accepted=np.zeros(8, np.int64), seconds=seconds)
    controller.close()
    plain, one = controller.cost.times(8, [8, 9], ragged=[False, not varying])
    assert plain == pytest.approx(0.045, rel=0.02)
    assert one == pytest.approx(0.050, rel=0.02)
    lines = [json.loads(line) for line in trace.read_text().splitlines()][100:]
    for line in lines:
        assert line["expected_seconds"] == pytest.approx(line["seconds"], rel=0.03)
