"""Draft heads in the real engine: tokens stay, whatever the heads are worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import texts
from tests.support.engine import Engine, EngineError, grown, ids
from tests.support.heads import random_heads
from tests.support.ranks import check_two_ranks
from tests.support.tiny import tiny_llama

pytestmark = pytest.mark.engine
SHORT = {"max_tokens": 48, "ignore_eos": True}
HIDDEN = 576
TRAINED = Path(__file__).parents[2] / "recipes" / "heads"


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return ids(plain.chat(texts.ALL[:8], batch=8, **SHORT))


@pytest.fixture(scope="module")
def hopeless(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random heads that always draft."""
    folder = tmp_path_factory.mktemp("hopeless")
    config = {
        "method": "specx:medusa",
        "model": random_heads(folder / "heads", HIDDEN),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
    }
    engine = Engine(folder / "log", model=model, speculative_config=config)
    yield engine
    engine.close()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_random_heads_change_no_token(
    hopeless: Engine, expected: list[list[int]], batch: int
) -> None:
    before = hopeless.counters()
    count = 3 if batch == 1 else 8
    assert ids(hopeless.chat(texts.ALL[:count], batch=batch, **SHORT)) == expected[:count]
    after = hopeless.counters()
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    assert drafted > 3 * grown(before, after, "spec_decode_num_drafts")
    assert grown(before, after, "spec_decode_num_accepted_tokens") < drafted // 10


@pytest.mark.parametrize(
    "heads", ["smollm2-135m-hydra", pytest.param("smollm2-135m-medusa", marks=pytest.mark.slow)]
)
def test_trained_heads_change_no_token(
    model: str, heads: str, expected: list[list[int]], tmp_path: Path
) -> None:
    config = {
        "method": "specx:medusa",
        "model": str(TRAINED / heads),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
    }
    engine = Engine(tmp_path / "log", model=model, speculative_config=config)
    try:
        for batch in (1, 3, 8):
            count = 3 if batch == 1 else 8
            before = engine.counters()
            answers = engine.chat(texts.ALL[:count], batch=batch, **SHORT)
            after = engine.counters()
            assert ids(answers) == expected[:count]
            drafts = grown(before, after, "spec_decode_num_drafts")
            assert grown(before, after, "spec_decode_num_accepted_tokens") > drafts // 5
    finally:
        engine.close()


@pytest.mark.slow
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    config = {
        "method": "specx:medusa",
        "model": random_heads(tmp_path / "heads", 128),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
    }
    check_two_ranks(tmp_path, tiny_llama(tmp_path / "target"), config)


def test_heads_that_are_always_right(tmp_path: Path) -> None:
    """A target that says token 0 for ever, and heads that know it: all drafts are accepted."""
    target = tiny_llama(tmp_path / "target", silent=True)
    small: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256}
    config = {
        "method": "specx:medusa",
        "model": random_heads(tmp_path / "heads", 128),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
    }
    engine = Engine(tmp_path / "log", model=target, speculative_config=config, **small)
    try:
        for batch in (1, 3, 8):
            prompts = [[5, 6, 7 + i] for i in range(batch)]
            before = engine.counters()
            answers = engine.tokens(prompts, max_tokens=40, ignore_eos=True, detokenize=False)
            after = engine.counters()
            assert ids(answers) == [[0] * 40] * batch
            drafted = grown(before, after, "spec_decode_num_draft_tokens")
            accepted = grown(before, after, "spec_decode_num_accepted_tokens")
            assert accepted == drafted >= 31 * batch
    finally:
        engine.close()


def test_heads_of_another_target_are_refused(model: str, tmp_path: Path) -> None:
    config = {"method": "specx:medusa", "model": random_heads(tmp_path / "heads", HIDDEN // 2)}
    with pytest.raises(EngineError, match=r"CheckpointError: .* needs \[576, 576\]"):
        Engine(tmp_path / "log", model=model, speculative_config=config)
    assert "Starting to load model" not in (tmp_path / "log").read_text()


def test_the_random_blocks_do_something() -> None:
    """The fixture is not the identity."""
    from vllm_specx.draft.medusa_heads import ParallelHeads

    weights = torch.randn(2, 1, 8, 8)
    hidden = torch.randn(3, 8)
    assert not torch.allclose(ParallelHeads(weights)(hidden)[0], hidden)
