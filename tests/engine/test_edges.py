"""Where speculation usually goes wrong: ends of text, stop strings, sampling features, aborts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import NGRAM, Script
from tests.support import texts
from tests.support.engine import Engine, EngineError, grown, ids

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def short(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """max_model_len 64, without and with speculation."""
    engines = {
        name: Engine(
            tmp_path_factory.mktemp(name) / "log",
            model=model,
            max_model_len=64,
            max_num_seqs=4,
            speculative_config=config,
        )
        for name, config in (("plain", None), ("ngram", dict(NGRAM)))
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("length", [56, 60, 62, 63, 64])
def test_the_end_of_max_model_len(short: dict[str, Engine], length: int) -> None:
    prompt = ([3, 4, 5, 6, 7, 8] * 11)[:length]

    def answer(engine: Engine) -> Any:
        try:
            return engine.tokens([prompt, prompt[:20]], max_tokens=64, ignore_eos=True)
        except EngineError as error:
            return str(error)

    assert answer(short["ngram"]) == answer(short["plain"])


def test_drafting_goes_on_near_max_model_len(short: dict[str, Engine]) -> None:
    prompt = ([3, 4, 5, 6, 7, 8] * 11)[:56]
    before = short["ngram"].counters()
    short["ngram"].tokens([prompt], max_tokens=8, ignore_eos=True)
    after = short["ngram"].counters()
    drafts = grown(before, after, "spec_decode_num_drafts")
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    assert drafted < 8 * max(drafts, 1), "the last drafts are cut to what still fits"


def answers_of(plain: Engine, wanted: list[str], **params: Any) -> dict[str, list[int]]:
    outputs = plain.chat(wanted, **params)
    return {
        json.dumps(plain.prompt_ids(text)): output["ids"][0]
        for text, output in zip(wanted, outputs, strict=True)
    }


def test_eos_inside_an_accepted_draft(plain: Engine, scripted: Engine, script: Script) -> None:
    question = ["What is 2+2? Answer in one word."]
    wanted = plain.chat(question, max_tokens=200)
    assert wanted[0]["reason"] == ["stop"]
    assert (len(wanted[0]["ids"][0]) - 1) % 9, (
        "the end is neither the first token nor a bonus token"
    )
    right = answers_of(plain, question, max_tokens=200, ignore_eos=True)
    script.set(mode="right", answers=right)
    before = scripted.counters()
    got = scripted.chat(question, max_tokens=200)
    assert grown(before, scripted.counters(), "spec_decode_num_accepted_tokens") > 0
    assert got == wanted


def test_a_stop_string_in_the_middle_of_an_accepted_draft(
    plain: Engine, scripted: Engine, script: Script
) -> None:
    right = answers_of(plain, texts.COPYING, max_tokens=100, ignore_eos=True)
    script.set(mode="right", answers=right)
    full = plain.chat(texts.COPYING, max_tokens=100, ignore_eos=True)
    for text, output in zip(texts.COPYING, full, strict=True):
        middle = output["text"][0][40:46]
        params = {"max_tokens": 100, "stop": [middle], "logprobs": 2, "ignore_eos": True}
        (wanted,), (got,) = plain.chat([text], **params), scripted.chat([text], **params)
        assert wanted["reason"] == ["stop"]
        assert got == wanted
        assert got["logprobs"][0] == len(got["ids"][0])

        stream = scripted.stream(text, **params)
        assert 1 < stream.pop("chunks") < len(got["ids"][0]), "some steps add several tokens"
        assert stream == {key: value[0] for key, value in got.items()}


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"bad_words": ["the", " the", "1", "return"]},
        {"min_tokens": 90},
        {"logprobs": 2},
        {"allowed_token_ids": list(range(200, 2000))},
    ],
    ids=lambda params: next(iter(params)),
)
def test_sampling_features(plain: Engine, ngram: Engine, params: dict[str, Any]) -> None:
    wanted = plain.chat(texts.ALL[:6], max_tokens=100, **params)
    assert wanted != plain.chat(texts.ALL[:6], max_tokens=100), "the feature changes something"
    before = ngram.counters()
    assert ngram.chat(texts.ALL[:6], max_tokens=100, **params) == wanted
    assert grown(before, ngram.counters(), "spec_decode_num_draft_tokens") > 0


def test_json_schema(plain: Engine, ngram: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "people": {
                "type": "array",
                "minItems": 3,
                "maxItems": 4,
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 12},
                        "age": {"type": "integer", "minimum": 1, "maximum": 99},
                    },
                    "required": ["name", "age"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["people"],
        "additionalProperties": False,
    }
    question = ["List three people with name and age as JSON."] * 2
    wanted = plain.chat(question, max_tokens=200, json_schema=schema)
    before = ngram.counters()
    got = ngram.chat(question, max_tokens=200, json_schema=schema)
    assert ids(got) == ids(wanted)
    assert len(json.loads(got[0]["text"][0])["people"]) >= 3
    assert grown(before, ngram.counters(), "spec_decode_num_accepted_tokens") > 0


def test_an_abort_in_mid_stream_harms_nobody(plain: Engine, ngram: Engine) -> None:
    params = {"max_tokens": 60, "ignore_eos": True}
    wanted = ids(plain.chat(texts.ALL[:4], **params))
    got = ngram.abort_one(texts.ALL[:4], 6, **params)
    assert got == [None, *wanted[1:]]
    assert ids(ngram.chat(texts.ALL[:4], **params)) == wanted


def test_what_one_tenant_wrote_is_not_drafted_for_another(ngram: Engine) -> None:
    prompt = ngram.prompt_ids("Write a limerick about a lighthouse keeper and his cat.")
    params: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.0}

    def accepted(pool: str | None = None, salt: str | None = None) -> int:
        extra = {"specx_pool": pool} if pool else {}
        before = ngram.counters()
        ngram.tokens([prompt], extra_args=extra, cache_salt=salt, **params)
        return grown(before, ngram.counters(), "spec_decode_num_accepted_tokens")

    first = accepted("tenant-a")
    again = accepted("tenant-a")
    assert again > first + 20, "a pool remembers"
    assert accepted("tenant-b") < again - 20
    assert accepted("off") < again - 20
    assert accepted("off") < again - 20, "a request that shares nothing leaves nothing"
    assert accepted("tenant-a", salt="secret") < again - 20
    assert accepted("tenant-a", salt="secret") > first + 20
    assert accepted("tenant-a", salt="other") < again - 20
