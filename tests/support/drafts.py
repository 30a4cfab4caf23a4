"""What must hold of every draft with a cache of its own, in a real engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import texts
from tests.support.engine import Engine, grown, ids

SHORT = {"max_tokens": 48, "ignore_eos": True}
PREFIX = "You answer questions about this list. " + " ".join(
    f"Item {i} costs {i * 7 % 90} coins and weighs {i * 13 % 41} grams." for i in range(41)
)


def always_four(method: str, draft: str | Path, **more: Any) -> dict[str, Any]:
    """A speculative config whose drafts have four tokens, whatever they cost and promise."""
    return {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": 4,
        "min_probability": 0.0,
        "controller": {"static_k": 4},
        **more,
    }


def said(engine: Engine, prompts: Sequence[str], **params: Any) -> list[list[int]]:
    """Token ids of the answers."""
    return ids(engine.chat(prompts, **SHORT, **params))


def counted(engine: Engine, run: Callable[[], Any]) -> tuple[Any, int, int, int]:
    """What run() gives, drafts, drafted and accepted tokens."""
    before = engine.counters()
    got = run()
    after = engine.counters()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (grown(before, after, f"spec_decode_num_{name}") for name in names)
    return got, drafts, drafted, accepted


def check_in_batches(engine: Engine, expected: list[list[int]], least: float) -> None:
    """Tokens are the expected ones of texts.ALL[:8]; at least so many are accepted a draft."""
    for batch in (1, 3, 8):
        count = 3 if batch == 1 else 8
        got, drafts, _, accepted = counted(
            engine,
            partial(said, engine, texts.ALL[:count], batch=batch),
        )
        assert got == expected[:count]
        assert accepted > least * drafts


def check_preemption_and_chunks(tight: Engine, roomy: Engine, plain: Engine) -> None:
    """They change neither tokens nor acceptance."""
    padded = [text + " Here is more context." * 30 for text in texts.ALL]
    wanted = ids(plain.chat(padded, **SHORT))
    before = tight.counters()
    got, drafts, _, accepted = counted(tight, partial(said, tight, padded))
    assert grown(before, tight.counters(), "num_preemptions") > 0
    assert got == wanted
    got, roomy_drafts, _, roomy_accepted = counted(roomy, partial(said, roomy, padded, batch=1))
    assert got == wanted
    # A request that is preempted between a draft and its verification drafts once more.
    assert accepted / drafts == pytest.approx(roomy_accepted / roomy_drafts, rel=0.05)


def check_cached_prefix(model: str, folder: Path, speculation: dict[str, Any]) -> None:
    """With vLLM's prefix cache tokens and acceptance are those without."""
    ends = ("What is item 3?", "Name two items.", "Which is heavy?", "Write a short poem.")
    prompts = [f"{PREFIX} {end}" for end in ends]
    found = []
    for cached in (False, True):
        engine = Engine(
            folder / f"log{cached}",
            model=model,
            max_model_len=1024,
            enable_prefix_caching=cached,
            speculative_config=speculation,
        )
        try:
            assert len(engine.prompt_ids(prompts[0])) > 600
            engine.chat(prompts[:1], max_tokens=8)
            before = engine.counters()
            found.append(counted(engine, partial(said, engine, prompts)))
            hits = grown(before, engine.counters(), "prefix_cache_hits")
            assert (hits > 4 * 500) == cached
        finally:
            engine.close()
    (tokens, drafts, _, accepted), (cached_tokens, cached_drafts, _, cached_accepted) = found
    assert cached_tokens == tokens
    assert cached_accepted / cached_drafts == pytest.approx(accepted / drafts, rel=0.05)


def check_come_and_go(engine: Engine, count: int) -> None:
    """Aborts at random: no page stays, and acceptance at the end is that of the beginning."""
    chance = random.Random(0)
    prompts = list(itertools.islice(itertools.cycle(texts.ALL), count))
    lengths = [chance.randrange(4, 64) for _ in prompts]
    aborted = [chance.random() < 0.25 for _ in prompts]
    rates = []
    for half in (slice(0, count // 2), slice(count // 2, count)):
        _, drafts, _, accepted = counted(
            engine,
            partial(
                engine.come_and_go,
                prompts[half],
                lengths[half],
                aborted[half],
                at_once=8,
                seed=1,
            ),
        )
        rates.append(accepted / drafts)
    assert rates[1] == pytest.approx(rates[0], rel=0.15)
    check_nothing_left(engine)


def check_nothing_left(engine: Engine) -> None:
    """What has finished is known in the step after."""
    engine.chat(texts.ALL[:1], max_tokens=2)
    cache = engine.draft_cache()
    assert cache["requests"] <= 1
    assert cache["used"] <= 8 < cache["pages"]
