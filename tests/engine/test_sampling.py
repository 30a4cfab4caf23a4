"""T>0 beside what test_distribution.py shows: seeds, several samples, mixed batches, lone top_k."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.conftest import Script
from tests.support import texts
from tests.support.engine import Engine, grown, ids

pytestmark = pytest.mark.engine


@pytest.fixture
def half_right(plain: Engine, scripted: Engine, script: Script) -> Engine:
    """An engine that drafts the greedy answers: at T>0 some drafts are accepted, some rejected."""
    answers = plain.chat(texts.ALL, max_tokens=60, ignore_eos=True)
    prompts = [json.dumps(plain.prompt_ids(text)) for text in texts.ALL]
    script.set(mode="right", answers=dict(zip(prompts, ids(answers), strict=True)))
    return scripted


def drafted_and_accepted(engine: Engine, before: dict[str, Any]) -> tuple[int, int]:
    after = engine.counters()
    return (
        grown(before, after, "spec_decode_num_draft_tokens"),
        grown(before, after, "spec_decode_num_accepted_tokens"),
    )


def test_a_seed_gives_the_same_text_again(half_right: Engine) -> None:
    params = {"temperature": 0.7, "max_tokens": 60, "n": 2}
    before = half_right.counters()
    first = half_right.chat(texts.COPYING, seed=7, **params)
    drafted, accepted = drafted_and_accepted(half_right, before)
    assert 20 < accepted < drafted - 20
    assert half_right.chat(texts.COPYING, seed=7, **params) == first
    assert half_right.chat(texts.COPYING, seed=8, **params) != first


def test_a_seed_gives_the_text_of_no_speculation_with_ngram(plain: Engine, ngram: Engine) -> None:
    """What ngram drafts depends on earlier requests, and a seed must not."""
    params = {"temperature": 0.7, "max_tokens": 60, "seed": 7}
    wanted = ids(plain.chat(texts.COPYING, **params))
    before = ngram.counters()
    assert ids(ngram.chat(texts.COPYING, **params)) == wanted
    assert drafted_and_accepted(ngram, before) == (0, 0)
    assert ids(ngram.chat(texts.COPYING, **params)) == wanted


def test_two_samples_of_one_prompt_are_two(ngram: Engine) -> None:
    output = ngram.chat(texts.OPEN[:2], temperature=1.0, n=2, max_tokens=40, seed=1)
    assert all(len(one["ids"]) == 2 and one["ids"][0] != one["ids"][1] for one in output)


def test_greedy_requests_among_sampled_ones(plain: Engine, half_right: Engine) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    mixed = [greedy, {**greedy, "temperature": 1.0}, {**greedy, "temperature": 1.0, "top_p": 0.5}]
    wanted = ids(plain.chat(texts.ALL, **greedy))
    before = half_right.counters()
    got = ids(half_right.chat(texts.ALL, mixed * 4))
    drafted, accepted = drafted_and_accepted(half_right, before)
    assert 0 < accepted < drafted
    assert got[::3] == wanted[::3]
    assert all(got[i] != wanted[i] for i in range(1, 12, 3))


def test_the_smallest_top_k_and_top_p_are_greedy(plain: Engine, half_right: Engine) -> None:
    """Also where no request of the batch has a draft, as in every prefill."""
    common = {"max_tokens": 60, "ignore_eos": True}
    wanted = ids(plain.chat(texts.ALL, **common))
    before = half_right.counters()
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5}):
        assert ids(half_right.chat(texts.ALL, temperature=1.5, **narrow, **common)) == wanted
    drafted, accepted = drafted_and_accepted(half_right, before)
    assert drafted == accepted > 0
