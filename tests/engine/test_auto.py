"""Two sources of drafts in the real engine: tokens stay, and both are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import texts
from tests.support.engine import Engine, grown, ids
from tests.support.twins import without_layers

pytestmark = pytest.mark.engine
HEADS = Path(__file__).parents[2] / "recipes" / "heads"
SHORT = {"max_tokens": 64, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("smollm2-135m-hydra", marks=pytest.mark.slow),
        "smollm2-135m-eagle3",
        pytest.param("a draft model", marks=pytest.mark.slow),
    ],
)
def auto(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("auto")
    draft = str(HEADS / request.param)
    if request.param == "a draft model":
        draft = without_layers(folder / "draft", model, range(25, 28))
    engine = Engine(
        folder / "log",
        model=model,
        # What pays must not depend on this machine: drafts by the assumed costs, K as configured.
        speculative_config={
            "method": "specx:auto",
            "model": draft,
            "controller": "off",
        },
    )
    yield engine
    engine.close()


def test_tokens_are_those_of_no_speculation(auto: Engine, plain: Engine) -> None:
    expected = ids(plain.chat(texts.ALL[:8], batch=8, **SHORT))
    for batch in (1, 8):
        count = 3 if batch == 1 else 8
        before = auto.counters()
        assert ids(auto.chat(texts.ALL[:count], batch=batch, **SHORT)) == expected[:count]
        after = auto.counters()
        assert grown(before, after, "spec_decode_num_accepted_tokens") > 0


def test_both_sources_are_used(auto: Engine) -> None:
    before = auto.draft_sources()
    auto.chat(texts.ALL[8:], batch=1, max_tokens=64, ignore_eos=True)
    after = auto.draft_sources()
    assert after["trained"] - before["trained"] > 3, "new text is the trained draft's"
    line = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
    auto.chat([f"Repeat this line ten times: {line}"], max_tokens=120, ignore_eos=True)
    later = auto.draft_sources()
    assert later["ngram"] - after["ngram"] > 5, "what comes back is the n-gram's"
