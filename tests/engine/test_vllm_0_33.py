"""vLLM 0.33's Python, run on the CPU by an overlay: the same tokens with every kind of proposer.

Not what a user installs (there is no 0.33 for the CPU); it shows that our hooks work there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import texts
from tests.support.eagle import random_eagle
from tests.support.engine import Engine, grown, ids
from tests.support.heads import random_heads
from tests.support.vllm_0_33 import overlay

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SHORT = {"max_tokens": 64, "ignore_eos": True}
PROMPTS = [*texts.COPYING[:3], texts.OPEN[0]]


def test_tokens_are_those_of_no_speculation(model: str, tmp_path: Path) -> None:
    folder = overlay(tmp_path / "overlay")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}
    methods: dict[str, dict[str, Any] | None] = {
        "none": None,
        "specx:ngram": {"method": "specx:ngram", "num_speculative_tokens": 8},
        "medusa, which 0.33 has no more": {
            "method": "medusa",
            "model": random_heads(tmp_path / "heads", 576),
            "num_speculative_tokens": 3,
            "min_probability": 0.0,
        },
        "specx:eagle, with states of inner layers": {
            "method": "specx:eagle",
            "model": random_eagle(tmp_path / "eagle", model, 3),
            "num_speculative_tokens": 3,
            "min_probability": 0.0,
        },
        "stock ngram, steered": {**ngram, "specx": {}},
        "stock draft_model, steered": {
            "method": "draft_model",
            "model": model,
            "num_speculative_tokens": 3,
            "specx": {},
        },
    }
    answers = {}
    for number, (name, method) in enumerate(methods.items()):
        log = tmp_path / f"{number}.log"
        engine = Engine(log, env={"PYTHONPATH": path}, model=model, speculative_config=method)
        try:
            before = engine.counters()
            answers[name] = ids(engine.chat(PROMPTS, batch=4, **SHORT))
            drafted = grown(before, engine.counters(), "spec_decode_num_draft_tokens")
        finally:
            engine.close()
        assert "v0.33.0" in log.read_text(), "the overlay was not what ran"
        assert (drafted > 0) == (method is not None)
        assert answers[name] == answers["none"], name
    assert [len(answer) for answer in answers["none"]] == [64] * 4
