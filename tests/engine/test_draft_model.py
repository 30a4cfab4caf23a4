"""A draft model in the real engine: tokens stay, and the draft's own cache is right."""

from __future__ import annotations

import random
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
from tests.support.engine import Engine, EngineError, grown, ids
from tests.support.ranks import check_two_ranks
from tests.support.twins import qwen_pair, tokenizer, twin, without_layers
from vllm_specx.engine.draft_probs import sampling_rows

pytestmark = pytest.mark.engine


def speculation(draft: str | Path, **more: Any) -> dict[str, Any]:
    return always_four("specx:draft_model", draft, **more)


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return ids(plain.chat(texts.ALL[:8], batch=8, **SHORT))


@pytest.fixture(scope="module")
def shorter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target without three of its thirty layers."""
    return without_layers(tmp_path_factory.mktemp("shorter") / "draft", model, range(25, 28))


@pytest.fixture(scope="module")
def roomy(model: str, shorter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("roomy") / "log",
        model=model,
        speculative_config=speculation(shorter),
    )
    yield engine
    engine.close()


@pytest.mark.slow
def test_no_token_changes(roomy: Engine, expected: list[list[int]]) -> None:
    check_in_batches(roomy, expected, least=1.0)
    check_nothing_left(roomy)


@pytest.mark.slow
def test_preemption_and_chunks_change_neither_tokens_nor_acceptance(
    model: str, shorter: str, roomy: Engine, plain: Engine, tmp_path: Path
) -> None:
    tight = Engine(
        tmp_path / "log",
        model=model,
        speculative_config=speculation(shorter, read_tokens=64),
        **TIGHT,
    )
    try:
        check_preemption_and_chunks(tight, roomy, plain)
    finally:
        tight.close()


def test_small_models_with_preemption_and_chunks(tmp_path: Path) -> None:
    """As above with models that take seconds: two families of prompts, of which one shares a prefix."""
    target, draft = qwen_pair(tmp_path)
    chance = random.Random(0)
    prefix = [chance.randrange(1000) for _ in range(64)]
    prompts = [
        [*(prefix if i % 2 else []), *(chance.randrange(1000) for _ in range(90))] for i in range(8)
    ]
    settings = {"max_tokens": 48, "ignore_eos": True, "detokenize": False}
    said = []
    for config in (None, speculation(draft, read_tokens=32)):
        engine = Engine(
            tmp_path / "log",
            model=target,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            speculative_config=config,
            **(TIGHT if config else {}),
        )
        try:
            before = engine.counters()
            got, drafts, _, accepted = counted(
                engine, lambda e=engine: ids(e.tokens(prompts, **settings))
            )
            said.append(got)
            if config:
                assert grown(before, engine.counters(), "num_preemptions") > 0
                assert accepted > drafts // 2 > 50
                # What has finished is known in the step after.
                engine.tokens([[1, 2, 3]], max_tokens=2, detokenize=False)
                assert engine.draft_cache()["used"] <= 1
        finally:
            engine.close()
    assert said[0] == said[1]


def test_greedy_and_seeded_requests_beside_drawn_ones(tmp_path: Path) -> None:
    """With few cache blocks: those that do not depend on vLLM's own random numbers say what they say without
    drafts."""
    target, draft = qwen_pair(tmp_path)
    chance = random.Random(0)
    prompts = [[chance.randrange(1000) for _ in range(90)] for _ in range(9)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    ]
    common = {"max_tokens": 48, "ignore_eos": True, "detokenize": False}
    params = [{**common, **kinds[i % 3]} for i in range(9)]
    # A seeded prompt that is read in parts ends vLLM 0.32 on a CPU.
    few_blocks = {**TIGHT, "max_num_batched_tokens": 2048}
    said = []
    for config in (None, speculation(draft, probabilistic=True)):
        engine = Engine(
            tmp_path / "log",
            model=target,
            skip_tokenizer_init=True,
            speculative_config=config,
            **(few_blocks if config else {}),
        )
        try:
            before = engine.counters()
            got, _, drafted, accepted = counted(engine, lambda e=engine: e.each(prompts, params))
            said.append([tokens for i, tokens in enumerate(ids(got)) if i % 3 < 2])
            if config:
                assert grown(before, engine.counters(), "num_preemptions") > 0
                assert 50 < accepted < drafted
        finally:
            engine.close()
    assert said[0] == said[1]


def test_who_is_drawn_for() -> None:
    """Not who is greedy, nor whose drafts a grammar cuts by what is in them."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rows = sampling_rows(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
            SamplingParams(temperature=0.7),
            SamplingParams(
                temperature=0.7, structured_outputs=StructuredOutputsParams(choice=["a", "b"])
            ),
            None,
        ]
    )
    assert rows.drawn.tolist() == [False, True, True, False, False]
    assert rows.temperatures[1:3].tolist() == pytest.approx([0.7, 0.7])
    assert rows.top_k[1:3].tolist() == [5, 0]
    assert rows.top_p[1:3].tolist() == pytest.approx([0.9, 1.0])


