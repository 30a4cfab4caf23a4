"""Trees of the real drafters in the real engine: tokens stay, and paths longer than one are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import texts
from tests.support.drafts import SHORT, counted
from tests.support.engine import Engine, ids
from tests.support.ranks import check_two_ranks
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]
HEADS = Path(__file__).parents[2] / "recipes" / "heads"
TREE = {"nodes": 16, "branching": 4, "depth": 4}
ALWAYS: dict[str, Any] = {"min_probability": 0.0, "controller": {"static_k": 16}}
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "specx:eagle", "model": str(HEADS / "smollm2-135m-eagle3"), **ALWAYS},
    "medusa": {"method": "specx:medusa", "model": str(HEADS / "smollm2-135m-hydra"), **ALWAYS},
    "ngram": {"method": "specx:ngram", **ALWAYS},
    "auto": {"method": "specx:auto", "model": str(HEADS / "smollm2-135m-eagle3")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_real_drafts(plain: Engine, model: str, tmp_path: Path, kind: str) -> None:
    expected = ids(plain.chat(texts.ALL[:8], batch=8, **SHORT))
    engine = Engine(tmp_path / "log", model=model, speculative_config={**KINDS[kind], "tree": TREE})
    try:
        for batch in (1, 4):
            got, drafts, drafted, accepted = counted(
                engine, lambda batch=batch: ids(engine.chat(texts.ALL[:8], batch=batch, **SHORT))
            )
            assert got == expected
            assert drafts > 0 and accepted > 0
            if kind in ("eagle", "medusa"):
                assert drafted > 10 * drafts and accepted > 0.8 * drafts
    finally:
        engine.close()


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    check_two_ranks(tmp_path, target, {**KINDS["ngram"], "tree": TREE})
