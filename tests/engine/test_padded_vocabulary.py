"""vLLM's own draft_model with a draft whose vocabulary is padded otherwise than the target's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, EngineError, grown, ids
from tests.support.twins import qwen_pair, tokenizer, twin

pytestmark = pytest.mark.engine
SMALL: dict[str, Any] = {"max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
PROMPTS = [[i, 5, 9 * i, 7] for i in range(1, 7)]
ASKED: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}


def stock(draft: str | Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, **more}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and as its draft the same model with fewer rows of padding."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("pair")
    target, _ = qwen_pair(folder)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(1008)
    model.save_pretrained(folder / "same")
    shutil.copy(Path(target) / "tokenizer.json", folder / "same")
    return target, str(folder / "same")


def start(target: str, folder: Path, speculative: dict[str, Any] | None) -> Engine:
    return Engine(folder / "log", model=target, speculative_config=speculative, **SMALL)


def test_without_specx_it_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    with pytest.raises(EngineError, match="should have the same vocabulary size"):
        start(target, tmp_path, stock(draft))


def test_beside_specx_no_token_changes(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    plain = start(target, tmp_path, None)
    expected = ids(plain.tokens(PROMPTS, **ASKED))
    plain.close()
    engine = start(target, tmp_path, stock(draft, specx={"controller": {"static_k": 3}}))
    try:
        before = engine.counters()
        assert ids(engine.tokens(PROMPTS, **ASKED)) == expected
        after = engine.counters()
        drafted = grown(before, after, "spec_decode_num_draft_tokens")
        assert grown(before, after, "spec_decode_num_accepted_tokens") > 0.7 * drafted > 0
    finally:
        engine.close()


def test_what_does_not_go_together_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    other = twin(tmp_path / "other", vocab_size=64)
    tokenizer(other, [f"v{i}" for i in range(64)])
    larger = twin(tmp_path / "larger", vocab_size=1100)
    for model, more, said in (
        (other, {}, "token 0, the first of"),
        (larger, {}, "use specx:draft_model"),
        (draft, {"draft_sample_method": "probabilistic"}, "use specx:draft_model"),
    ):
        with pytest.raises(EngineError, match=said):
            start(target, tmp_path, stock(model, specx={}, **more))
