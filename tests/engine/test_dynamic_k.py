"""K moves by itself, with our proposer and with vLLM's own methods, and changes no token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import texts
from tests.support.engine import Engine, grown, ids

pytestmark = pytest.mark.engine
HEADS = Path(__file__).parents[2] / "recipes" / "heads"
LONG = {"max_tokens": 96, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return ids(plain.chat(texts.ALL, batch=12, **LONG))


def start(model: str, folder: Path, method: dict[str, Any]) -> tuple[Engine, Path]:
    trace = folder / "trace.jsonl"
    specx = {"controller": {"trace": str(trace)}}
    return Engine(folder / "log", model=model, speculative_config={**method, "specx": specx}), trace


@pytest.fixture(scope="module")
def stock_ngram(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    """vLLM's ngram method, its draft length chosen by ours."""
    method = {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    engine, trace = start(model, tmp_path_factory.mktemp("stock_ngram"), method)
    yield engine, trace
    engine.close()


@pytest.fixture(scope="module")
def draft_model(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    """vLLM's draft_model method with the target as its own draft: always right."""
    method = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    engine, trace = start(model, tmp_path_factory.mktemp("draft_model"), method)
    yield engine, trace
    engine.close()


def lines(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def test_stock_ngram_is_cut_and_tokens_stay(
    stock_ngram: tuple[Engine, Path], expected: list[list[int]]
) -> None:
    engine, trace = stock_ngram
    before = engine.counters()
    assert ids(engine.chat(texts.ALL, batch=12, **LONG)) == expected
    assert ids(engine.chat(texts.OPEN, batch=1, **LONG)) == expected[len(texts.COPYING) :]
    after = engine.counters()
    assert grown(before, after, "spec_decode_num_accepted_tokens") > 0
    drafted = {k for line in lines(trace) for k in line["drafted"]}
    assert 0 in drafted
    assert len(drafted) > 2, "the draft length moved"


def test_a_stock_draft_model_is_steered_and_tokens_stay(
    draft_model: tuple[Engine, Path], expected: list[list[int]]
) -> None:
    """Every draft is right. With K=0 vLLM runs the draft's first forward all the same, so the
    largest K is the best one here, found from a careful start."""
    engine, trace = draft_model
    before = engine.counters()
    assert ids(engine.chat(texts.ALL, batch=12, **LONG)) == expected
    for _ in range(2):
        assert ids(engine.chat(texts.OPEN[:1], batch=1, **LONG)) == expected[6:7]
    after = engine.counters()
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    accepted = grown(before, after, "spec_decode_num_accepted_tokens")
    assert 0 < accepted == drafted
    chosen = {k for line in lines(trace) for k in line["next_k"]}
    assert len(chosen) > 1, "K moved by itself"
    assert max(chosen) == 4


def test_the_forwards_of_a_draft_of_ours_are_counted_and_paid_for(
    model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    method = {
        "method": "specx:eagle",
        "model": str(HEADS / "smollm2-135m-eagle3"),
        "num_speculative_tokens": 5,
        "controller": {"trace": str(tmp_path / "trace.jsonl")},
    }
    engine = Engine(tmp_path / "log", model=model, speculative_config=method)
    try:
        assert ids(engine.chat(texts.ALL[:6], batch=1, **LONG)) == expected[:6]
        assert ids(engine.chat(texts.ALL, batch=12, **LONG)) == expected
    finally:
        engine.close()
    steps = lines(tmp_path / "trace.jsonl")
    for step, following in itertools.pairwise(steps):
        if step["requests"] == following["requests"]:
            assert max(following["drafted"]) <= step["draft_steps"]
    assert len({step["draft_steps"] for step in steps}) > 2, "drafts of several lengths"
    assert 0 < steps[-1]["draft_step_seconds"] < 0.5 * steps[-1]["seconds"]


@pytest.mark.parametrize(("k", "most"), [(0, 0), (2, 2)])
def test_a_request_can_fix_its_k(
    ngram: Engine, expected: list[list[int]], k: int, most: int
) -> None:
    """`specx_k` in extra_args: 0 is no speculation, another number the most that is drafted."""
    before = ngram.counters()
    answers = ngram.chat(texts.COPYING, batch=6, extra_args={"specx_k": k}, **LONG)
    after = ngram.counters()
    assert ids(answers) == expected[: len(texts.COPYING)]
    drafts = grown(before, after, "spec_decode_num_drafts")
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    assert drafted <= most * drafts
    assert (drafted == 0) == (k == 0)


def test_a_wrong_rule_is_ignored(ngram: Engine, expected: list[list[int]]) -> None:
    before = ngram.counters()
    extra = {"specx_k": "many", "specx_scenario": ["code"]}
    answers = ngram.chat(texts.COPYING[:2], batch=2, extra_args=extra, **LONG)
    assert ids(answers) == expected[:2]
    assert grown(before, ngram.counters(), "spec_decode_num_accepted_tokens") > 0
