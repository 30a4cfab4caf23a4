"""Lookahead decoding in a real engine: what is said stays, and n-grams that the text does not have are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import TIGHT
from tests.engine.test_distribution import SMALL
from tests.support import texts
from tests.support.engine import Engine, grown, ids
from tests.support.ranks import check_two_ranks
from tests.support.tiny import VOCAB, attentive_llama, tiny_llama

pytestmark = pytest.mark.engine
ANSWERS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "detokenize": False}
WINDOW = {"window": 7, "ngram": 5, "when": "always"}
ALWAYS: dict[str, Any] = {
    "method": "specx:ngram",
    "pool": "off",
    "min_probability": 0.0,
    "tree": {"nodes": 16},
    "lookahead": WINDOW,
}


def count(engine: Engine, name: str) -> int:
    return engine.draft_counts().get(name, {}).get("", 0)


@pytest.fixture(scope="module")
def looking(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("looking")
    engine = Engine(folder / "log", model=model, speculative_config=ALWAYS)
    yield engine
    engine.close()


def test_open_questions_are_answered_in_fewer_steps(plain: Engine, looking: Engine) -> None:
    expected = ids(plain.chat(texts.OPEN, batch=6, **ANSWERS))
    for batch in (1, 4):
        gained = count(looking, "lookahead_accepted")
        before = looking.counters()
        assert ids(looking.chat(texts.OPEN, batch=batch, **ANSWERS)) == expected
        gained = count(looking, "lookahead_accepted") - gained
        accepted = grown(before, looking.counters(), "spec_decode_num_accepted_tokens")
        assert 30 < gained <= accepted
    assert count(looking, "lookahead_rows") > 25 * 6 * 64


def test_other_requests_beside_windows(plain: Engine, looking: Engine) -> None:
    """None of these has a window; those beside them have."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": 2},
        {"presence_penalty": 0.7},
        {},
        {"extra_args": {"specx_k": 0}},
    ]
    wanted = plain.chat(texts.OPEN, params, **ANSWERS)
    rows = count(looking, "lookahead_rows")
    assert looking.chat(texts.OPEN, params, **ANSWERS) == wanted
    both = count(looking, "lookahead_rows") - rows
    looking.chat(texts.OPEN[1:4], params[1:4], **ANSWERS)
    assert count(looking, "lookahead_rows") == rows + both
    assert 2 * 27 * 30 < both <= 2 * 27 * 64


def test_preemption_and_cuts(tmp_path: Path) -> None:
    """Windows are cut by the tokens of a step, and end before max_model_len; any wrong position, mask or cache
    entry shows."""
    target = attentive_llama(tmp_path / "target")
    prompts = [np.random.default_rng(i).integers(3, VOCAB, 170 + i).tolist() for i in range(8)]
    ends = [np.random.default_rng(i).integers(3, VOCAB, 384 - i).tolist() for i in (3, 20, 40)]
    small = {**SMALL, "max_model_len": 384}
    alone = Engine(tmp_path / "alone", model=target, **small)
    few = {**small, **TIGHT, "max_num_batched_tokens": 64}
    tight = Engine(tmp_path / "tight", model=target, speculative_config=ALWAYS, **few)
    try:
        before = tight.counters()
        assert ids(tight.tokens(prompts, **LONG)) == ids(alone.tokens(prompts, **LONG))
        assert grown(before, tight.counters(), "num_preemptions") > 0
        rows = count(tight, "lookahead_rows")
        assert rows > 1000 and rows % 27, "some windows were cut"
        for prompt in ends:
            assert ids(tight.tokens([prompt], **LONG)) == ids(alone.tokens([prompt], **LONG))
        assert count(tight, "lookahead_rows") > rows
    finally:
        alone.close()
        tight.close()


@pytest.mark.parametrize(("token_cost", "some"), [(None, False), (1e-4, True)])
def test_windows_follow_what_rows_cost(
    model: str, plain: Engine, tmp_path: Path, token_cost: float | None, some: bool
) -> None:
    """What they cost on a CPU as measured, which no window pays for, or as configured."""
    window = {**WINDOW, "when": "auto", "window": 15}
    own = {"min_probability": None, "token_cost": token_cost, "lookahead": window}
    made = {**ALWAYS, **own}
    engine = Engine(tmp_path / "log", model=model, speculative_config=made)
    try:
        wanted = ids(plain.chat(texts.OPEN[:4], batch=4, **ANSWERS))
        assert ids(engine.chat(texts.OPEN[:4], batch=4, **ANSWERS)) == wanted
        assert (count(engine, "lookahead_rows") > 0) == some
    finally:
        engine.close()


@pytest.mark.slow
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """And have the same windows, though each makes its own."""
    check_two_ranks(tmp_path, tiny_llama(tmp_path / "target"), ALWAYS)
