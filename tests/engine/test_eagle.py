"""EAGLE drafts in the real engine: tokens stay, and the draft's own cache is right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TIGHT
from tests.support import texts
from tests.support.eagle import random_eagle
from tests.support.engine import Engine, EngineError, grown, ids
from tests.support.ranks import check_two_ranks
from tests.support.tiny import tiny_llama

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SHORT = {"max_tokens": 48, "ignore_eos": True}
TRAINED = ROOT / "recipes" / "heads" / "smollm2-135m-eagle3"


def speculation(draft: str | Path, **more: Any) -> dict[str, Any]:
    """Always four tokens."""
    return {
        "method": "specx:eagle",
        "model": str(draft),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
        "controller": {"static_k": 4},
        **more,
    }


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


def counted(engine: Engine, run: Any) -> tuple[Any, int, int, int]:
    """What run() gives, drafts, drafted and accepted tokens."""
    before = engine.counters()
    got = run()
    after = engine.counters()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return got, *(grown(before, after, f"spec_decode_num_{name}") for name in names)


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
    # What has finished is known in the step after.
    hopeless.chat(texts.ALL[:1], max_tokens=2)
    assert hopeless.draft_cache()["requests"] <= 1


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
    for batch in (1, 3, 8):
        count = 3 if batch == 1 else 8
        got, drafts, _, accepted = counted(
            trained,
            lambda batch=batch, count=count: ids(
                trained.chat(texts.ALL[:count], batch=batch, **SHORT)
            ),
        )
        assert got == expected[:count]
        assert accepted > drafts // 4


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
    padded = [text + " Here is more context." * 30 for text in texts.ALL]
    wanted = ids(plain.chat(padded, **SHORT))
    before = tight.counters()
    got, drafts, _, accepted = counted(tight, lambda: ids(tight.chat(padded, **SHORT)))
    assert grown(before, tight.counters(), "num_preemptions") > 0
    assert got == wanted
    got, roomy_drafts, _, roomy_accepted = counted(
        trained, lambda: ids(trained.chat(padded, batch=1, **SHORT))
    )
    assert got == wanted
    # A request that is preempted between a draft and its verification drafts once more.
    assert accepted / drafts == pytest.approx(roomy_accepted / roomy_drafts, rel=0.05)


PREFIX = "You answer questions about this list. " + " ".join(
    f"Item {i} costs {i * 7 % 90} coins and weighs {i * 13 % 41} grams." for i in range(41)
)


def test_a_cached_prefix_changes_neither_tokens_nor_acceptance(model: str, tmp_path: Path) -> None:
    ends = ("What is item 3?", "Name two items.", "Which is heavy?", "Write a short poem.")
    prompts = [f"{PREFIX} {end}" for end in ends]
    found = []
    for cached in (False, True):
        engine = Engine(
            tmp_path / f"log{cached}",
            model=model,
            max_model_len=1024,
            enable_prefix_caching=cached,
            speculative_config=speculation(TRAINED),
        )
        try:
            assert len(engine.prompt_ids(prompts[0])) > 600
            engine.chat(prompts[:1], max_tokens=8)
            before = engine.counters()
            found.append(counted(engine, lambda e=engine: ids(e.chat(prompts, **SHORT))))
            hits = grown(before, engine.counters(), "prefix_cache_hits")
            assert (hits > 4 * 500) == cached
        finally:
            engine.close()
    (tokens, drafts, _, accepted), (cached_tokens, cached_drafts, _, cached_accepted) = found
    assert cached_tokens == tokens
    assert cached_accepted / cached_drafts == pytest.approx(accepted / drafts, rel=0.05)


@pytest.mark.slow
def test_two_hundred_requests_come_and_go(trained: Engine) -> None:
    """Aborts at random: no page stays, and acceptance at the end is that of the beginning."""
    chance = random.Random(0)
    prompts = list(itertools.islice(itertools.cycle(texts.ALL), 200))
    lengths = [chance.randrange(4, 64) for _ in prompts]
    aborted = [chance.random() < 0.25 for _ in prompts]
    rates = []
    for half in (slice(0, 100), slice(100, 200)):
        _, drafts, _, accepted = counted(
            trained,
            lambda half=half: trained.come_and_go(
                prompts[half], lengths[half], aborted[half], at_once=8, seed=1
            ),
        )
        rates.append(accepted / drafts)
    assert rates[1] == pytest.approx(rates[0], rel=0.15)
    trained.chat(texts.ALL[:1], max_tokens=2)
    cache = trained.draft_cache()
    assert cache["requests"] <= 1
    assert cache["used"] <= 8 < cache["pages"]


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
