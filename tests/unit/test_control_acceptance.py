"""Estimates of acceptance: what counts as evidence, and what is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.control.acceptance import (
    ACCEPT,
    MAX_POOLS,
    OFFER,
    PROGRESS,
    AcceptanceModel,
    evidence,
)

DEPTH = 6


def one(**given_: int) -> tuple[list[int], list[bool]]:
    names = ("drafted", "accepted", "kept", "offered", "allowed", "beyond")
    arrays = [np.array([given_[n]]) if n in given_ else None for n in names]
    if arrays[2] is None:
        arrays[2] = np.array([given_["accepted"] + 1])
    shown = evidence(*arrays)  # type: ignore[arg-type]
    return shown.last[0].tolist(), shown.failed[0].tolist()


@pytest.mark.parametrize(
    ("step", "last", "failed"),
    [
        ({"drafted": 5, "accepted": 2}, 3, True),
        ({"drafted": 5, "accepted": 5}, 5, False),
        ({"drafted": 5, "accepted": 0}, 1, True),
        ({"drafted": 0, "accepted": 0}, 0, False),
        # The request ended with its second accepted token: the third is no evidence.
        ({"drafted": 5, "accepted": 3, "kept": 2}, 2, False),
        # It ended with the token that replaced the third.
        ({"drafted": 5, "accepted": 2, "kept": 3}, 3, True),
        ({"drafted": 5, "accepted": 0, "kept": 0}, 0, False),
        # Cut to two, and what came next was what had been cut, or was not.
        ({"drafted": 2, "accepted": 2, "beyond": 1}, 3, False),
        ({"drafted": 2, "accepted": 2, "beyond": 0}, 3, True),
        ({"drafted": 2, "accepted": 2, "beyond": -1}, 2, False),
        ({"drafted": 0, "accepted": 0, "beyond": 0}, 1, True),
        # Rejected within: nothing is known of what lies beyond.
        ({"drafted": 2, "accepted": 1, "beyond": 1}, 2, True),
    ],
)
def test_what_is_evidence_of_acceptance(step: dict[str, int], last: int, failed: bool) -> None:
    assert one(**step) == ([last], [failed])


@pytest.mark.parametrize(
    ("step", "last", "failed"),
    [
        # Allowed 8, drafted 3, all accepted: a fourth was not offered.
        ({"drafted": 3, "accepted": 3, "offered": 3, "allowed": 8}, [3, 4, 4], [False, True, True]),
        ({"drafted": 3, "accepted": 1, "offered": 3, "allowed": 8}, [2, 4, 2], [True, True, True]),
        ({"drafted": 0, "accepted": 0, "offered": 0, "allowed": 8}, [0, 1, 1], [False, True, True]),
        ({"drafted": 0, "accepted": 0, "offered": 0, "allowed": 0}, [0, 0, 0], [False] * 3),
        ({"drafted": 8, "accepted": 8, "offered": 8, "allowed": 8}, [8, 8, 8], [False] * 3),
        # A grammar cut a draft of six to two: the proposer did offer six.
        (
            {"drafted": 2, "accepted": 2, "offered": 6, "allowed": 8},
            [2, 7, 2],
            [False, True, False],
        ),
        # The request ended within the draft.
        (
            {"drafted": 3, "accepted": 3, "kept": 2, "offered": 3, "allowed": 8},
            [2, 4, 2],
            [False, True, False],
        ),
    ],
)
def test_what_is_evidence_of_drafting(
    step: dict[str, int], last: list[int], failed: list[bool]
) -> None:
    assert one(**step) == (last, failed)


def feed(
    model: AcceptanceModel, slots: list[int], k: int, rates: np.ndarray, steps: int, seed: int = 0
) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chance = np.broadcast_to(rates, (len(slots), len(rates)))
        hits = np.minimum((random.random(chance.shape) < chance).cumprod(1).sum(1), k)
        drafted = np.full(len(slots), k)
        offered = drafted if model.chains == 3 else None
        model.learn(np.array(slots), evidence(drafted, hits, hits + 1, offered, offered))


def model(varying: bool = False) -> AcceptanceModel:
    made = AcceptanceModel(DEPTH, varying)
    made.start(0, 0)
    return made


@pytest.mark.parametrize(
    "rates", [[0.8] * DEPTH, [0.6, 0.5, 0.4, 0.3, 0.3, 0.3], [0.5, 0.7, 0.9] * 2]
)
def test_constant_falling_and_rising_acceptance_is_found(rates: list[float]) -> None:
    errors = []
    for seed in range(8):
        found = model()
        feed(found, [0], DEPTH, np.array(rates), 300, seed)
        errors.append(found.survival[0, ACCEPT, :3] - np.cumprod(rates)[:3])
    assert np.abs(np.mean(errors, 0)).max() < 0.06


def test_a_depth_that_was_not_drafted_is_no_evidence_and_follows_the_others() -> None:
    good, bad = model(), model()
    feed(good, [0], 2, np.full(DEPTH, 0.95), 100)
    feed(bad, [0], 2, np.full(DEPTH, 0.2), 100)
    rate_good = good.survival[0, ACCEPT, 5] / good.survival[0, ACCEPT, 4]
    rate_bad = bad.survival[0, ACCEPT, 5] / bad.survival[0, ACCEPT, 4]
    assert rate_good > 0.85
    assert rate_bad < 0.45


def test_a_new_request_starts_from_its_pool_and_not_from_one() -> None:
    found = model()
    before = found.survival[0, ACCEPT, 0]
    assert 0.4 < before < 0.8
    code, prose = found.pool("code"), found.pool("prose")
    found.start(1, code)
    found.start(2, prose)
    feed(found, [1], 4, np.full(DEPTH, 0.9), 100)
    feed(found, [2], 4, np.full(DEPTH, 0.2), 100)
    found.start(3, code)
    found.start(4, prose)
    assert found.survival[3, ACCEPT, 0] > 0.75
    assert found.survival[4, ACCEPT, 0] < 0.4
    found.start(5, found.pool("other"))
    assert (
        found.survival[4, ACCEPT, 0] < found.survival[5, ACCEPT, 0] < found.survival[3, ACCEPT, 0]
    )


def test_a_reused_slot_remembers_nothing_of_its_own() -> None:
    found = model()
    feed(found, [0], 4, np.full(DEPTH, 0.95), 200)
    found.start(1, found.pool("fresh"))
    fresh = found.survival[1].copy()
    found.start(0, found.pool("fresh"))
    assert np.array_equal(found.survival[0], fresh)


def test_two_populations_in_one_batch_are_told_apart() -> None:
    found = AcceptanceModel(DEPTH, varying=False)
    slots = list(range(8))
    for slot in slots:
        found.start(slot, 0)
    rates = np.repeat([[0.9], [0.25]], 4, axis=0) * np.ones(DEPTH)
    random = np.random.default_rng(3)
    for _ in range(40):
        hits = np.minimum((random.random(rates.shape) < rates).cumprod(1).sum(1), 3)
        found.learn(np.array(slots), evidence(np.full(8, 3), hits, hits + 1))
    first = found.survival[:8, ACCEPT, 0]
    assert first[:4].min() > 0.7
    assert first[4:].max() < 0.5


def test_equal_requests_are_pooled() -> None:
    """The spread of equal requests' estimates is less than their own evidence would make it."""
    found = AcceptanceModel(DEPTH, varying=False)
    slots = list(range(16))
    for slot in slots:
        found.start(slot, 0)
    feed(found, slots, 3, np.full(DEPTH, 0.6), 60)
    assert found.survival[:16, ACCEPT, 0].std() < 0.05


