"""Draft trees in the real engine: T=0 in float32, the token ids are those of no speculation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ROOT, Script
from tests.support import texts
from tests.support.engine import Engine, grown, ids

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LONG = {"max_tokens": 100, "ignore_eos": True}


def tree_engine(
    model: str, folder: Path, script: Script, *, env: dict[str, str] | None = None, **kwargs: Any
) -> Engine:
    return Engine(
        folder / "log",
        env={
            "SPECX_TEST_SCRIPT": str(script.path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **(env or {}),
        },
        model=model,
        speculative_config={
            "method": "custom_class",
            "model": "tests.support.tree_proposers.TreeScripted",
            "num_speculative_tokens": 64,
        },
        **kwargs,
    )


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return ids(plain.chat(texts.ALL[:8], batch=8, **LONG))


@pytest.fixture(scope="module")
def answers(plain: Engine, expected: list[list[int]]) -> dict[str, list[int]]:
    prompts = [plain.prompt_ids(text) for text in texts.ALL[:8]]
    return {json.dumps(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}


@pytest.fixture(scope="module")
def trees(model: str, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = tree_engine(model, tmp_path_factory.mktemp("trees"), script)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("mode", "nodes", "batch"),
    [("trees", 8, 1), ("trees", 32, 4), ("mixed", 20, 8), ("wrong", 16, 8), ("trees", 64, 8)],
)
def test_tokens_are_those_of_no_speculation(
    trees: Engine,
    script: Script,
    expected: list[list[int]],
    answers: dict[str, list[int]],
    mode: str,
    nodes: int,
    batch: int,
) -> None:
    count = 3 if batch == 1 else 8
    script.set(mode=mode, nodes=nodes, answers=answers)
    before = trees.counters()
    assert ids(trees.chat(texts.ALL[:count], batch=batch, **LONG)) == expected[:count]
    accepted = grown(before, trees.counters(), "spec_decode_num_accepted_tokens")
    assert accepted > 100 if mode != "wrong" else accepted < 20
    # Again, from blocks that were written by trees.
    before = trees.counters()
    assert ids(trees.chat(texts.ALL[:count], batch=batch, **LONG)) == expected[:count]
    assert grown(before, trees.counters(), "prefix_cache_hits") > 0
