"""Estimated probabilities come to be true."""

from __future__ import annotations

import numpy as np
import pytest
from ngram_driver import Request, Runner, lookahead

from vllm_specx.draft import ngram_kernels as kernels
from vllm_specx.draft.calibration import initial_weights, kind_of


def features(length: int = 5, votes: int = 0, agreement: int = 5) -> np.ndarray[tuple[int], np.dtype[np.int32]]:  # fmt: skip
    return np.array(
        [
            kernels.LENGTH_WEIGHTS + kernels.length_bucket(length),
            kernels.COUNT_WEIGHTS + 1,
            kernels.VOTE_WEIGHTS + votes,
            kernels.AGREEMENT_WEIGHTS + agreement,
        ],
        np.int32,
    )


def test_weights_fit_the_kernels() -> None:
    weights = initial_weights()
    assert weights.shape == (3 * kernels.WEIGHTS,)
    assert weights.dtype == np.float64
    assert kernels.length_bucket(64) == kernels.LENGTH_BUCKETS - 1
    assert kernels.aligned_bucket(9, 99) == kernels.LENGTH_BUCKETS - 1
    assert kernels.count_bucket(10**6) == kernels.COUNT_BUCKETS - 1
    assert kernels.vote_bucket(0.1, 3) == kernels.VOTE_BUCKETS - 1


def test_longer_matches_start_more_probable() -> None:
    weights = initial_weights()
    estimates = [kernels.estimate(weights, features(length)) for length in (1, 2, 4, 10, 20, 64)]
    assert estimates == sorted(estimates)


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.7, 0.98])
def test_converges_to_the_true_rate(rate: float) -> None:
    weights = initial_weights()
    random = np.random.default_rng(7)
    estimates = []
    for _ in range(4000):
        estimates.append(kernels.estimate(weights, features()))
        kernels.learn(weights, features(), bool(random.random() < rate))
    assert np.mean(estimates[1000:]) == pytest.approx(rate, abs=0.03)


def test_tells_features_apart_and_follows_change() -> None:
    weights = initial_weights()
    random = np.random.default_rng(7)
    for rates in ({2: 0.2, 30: 0.95}, {2: 0.8, 30: 0.5}):
        for _ in range(3000):
            for length, rate in rates.items():
                kernels.learn(weights, features(length), bool(random.random() < rate))
        for length, rate in rates.items():
            assert kernels.estimate(weights, features(length)) == pytest.approx(rate, abs=0.12)


def test_estimates_are_never_certain() -> None:
    weights = initial_weights()
    for agreed in (True, False):
        for _ in range(20_000):
            kernels.learn(weights, features(), agreed)
        assert 0 < kernels.estimate(weights, features()) < 1


def loop_with_noise(rate: float, length: int, seed: int) -> list[int]:
    """A loop of ten tokens; each is followed with this probability, else a new one comes."""
    random = np.random.default_rng(seed)
    tokens = []
    for i in range(length):
        keep = i < 20 or random.random() < rate
        tokens.append(i % 10 if keep else int(random.integers(20, 900)))
    return tokens


@pytest.mark.parametrize("rate", [0.5, 0.95])
def test_predictions_on_a_stream_become_true(rate: float) -> None:
    """End to end: what was expected of the drafts against what was accepted of them."""
    proposer = lookahead(max_draft=16, token_cost=0.02, pool="off")
    runner = Runner(proposer, width=512)
    expected = accepted = 0.0
    for number in range(60):
        one = Request(f"r{number}", 1, [999])
        output = loop_with_noise(rate, 200, number)
        done, agreed = 0, 0
        while done < len(output) - 40:
            one.sampled = output[done : done + agreed + 1]
            one.tokens += one.sampled
            done += len(one.sampled)
            (draft,) = runner.step([one])
            slot = proposer._slots[one.name]
            agreed = 0
            while agreed < len(draft) and draft[agreed] == output[done + agreed]:
                agreed += 1
            if number >= 20:
                reach = np.cumprod(
                    [
                        kernels.estimate(proposer.weights, proposer._shadow_features[slot, j])
                        for j in range(len(draft))
                    ]
                )
                expected += float(reach.sum())
                accepted += agreed
        runner.finished.append(one.name)
    assert accepted > 500
    assert expected == pytest.approx(accepted, rel=0.1)


def test_a_trimmed_draft_teaches_what_is_known() -> None:
    """Outcomes count up to the tokens that were committed, whatever the scheduler verified."""
    proposer = lookahead(token_cost=0.001)
    runner = Runner(proposer)
    one = Request("a", 1, [1, 2, 3] * 20, sampled=[3])
    runner.step([one])
    slot = proposer._slots["a"]
    assert proposer._record[slot, kernels.SHADOW] >= 5
    before = proposer.weights.copy()
    one.tokens += [1]
    one.sampled = [1]
    known = proposer._shadow_features[slot, 0].copy()
    expected = before.copy()
    kernels.learn(expected, known, True)
    runner.step([one])
    assert np.array_equal(proposer.weights, expected)


def test_kinds_of_requests_teach_only_their_own() -> None:
    """What sampled requests show does not change what is expected of greedy ones."""
    assert [kind_of(t) for t in (0.0, 0.3, 0.84, 0.85, 1.5)] == [0, 1, 1, 2, 2]
    proposer = lookahead(token_cost=0.001)
    runner = Runner(proposer)
    before = proposer.weights.copy()
    one = Request("a", 1, [1, 2, 3] * 20, sampled=[3], temperature=1.0)
    runner.step([one])
    one.tokens += [7]
    one.sampled = [7]
    runner.step([one])
    changed = np.flatnonzero(proposer.weights != before)
    assert len(changed)
    assert (changed >= 2 * kernels.WEIGHTS).all()
    start = initial_weights().reshape(3, -1)
    greedy, free = (
        kernels.estimate(start[kind], features()) for kind in (kind_of(0.0), kind_of(1.0))
    )
    assert free < greedy


def test_a_request_that_misleads_drafts_less() -> None:
    """Two requests with the same candidates; the one whose predictions failed drafts less."""
    proposer = lookahead(max_draft=16, token_cost=0.03, pool="off")
    runner = Runner(proposer)
    phrase = list(range(10, 22))
    good = Request("good", 1, [*phrase, 1, *phrase, 2])
    bad = Request("bad", 1, [*phrase, 1, *phrase, 2])
    random = np.random.default_rng(3)
    for _ in range(25):
        for one, tail in ((good, phrase[3:6]), (bad, random.integers(100, 900, 3).tolist())):
            for token in [*phrase[:3], *tail]:
                one.tokens.append(token)
                one.sampled = [token]
                runner.step([one])
    slots = proposer._slots
    assert proposer._agreement[slots["good"]] > proposer._agreement[slots["bad"]] + 0.2
    for one in (good, bad):
        one.tokens += phrase[:2]
        one.sampled = phrase[:2]
    drafts = dict(zip(("good", "bad"), runner.step([good, bad]), strict=True))
    assert len(drafts["bad"]) < len(drafts["good"])
