"""T=0, float32: the token ids are those of no speculation, whatever is drafted and however batched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import TIGHT, Script, scripted_engine
from tests.support import texts
from tests.support.engine import Engine, grown, ids

pytestmark = pytest.mark.engine
LONG = {"max_tokens": 128, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    answers = ids(plain.chat(texts.ALL, batch=8, **LONG))
    assert [len(answer) for answer in answers] == [128] * 12
    return answers


@pytest.mark.parametrize("batch", [1, 8])
def test_ngram_equals_no_speculation(ngram: Engine, expected: list[list[int]], batch: int) -> None:
    before = ngram.counters()
    assert ids(ngram.chat(texts.ALL, batch=batch, **LONG)) == expected
    after = ngram.counters()
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    accepted = grown(before, after, "spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafted


def test_ngram_equals_no_speculation_when_the_prefix_is_cached(
    ngram: Engine, expected: list[list[int]]
) -> None:
    ngram.chat(texts.ALL, **LONG)
    before = ngram.counters()
    assert ids(ngram.chat(texts.ALL, **LONG)) == expected
    assert grown(before, ngram.counters(), "prefix_cache_hits") > 0


@pytest.fixture(scope="module")
def tight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("tight") / "log",
        model=model,
        speculative_config={"method": "specx:ngram", "num_speculative_tokens": 8},
        **TIGHT,
    )
    yield engine
    engine.close()


def test_ngram_equals_no_speculation_under_preemption_and_chunked_prefill(
    tight: Engine, plain: Engine
) -> None:
    padded = [text + " Here is more context." * 30 for text in texts.ALL]
    wanted = ids(plain.chat(padded, **LONG))
    lengths = [len(plain.prompt_ids(text)) for text in padded]
    assert min(lengths) > 128, "every prefill needs more than one step of 128 tokens"
    before = tight.counters()
    assert ids(tight.chat(padded, **LONG)) == wanted
    after = tight.counters()
    assert grown(before, after, "num_preemptions") > 0
    assert grown(before, after, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize(("batch", "count"), [(1, 3), (8, 12)])
@pytest.mark.parametrize("mode", ["right", "wrong"])
def test_drafts_that_are_all_right_or_all_wrong(
    plain: Engine,
    scripted: Engine,
    script: Script,
    expected: list[list[int]],
    mode: str,
    batch: int,
    count: int,
) -> None:
    answers = {
        json.dumps(plain.prompt_ids(text)): answer
        for text, answer in zip(texts.ALL, expected, strict=True)
    }
    script.set(mode=mode, answers=answers)
    before = scripted.counters()
    assert ids(scripted.chat(texts.ALL[:count], batch=batch, **LONG)) == expected[:count]
    after = scripted.counters()
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    accepted = grown(before, after, "spec_decode_num_accepted_tokens")
    assert drafted > 0
    assert accepted == (drafted if mode == "right" else 0)


@pytest.mark.parametrize("bad", [49152, -1, 2**31 - 1])
def test_a_token_outside_the_vocabulary_never_reaches_vllm(
    scripted: Engine, script: Script, expected: list[list[int]], bad: int
) -> None:
    script.set(mode="chain", tokens=[bad, 5, 6])
    before = scripted.counters()
    assert ids(scripted.chat(texts.ALL[:4], **LONG)) == expected[:4]
    assert grown(before, scripted.counters(), "spec_decode_num_draft_tokens") == 0


def test_only_the_part_before_a_bad_token_is_verified(
    scripted: Engine, script: Script, expected: list[list[int]]
) -> None:
    script.set(mode="chain", tokens=[5, 49152, 6])
    before = scripted.counters()
    assert ids(scripted.chat(texts.ALL[:4], **LONG)) == expected[:4]
    after = scripted.counters()
    drafts = grown(before, after, "spec_decode_num_drafts")
    assert drafts > 0
    assert grown(before, after, "spec_decode_num_draft_tokens") == drafts


def test_a_proposer_that_fails_is_switched_off_and_the_engine_lives(
    model: str, script: Script, expected: list[list[int]], tmp_path: Path
) -> None:
    engine = scripted_engine(model, tmp_path, script)

    def drafted_in_the_right_answers() -> int:
        before = engine.counters()
        assert ids(engine.chat(texts.ALL[:2], **LONG)) == expected[:2]
        return grown(before, engine.counters(), "spec_decode_num_draft_tokens")

    try:
        script.set(mode="chain", tokens=[5, 6], fail_every=2)
        assert drafted_in_the_right_answers() > 0, "every other fault is not three in a row"
        log = engine.log.read_text()
        assert log.count("ValueError: the test told the proposer to fail") == 1
        assert "switched off" not in log

        script.set(mode="short")
        assert drafted_in_the_right_answers() == 0
        log = engine.log.read_text()
        assert log.count("Traceback") == 1
        assert log.count("failed 3 times in a row and is switched off") == 1

        script.set(mode="chain", tokens=[5, 6])
        assert drafted_in_the_right_answers() == 0
    finally:
        engine.close()