def test_a_change_is_followed_within_a_few_drafts() -> None:
    found = model()
    feed(found, [0], 4, np.full(DEPTH, 0.1), 300)
    assert found.survival[0, ACCEPT, 0] < 0.2
    feed(found, [0], 4, np.full(DEPTH, 0.95), 10)
    assert found.survival[0, ACCEPT, 0] > 0.6
    feed(found, [0], 4, np.full(DEPTH, 0.95), 200)
    feed(found, [0], 4, np.full(DEPTH, 0.1), 10)
    assert found.survival[0, ACCEPT, 0] < 0.6


def test_long_drafts_of_a_proposer_that_knows_when_to_stop() -> None:
    """Half of the steps have no draft, the others five sure tokens: PROGRESS is 0.5, ACCEPT is 1."""
    found = model(varying=True)
    random = np.random.default_rng(1)
    for _ in range(400):
        offered = np.array([5 if random.random() < 0.5 else 0])
        found.learn(
            np.array([0]), evidence(offered, offered, offered + 1, offered, np.array([DEPTH]))
        )
    survival = found.survival[0]
    assert survival[ACCEPT, 4] > 0.8
    assert survival[PROGRESS, :5] == pytest.approx(np.full(5, 0.5), abs=0.15)
    assert survival[OFFER, :5] == pytest.approx(np.full(5, 0.5), abs=0.15)
    assert survival[OFFER, 5] < 0.15


def test_pools_are_bounded() -> None:
    found = model()
    rows = {found.pool(f"name-{i}") for i in range(3 * MAX_POOLS)}
    assert len(rows) <= MAX_POOLS + 1
    assert found.pool("name-0") == 1


def test_more_slots_than_at_first() -> None:
    found = AcceptanceModel(DEPTH, varying=False, slots=2)
    found.start(0, 0)
    feed(found, [0], 4, np.full(DEPTH, 0.9), 50)
    before = found.survival[0].copy()
    found.start(70, 0)
    assert np.array_equal(found.survival[0], before)
    feed(found, [0, 70], 4, np.full(DEPTH, 0.9), 5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, DEPTH),
            st.integers(0, DEPTH),
            st.integers(0, DEPTH),
            st.integers(0, 7),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_any_evidence_gives_probabilities(steps: list[tuple[int, int, int, int, int]]) -> None:
    found = model(varying=True)
    for allowed, offered, drafted, kept, beyond in steps:
        offered = min(offered, allowed)
        drafted = min(drafted, offered)
        accepted = min(kept, drafted)
        row = [
            np.array([v])
            for v in (drafted, accepted, min(kept, accepted + 1), offered, allowed, beyond)
        ]
        found.learn(np.array([0]), evidence(*row))
    survival = found.survival[0]
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=-1) <= 1e-12).all()
    assert np.allclose(np.diff(found.expected[0], axis=-1), survival)


def test_several_steps_at_once_are_the_same_evidence() -> None:
    random = np.random.default_rng(5)
    hits = random.integers(0, 4, (4, 2))
    drafts = np.full((4, 2), 3)
    together = evidence(drafts, hits, hits + 1)
    for i in range(4):
        alone = evidence(drafts[i], hits[i], hits[i] + 1)
        assert np.array_equal(together.last[i], alone.last)
        assert np.array_equal(together.failed[i], alone.failed)
    found = AcceptanceModel(DEPTH, varying=False)
    found.start(0, 0)
    found.start(1, 0)
    found.learn(np.array([0, 1]), together)
    assert found.trials(np.array([0, 1])).tolist() == [4.0, 4.0]