@pytest.mark.slow
def test_two_ranks_draw_the_same_drafts(tmp_path: Path) -> None:
    """A draft that is the target: what is drawn is accepted, as long as both ranks know what was drawn."""
    target, _ = qwen_pair(tmp_path)
    engine = Engine(
        tmp_path / "log",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        model=target,
        speculative_config=speculation(target, probabilistic=True),
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        max_model_len=256,
    )
    settings = {"max_tokens": 60, "ignore_eos": True, "detokenize": False, "temperature": 0.8}
    try:
        prompts = [[5, 6, 7 + i] for i in range(6)]
        _, drafts, drafted, accepted = counted(
            engine, lambda: engine.tokens(prompts, **{**settings, "top_k": 20})
        )
        assert drafts > 50
        assert accepted > 0.97 * drafted
    finally:
        engine.close()


def test_the_target_itself_is_all_but_always_right(
    model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """Drafts as long as pay; prompts that are read in parts."""
    engine = Engine(
        tmp_path / "log",
        model=model,
        speculative_config={
            "method": "specx:draft_model",
            "model": model,
            "num_speculative_tokens": 6,
            "read_tokens": 16,
            "min_probability": 0.2,
        },
    )
    try:
        got, drafts, drafted, accepted = counted(
            engine, lambda: ids(engine.chat(texts.ALL[:8], batch=4, **SHORT))
        )
        assert got == expected
        assert drafts > 8
        # What is left comes of min_probability's own estimate and of near-ties.
        assert accepted > 0.95 * drafted
    finally:
        engine.close()


@pytest.mark.slow
def test_by_goodput_no_token_changes(
    model: str, shorter: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """As users have it: whether and how much is drafted follows acceptance and step times."""
    engine = Engine(
        tmp_path / "log",
        model=model,
        speculative_config={"method": "specx:draft_model", "model": shorter},
    )
    try:
        for batch in (1, 8):
            assert ids(engine.chat(texts.ALL[:8], batch=batch, **SHORT)) == expected
    finally:
        engine.close()


@pytest.mark.slow
def test_a_cached_prefix_changes_neither_tokens_nor_acceptance(
    model: str, shorter: str, tmp_path: Path
) -> None:
    check_cached_prefix(model, tmp_path, speculation(shorter))


@pytest.mark.slow
def test_two_hundred_requests_come_and_go(roomy: Engine) -> None:
    check_come_and_go(roomy, 200)


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """The draft is whole on both, though its heads do not divide, and ids of padding are not drafted."""
    target, draft = qwen_pair(tmp_path)
    check_two_ranks(tmp_path, target, speculation(draft))


def test_what_does_not_fit_is_refused_before_the_target_is_loaded(
    model: str, tmp_path: Path
) -> None:
    draft = twin(tmp_path / "draft", "llama")
    tokenizer(draft, [f"w{i}" for i in range(96)])
    for config, said in (
        (
            speculation(draft),
            r"CheckpointError: .* has another vocabulary .* token 17, the first of 79",
        ),
        (speculation(tmp_path / "none"), r"CheckpointError: there is no draft model"),
    ):
        with pytest.raises(EngineError, match=said):
            Engine(tmp_path / "log", model=model, speculative_config=config)
        assert "Starting to load model" not in (tmp_path / "log").read_text()
