"""T>0: the distribution is the target's after accepted, rejected and bonus positions.

Two-sample chi-square against no speculation. Four cells of the speculative process are looked at
apart. Each test's level is 1e-4, so that the whole file raises a false alarm once in a thousand
fresh runs; with the fixed engine seed it is the same every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from tests.conftest import Script
from tests.engine.test_exactness import grown
from tests.support.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAMPLES = 3000
LEVEL = 1e-4
PROMPT = "red blue red green red blue red green red blue red green red blue"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 6, "max_tokens": 4, "ignore_eos": True}
Samples = list[tuple[int, ...]]


def sample(engine: Engine) -> Samples:
    prompt = engine.prompt_ids(PROMPT)
    outputs = []
    while len(outputs) * 60 < SAMPLES:
        outputs += engine.tokens([prompt], n=60, **SAMPLING)
    return [tuple(ids) for output in outputs for ids in output["ids"]]


def p_value(one: list[int], other: list[int]) -> float:
    """Of the hypothesis that both lists come from one distribution; rare tokens are one class."""
    counts = Counter(one) + Counter(other)
    common = [token for token, n in counts.items() if n >= 20]
    rows = []
    for values in (one, other):
        have = Counter(values)
        row = [have[token] for token in common]
        rows.append([*row, len(values) - sum(row)])
    columns = [column for column in zip(*rows, strict=True) if sum(column) > 0]
    assert len(columns) > 1, "a distribution of one value tests nothing"
    return float(chi2_contingency([list(row) for row in zip(*columns, strict=True)]).pvalue)


def cells(samples: Samples, draft: tuple[int, int]) -> dict[str, list[int]]:
    """Next tokens by what happened to the draft that follows every first token."""
    first, second = draft
    return {
        "first position, accepted or resampled": [s[1] for s in samples],
        "after an accepted token": [s[2] for s in samples if s[1] == first],
        "after a rejected token": [s[2] for s in samples if s[1] != first],
        "bonus": [s[3] for s in samples if s[1:3] == (first, second)],
    }


@pytest.fixture(scope="module")
def expected(plain: Engine) -> Samples:
    return sample(plain)


def likely(samples: Samples) -> tuple[int, int]:
    """A draft that is accepted often, and rejected often."""
    first = Counter(s[1] for s in samples).most_common(1)[0][0]
    second = Counter(s[2] for s in samples if s[1] == first).most_common(1)[0][0]
    return first, second


def unlikely(samples: Samples) -> tuple[int, int]:
    """A draft that is possible, but mostly rejected."""
    first = Counter(s[1] for s in samples).most_common(3)[-1][0]
    second = Counter(s[2] for s in samples if s[1] == first).most_common(1)[0][0]
    return first, second


@pytest.mark.parametrize("choose", [likely, unlikely])
def test_the_distribution_is_the_targets(
    scripted: Engine, script: Script, expected: Samples, choose: Any
) -> None:
    draft = choose(expected)
    script.set(mode="chain", tokens=list(draft))
    before = scripted.counters()
    got = sample(scripted)
    after = scripted.counters()
    drafted = grown(before, after, "spec_decode_num_draft_tokens")
    accepted = grown(before, after, "spec_decode_num_accepted_tokens")
    assert SAMPLES // 10 < accepted < drafted
    mine, theirs = cells(got, draft), cells(expected, draft)
    values = {name: p_value(mine[name], theirs[name]) for name in mine if len(mine[name]) > 100}
    assert len(values) >= 3
    assert min(values.values()) > LEVEL, values


@pytest.fixture(scope="module")
def stock(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Stock ngram: started with or without the plugin."""
    engines: list[Engine] = []

    def start(mended: bool) -> Engine:
        config: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
        folder: Path = tmp_path_factory.mktemp("stock")
        engine = Engine(
            folder / "log",
            env={} if mended else {"VLLM_PLUGINS": ""},
            model=model,
            speculative_config={**config, "specx": {}} if mended else config,
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


def worst(got: Samples, expected: Samples) -> float:
    return min(p_value([s[i] for s in got], [s[i] for s in expected]) for i in (1, 2, 3))


def test_stock_ngram_beside_the_plugin_is_mended(stock: Any, expected: Samples) -> None:
    engine = stock(mended=True)
    before = engine.counters()
    got = sample(engine)
    assert grown(before, engine.counters(), "spec_decode_num_accepted_tokens") > 100
    assert worst(got, expected) > LEVEL


def test_the_shim_is_still_needed(stock: Any, expected: Samples) -> None:
    """Stock speculation on the CPU fails the same test. When it passes, engine/shims.py can go."""
    engine = stock(mended=False)
    before = engine.counters()
    got = sample(engine)
    assert grown(before, engine.counters(), "spec_decode_num_draft_tokens") > 100
    assert worst(got, expected) < LEVEL, "vLLM is mended: remove shims.mend_expand_kernel"
    assert "specx" not in engine.log.read_text().replace("vllm_specx/", "")
