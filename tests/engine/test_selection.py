"""Not selected: silent and harmless. Selected in a wrong way: one sentence before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import texts
from tests.support.engine import Engine, grown, ids, preload

pytestmark = pytest.mark.engine

STOCK = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
GREEDY = {"max_tokens": 64, "ignore_eos": True}


@pytest.fixture(scope="module")
def stock(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Stock ngram in an environment that has the plugin, without a word about specx."""
    engine = Engine(
        tmp_path_factory.mktemp("stock") / "log", model=model, speculative_config=dict(STOCK)
    )
    yield engine
    engine.close()


def test_not_selected_it_changes_nothing(stock: Engine, plain: Engine) -> None:
    before = stock.counters()
    assert ids(stock.chat(texts.COPYING, **GREEDY)) == ids(plain.chat(texts.COPYING, **GREEDY))
    assert grown(before, stock.counters(), "spec_decode_num_accepted_tokens") > 0
    for engine in (stock, plain):
        patches = engine.patches()
        assert not patches["step"]
        assert not patches["fits"]
        log = engine.log.read_text()
        assert "vllm_specx: " not in log
        assert "SpecxScheduler" not in log


def test_selected_its_patches_are_in_effect(ngram: Engine) -> None:
    assert ngram.patches() == {"step": True, "fits": True, "sampler": True}


TRY_EACH = """
import json, sys
from vllm import LLM

model, *configs = sys.argv[1:]
for config in configs:
    try:
        LLM(model, enforce_eager=True, speculative_config=json.loads(config))
    except BaseException as error:
        print("RESULT" + json.dumps([type(error).__name__, str(error)]), flush=True)
    else:
        print("RESULT" + json.dumps(["none", ""]), flush=True)
        break
"""
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": "specx:ngrm"}, "did you mean 'specx:ngram'"),
    ({"method": "specx:draft_model"}, "'draft' in specx is missing"),
    ({"method": "specx:ngram", "max_mtch": 3}, "did you mean 'max_match'"),
    ({"method": "specx:ngram", "pool": {"max_token": 3}}, "'pool.max_token'"),
    ({"method": "specx:ngram", "min_match": 0}, "'min_match'"),
    ({"method": "specx:ngram", "num_speculative_tokens": 0}, "'num_speculative_tokens' is 0"),
    ({"method": "specx:ngram", "num_speculative_tokens": -2}, "'num_speculative_tokens' is -2"),
    ({"method": "specx:ngram", "num_speculative_tokens": 10**6}, "is 1000000"),
    ({"method": "specx:ngram", "num_speculative_tokens": "8"}, "'num_speculative_tokens' is '8'"),
    ({"method": "ngram", "num_speculative_tokens": 4, "specx": {"pol": 1}}, "unknown key 'pol'"),
    ({"method": "custom_class", "model": "vllm_specx.NgramProposer", "specx": {"pol": 1}}, "'pol'"),
]


def test_llm_refuses_with_one_sentence_that_names_the_key(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRY_EACH, model, *(json.dumps(config) for config, _ in WRONG)],
        env={**os.environ, "LD_PRELOAD": preload()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = [
        json.loads(line.removeprefix("RESULT"))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT")
    ]
    assert len(results) == len(WRONG), done.stderr[-2000:]
    for (config, words), (kind, message) in zip(WRONG, results, strict=True):
        assert kind == "ConfigError", (config, message)
        assert words in message, config
        assert "\n" not in message
