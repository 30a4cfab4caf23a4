"""EAGLE drafts in the real engine: tokens stay, and the draft's own cache is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TIGHT
from tests.support import texts
from tests.support.drafts import (
    SHORT,
    always_four,
    check_cached_prefix,
    check_come_and_go,
    check_in_batches,
    check_nothing_left,
    check_preemption_and_chunks,
    counted,
)
from tests.support.eagle import random_eagle
from tests.support.engine import Engine, EngineError, ids
from tests.support.ranks import check_two_ranks
from tests.support.tiny import tiny_llama

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
TRAINED = ROOT / "recipes" / "heads" / "smollm2-135m-eagle3"


def speculation(draft: str | Path, **more: Any) -> dict[str, Any]:
    return always_four("specx:eagle", draft, **more)


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return ids(plain.chat(texts.ALL[:8], batch=8, **SHORT))


@pytest.fixture(scope="module", params=[1, 3])
def hopeless(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Random weights."""
    folder = tmp_path_factory.mktemp("hopeless")
    draft = random_eagle(folder / "draft", model, request.param)
    engine = Engine(folder / "log", model=model, speculative_config=speculation(draft))
    yield engine
    engine.close()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_random_weights_change_no_token(
    hopeless: Engine, expected: list[list[int]], batch: int
) -> None:
    count = 3 if batch == 1 else 8
    got, drafts, drafted, accepted = counted(
        hopeless, lambda: ids(hopeless.chat(texts.ALL[:count], batch=batch, **SHORT))
    )
    assert got == expected[:count]
    assert drafted > 3 * drafts
    assert accepted < drafted // 10


def test_nothing_is_left_behind(hopeless: Engine) -> None:
    hopeless.chat(texts.ALL[:8], **SHORT)
    check_nothing_left(hopeless)


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("trained") / "log",
        model=model,
        speculative_config=speculation(TRAINED),
    )
    yield engine
    engine.close()


def test_trained_weights_change_no_token(trained: Engine, expected: list[list[int]]) -> None:
    check_in_batches(trained, expected, least=0.25)


@pytest.fixture(scope="module")
def tight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("tight") / "log",
        model=model,
        speculative_config=speculation(TRAINED),
        **TIGHT,
    )
    yield engine
    engine.close()


def test_preemption_and_chunks_change_neither_tokens_nor_acceptance(
    tight: Engine, trained: Engine, plain: Engine
) -> None:
    check_preemption_and_chunks(tight, trained, plain)


def test_a_cached_prefix_changes_neither_tokens_nor_acceptance(model: str, tmp_path: Path) -> None:
    check_cached_prefix(model, tmp_path, speculation(TRAINED))


@pytest.mark.slow
def test_two_hundred_requests_come_and_go(trained: Engine) -> None:
    check_come_and_go(trained, 200)


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_ranks_say_what_one_says(version: int, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    draft = random_eagle(tmp_path / "draft", target, version)
    check_two_ranks(tmp_path, target, speculation(draft))


def test_a_draft_of_another_target_is_refused(model: str, tmp_path: Path) -> None:
    draft = random_eagle(tmp_path / "draft", tiny_llama(tmp_path / "target"), 3)
    with pytest.raises(EngineError, match=r"CheckpointError: .* hidden_size 128"):
        Engine(tmp_path / "log", model=model, speculative_config=speculation(draft))
    assert "Starting to load model" not in (tmp_path / "log").read_text()
