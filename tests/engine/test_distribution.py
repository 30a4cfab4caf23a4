"""T>0: the distribution is the target's after accepted, rejected and bonus positions.

Two-sample chi-square tests against no speculation, 8,000 samples each side, of a small random
target whose whole distribution fits the cells. The level of each test is 1e-5 and this file makes 144
of them (3 settings: 3 drafts x 5 cells, 10 proposers x 3 positions, no speculation against itself x 3),
so that with everything right a fresh run raises a false alarm once in 694 runs at most (Bonferroni).
test_usual_faults_are_seen shows which faults these tests see; stock vLLM on a CPU fails them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from tests.engine.conftest import Script, scripted_engine
from tests.support.eagle import random_eagle
from tests.support.engine import Engine, EngineError, grown, ids
from tests.support.heads import random_heads, trained_heads
from tests.support.tiny import VOCAB, tiny_llama
from tests.support.twins import perturbed

pytestmark = pytest.mark.engine

SAMPLES = 8000
LEVEL = 1e-5
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.2, "top_k": 6},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
}
Sample = tuple[int, ...]
Draft = tuple[int, int]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


class Sampler:
    """An engine on the small target, and what it is asked."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self.engine = engine
        self.prompt = prompt

    def draw(self, setting: dict[str, Any]) -> tuple[list[Sample], int, int]:
        """Samples of four tokens; drafted and accepted tokens."""
        before = self.engine.counters()
        outputs = self.engine.tokens(
            [self.prompt] * (SAMPLES // 50),
            n=50,
            max_tokens=4,
            ignore_eos=True,
            detokenize=False,
            **setting,
        )
        after = self.engine.counters()
        drafted = grown(before, after, "spec_decode_num_draft_tokens")
        accepted = grown(before, after, "spec_decode_num_accepted_tokens")
        return [tuple(sample) for sample in ids(outputs)], drafted, accepted


SMALL: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256}


@pytest.fixture(scope="module")
def plain_small(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """No speculation. The prompt is the target's own text, so that n-grams come back."""
    engine = Engine(tmp_path_factory.mktemp("small") / "log", model=target, **SMALL)
    own = engine.tokens([[1, 2, 3]], max_tokens=160, temperature=0.7, detokenize=False)
    yield Sampler(engine, [1, 2, 3, *own[0]["ids"][0]])
    engine.close()


Expected = dict[str, list[Sample]]


@pytest.fixture(scope="module")
def expected(plain_small: Sampler) -> Expected:
    """Samples without speculation, by setting."""
    return {name: plain_small.draw(setting)[0] for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module")
def again(plain_small: Sampler, expected: Expected) -> Expected:
    """The same, drawn once more."""
    return {name: plain_small.draw(setting)[0] for name, setting in SETTINGS.items()}


def p_value(one: list[int], other: list[int]) -> float:
    """Of the hypothesis that both lists come from one distribution; rare tokens are one class."""
    counts = Counter(one) + Counter(other)
    common = {token for token, n in counts.items() if n >= 20}
    columns = [[values.count(token) for values in (one, other)] for token in common]
    columns.append([sum(token not in common for token in values) for values in (one, other)])
    columns = [column for column in columns if sum(column) > 0]
    assert len(columns) > 2, "a distribution of one value tests nothing"
    return float(chi2_contingency(columns).pvalue)


def cells(samples: list[Sample], draft: Draft) -> dict[str, list[int]]:
    """Next tokens by what happened to `draft`, which is drafted after every step.

    The first token has no draft. Two tokens are drafted then, one after a rejection there, and none
    when a single token is left.
    """
    first = draft[0]
    return {
        "verified first": [s[1] for s in samples],
        "verified after an accepted token": [s[2] for s in samples if s[1] == first],
        "verified after a rejected token": [s[2] for s in samples if s[1] != first],
        "bonus after two": [s[3] for s in samples if s[1:3] == draft],
        "no draft, after a rejected token": [
            s[3] for s in samples if s[1] != first and s[2] != first
        ],
    }


def accepted_of(sample: Sample, draft: Draft) -> int:
    """How many drafted tokens a sample with these tokens has accepted."""
    first, second = draft
    if sample[1] != first:
        return int(sample[2] == first)
    return 1 + int(sample[2] == second)


def likely(samples: list[Sample]) -> Draft:
    """Accepted often, and rejected often."""
    first = Counter(s[1] for s in samples).most_common(1)[0][0]
    return first, Counter(s[2] for s in samples if s[1] == first).most_common(1)[0][0]


def unlikely(samples: list[Sample]) -> Draft:
    """Possible, but mostly rejected."""
    first = Counter(s[1] for s in samples).most_common(3)[-1][0]
    return first, Counter(s[2] for s in samples if s[1] == first).most_common(2)[-1][0]


def impossible(samples: list[Sample]) -> Draft:
    """Never accepted, unless by a fault."""
    seen = {token for sample in samples for token in sample}
    absent = next(token for token in range(VOCAB) if token not in seen)
    return absent, absent


DRAFTS = {choose.__name__: choose for choose in (likely, unlikely, impossible)}


@pytest.fixture(scope="module")
def scripted_small(
    target: str,
    plain_small: Sampler,
    script: Script,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Sampler]:
    folder = tmp_path_factory.mktemp("scripted")
    engine = scripted_engine(target, folder, script, seed=1, **SMALL)
    yield Sampler(engine, plain_small.prompt)
    engine.close()


@pytest.mark.parametrize("kind", list(DRAFTS))
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_the_distribution_is_the_targets(
    scripted_small: Sampler,
    script: Script,
    expected: Expected,
    setting: str,
    kind: str,
) -> None:
    draft = DRAFTS[kind](expected[setting])
    script.set(mode="chain", tokens=list(draft))
    got, drafted, accepted = scripted_small.draw(SETTINGS[setting])
    assert drafted == sum(2 + (sample[1] != draft[0]) for sample in got)
    assert accepted == sum(accepted_of(sample, draft) for sample in got)
    mine, theirs = cells(got, draft), cells(expected[setting], draft)
    values = {n: p_value(mine[n], theirs[n]) for n in mine if len(mine[n]) + len(theirs[n]) > 200}
    if kind == "likely":
        assert SAMPLES // 10 < accepted < drafted - SAMPLES // 10
        assert len(values) == 5
    assert len(values) >= 3
    assert min(values.values()) > LEVEL, values


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_usual_faults_are_seen(expected: Expected, again: Expected, setting: str) -> None:
    """The test of the test: no alarm without a fault, and one for each fault that is put in."""
    right, samples = expected[setting], again[setting]
    assert worst(samples, right) > LEVEL
    draft = likely(right)
    one, other = cells(samples, draft), cells(right, draft)

    first = "verified first"
    fresh = iter(other[first])
    resampled = [token if token == draft[0] else next(fresh) for token in one[first]]
    assert p_value(resampled, other[first]) < LEVEL, "a residual with the rejected token in it"

    rejected = [i for i, token in enumerate(one[first]) if token != draft[0]]
    missed = list(one[first])
    for i in rejected[::5]:
        missed[i] = draft[0]
    assert p_value(missed, other[first]) < LEVEL, "one rejection in five missed"

    for name in ("bonus after two", "no draft, after a rejected token"):
        mode = Counter(other[name]).most_common(1)[0][0]
        assert p_value([mode] * len(one[name]), other[name]) < LEVEL, f"argmax, {name}"
    shifted = cells([(s[0], s[1], s[3], s[2]) for s in samples], draft)
    name = "verified after an accepted token"
    assert p_value(shifted[name], other[name]) < LEVEL, "the distribution of another position"


def worst(got: list[Sample], expected: list[Sample]) -> float:
    return min(p_value([s[i] for s in got], [s[i] for s in expected]) for i in (1, 2, 3))


STOCK = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
HEADS = {"method": "specx:medusa", "num_speculative_tokens": 3, "min_probability": 0.0}
DRAFT_MODEL = {**HEADS, "method": "specx:draft_model"}
PROPOSERS: dict[str, dict[str, Any]] = {
    "specx:ngram": {"method": "specx:ngram", "num_speculative_tokens": 3, "min_probability": 0.0},
    "stock ngram, cut by the controller": {**STOCK, "specx": {"controller": {"k_min": 1}}},
    "specx:medusa, random heads": HEADS,
    "specx:medusa, trained heads": HEADS,
    "specx:eagle, the target's own state": {**HEADS, "method": "specx:eagle"},
    "specx:draft_model, likeliest tokens": DRAFT_MODEL,
    "specx:draft_model, drawn": {**DRAFT_MODEL, "probabilistic": True},
    "specx:draft_model, drawn, as long as pays, short steps": {
        **DRAFT_MODEL,
        "probabilistic": True,
        "token_cost": 0.1,
    },
    "specx:medusa, trained heads, 3 requests at a time": HEADS,
    "specx:medusa, trained heads, one request at a time": HEADS,
}
SHORT_STEPS: dict[str, Any] = {"max_num_batched_tokens": 64}
"""Not all requests fit in a step: drafts are cut, or wait."""
LIMITS = {"3 requests": 3, "one request": 1}
FEW = {"random": 40, "trained": SAMPLES // 4, "draft_model": SAMPLES // 10}
"""Accepted tokens that heads and drafts come to at least."""


@pytest.fixture(scope="module")
def trained(target: str, plain_small: Sampler, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    return trained_heads(folder / "heads", target, list(plain_small.prompt))


def chosen(name: str, of: dict[str, int], otherwise: int) -> int:
    return next((value for key, value in of.items() if key in name), otherwise)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow)
        if "at a time" in name or "draft_model" in name
        else name
        for name in PROPOSERS
    ],
)
def proposer_small(
    request: pytest.FixtureRequest,
    target: str,
    plain_small: Sampler,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Sampler, int]]:
    """With the number of tokens that it accepts at least."""
    folder = tmp_path_factory.mktemp("proposer")
    config = dict(PROPOSERS[request.param])
    if "eagle" in request.param:
        config["model"] = random_eagle(folder / "draft", target, 1, copying=True)
    elif "draft_model" in request.param:
        config["model"] = perturbed(folder / "draft", target)
    elif "random" in request.param:
        config["model"] = random_heads(folder / "heads", 128)
    elif "trained" in request.param:
        config["model"] = request.getfixturevalue("trained")
    engine = Engine(
        folder / "log",
        model=target,
        speculative_config=config,
        seed=1,
        **{"max_num_seqs": chosen(request.param, LIMITS, 64), **SMALL},
        **(SHORT_STEPS if "short steps" in request.param else {}),
    )
    yield Sampler(engine, plain_small.prompt), chosen(request.param, FEW, 40)
    engine.close()


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_proposer_has_the_targets_distribution(
    proposer_small: tuple[Sampler, int], expected: Expected, setting: str
) -> None:
    sampler, few = proposer_small
    got, drafted, accepted = sampler.draw(SETTINGS[setting])
    assert few < accepted < drafted - SAMPLES // 20
    assert worst(got, expected[setting]) > LEVEL


def test_the_shims_are_still_needed(
    target: str, plain_small: Sampler, expected: Expected, tmp_path: Path
) -> None:
    """Stock vLLM on a CPU fails in both ways. When it does not, that shim can go."""
    engine = Engine(
        tmp_path / "log",
        env={"VLLM_PLUGINS": ""},
        model=target,
        speculative_config=dict(STOCK),
        seed=1,
        **SMALL,
    )
    stock = Sampler(engine, plain_small.prompt)
    try:
        got, drafted, _ = stock.draw(SETTINGS["temperature"])
        assert drafted > SAMPLES // 10
        assert worst(got, expected["temperature"]) < LEVEL, "remove shims.mend_expand_kernel"
        with pytest.raises(EngineError, match="max\\(\\): Expected reduction dim"):
            stock.draw(SETTINGS["top_k"])
            pytest.fail("a lone top_k does not end the engine any more: remove its shim")
    finally:
        engine.close()
