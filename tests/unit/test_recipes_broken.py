"""Recipes and pairings that cannot work: one sentence that names the key and the fix, status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.eagle import random_eagle
from tests.support.heads import random_heads
from tests.support.twins import SIZES, tokenizer, twin
from vllm_specx.cli import main

Refused = Callable[..., str]
WORDS = [f"w{i}" for i in range(SIZES["vocab_size"])]
DRAFT = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with 6 attention heads and 2 key-value heads, and what may draft for it, or not."""
    folder = tmp_path_factory.mktemp("models")
    twin(folder / "target", "llama")
    for name, changes in {
        "draft": DRAFT,
        "larger": {"num_hidden_layers": 9},
        "other": DRAFT,
        "padded": {**DRAFT, "vocab_size": SIZES["vocab_size"] + 8},
        "quantized": DRAFT,
        "truncated": DRAFT,
    }.items():
        twin(folder / name, "llama", **changes)
    for name in ("target", "draft", "larger", "padded", "quantized", "truncated"):
        tokenizer(str(folder / name), WORDS)
    tokenizer(str(folder / "other"), [f"v{i}" for i in range(len(WORDS))])
    config = json.loads((folder / "quantized" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    random_heads(folder / "medusa", SIZES["hidden_size"])
    random_heads(folder / "medusa-wide", 2 * SIZES["hidden_size"])
    random_heads(folder / "medusa-truncated", SIZES["hidden_size"])
    random_eagle(folder / "eagle", str(folder / "target"), 3, vocab=32)
    random_eagle(folder / "eagle-layer", str(folder / "target"), 1)
    tensor = {"fc.weight": torch.zeros(3, 3)}
    save_file(tensor, folder / "eagle-layer" / "model.safetensors")
    for name in ("truncated/model.safetensors", "medusa-truncated/medusa_lm_head.safetensors"):
        file = folder / name
        file.write_bytes(file.read_bytes()[:-100])
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text('{"model_type": "medusa"}')
    return folder


@pytest.fixture
def refused(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refused:
    """Serve a recipe of this text that must be refused; what was said."""
    for name in ("MODEL", "HOST", "PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(text: str, *flags: str) -> str:
        path = tmp_path / "r.yaml"
        path.write_text(text.replace("MODELS", str(models)))
        assert main(["serve", str(path), "--dry-run", *flags]) == 2
        return only_sentence(*capsys.readouterr())

    return run


def only_sentence(out: str, err: str) -> str:
    assert out == ""
    said = err.strip()
    assert said.startswith("vllm-specx: "), said
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    assert len(said) < 700, said
    return said


def pair(speculation: str, serve: str = "", more: str = "") -> str:
    return f"model: MODELS/target\nspeculation: {{{speculation}}}\nserve: {{{serve}}}\n{more}\n"


NGRAM = "method: 'specx:ngram'"
MODEL = "method: 'specx:draft_model', model: MODELS/"
STOCK = "method: draft_model, model: MODELS/"
MEDUSA = "method: 'specx:medusa', model: MODELS/"
EAGLE = "method: 'specx:eagle', model: MODELS/"


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        # the file
        ("- method: specx:ngram\n", "is a list", "must be a mapping"),
        ("", "is empty", "must be a mapping"),
        ("model: [unclosed\n", "line", "not valid YAML"),
        ("model: x\n", "'speculation' is missing", ""),
        (pair(NGRAM, more="modle: y"), "'modle'", "did you mean 'model'"),
        (pair(NGRAM, more="vllm: {}"), "'vllm'", "'serve'"),
        (pair(NGRAM, more="scenario: poetry"), "'scenario' is 'poetry'", "'code'"),
        (pair(NGRAM, more="hardware: {tested: []}"), "'hardware.tested'", "did you mean 'tested_on'"),
        (pair(NGRAM, more="notes: text"), "'notes' is 'text'", "list"),
        (pair(NGRAM, more="extends: nowhere.yaml"), "'extends' is 'nowhere.yaml'", "relative"),
        (pair(NGRAM, more="extends: r.yaml"), "'extends' is 'r.yaml'", "end the chain"),
        (pair(NGRAM, more="extends: [a]"), "'extends'", "one recipe"),
        # flags of vllm serve
        ("model: MODELS/target\nspeculation: null\nserve: 3\n", "'serve' is 3", "dictionary"),
        (pair(NGRAM, "tensor-paralel-size: 2"), "'serve.tensor-paralel-size'", "did you mean 'tensor-parallel-size'"),
        (pair(NGRAM, "tensor-parallel-size: two"), "'serve.tensor-parallel-size' is 'two'", "whole number"),
        (pair(NGRAM, "dtype: float8"), "'serve.dtype' is 'float8'", "one of auto, bfloat16"),
        (pair(NGRAM, "enforce-eager: 'yes'"), "'serve.enforce-eager' is 'yes'", "true or false"),
        (pair(NGRAM, "no-enforce-eager: true"), "'serve.no-enforce-eager'", "'enforce-eager: false'"),
        (pair(NGRAM, "spec-tokens: 3"), "'serve.spec-tokens'", "'speculation.num_speculative_tokens'"),
        (pair(NGRAM, "seed: 1, --seed: 2"), "'serve.seed' is given twice", "keep one"),
        (pair(NGRAM, "tensor-parallel-size: 4"), "'serve.tensor-parallel-size'", "to one of 1, 2."),
        (pair(NGRAM, "max-model-len: 100000"), "'serve.max-model-len'", "lower it"),
        (pair(NGRAM, more="gpus: {2: {tensor-parallel-size: 4}}"), "gpus.2", "correct its tensor-parallel-size"),
        (pair(NGRAM, more="gpus: {none: {}}"), "gpus", "valid integer"),
        # how to speculate
        (pair(NGRAM + ", num_speculative_tokens: 0"), "'speculation.num_speculative_tokens' is 0", "greater than or equal to 1"),
        (pair(NGRAM + ", num_speculative_tokens: 200"), "'speculation.num_speculative_tokens' is 200", "less than or equal to 128"),
        (pair(NGRAM + ", num_speculative_tokens: 2.5"), "'speculation.num_speculative_tokens' is 2.5", "valid integer"),
        (pair("method: specx:ngran"), "'specx:ngran'", "did you mean 'specx:ngram'"),
        (pair("num_speculative_tokens: 3"), "'speculation.method' is missing", ""),
        (pair("method: ngrams, num_speculative_tokens: 3"), "'speculation.method' is 'ngrams'", "did you mean 'ngram'"),
        (pair("method: ngram, num_speculative_token: 3"), "'speculation.num_speculative_token'", "did you mean 'num_speculative_tokens'"),
        (pair(NGRAM + ", max_mach: 3"), "'max_mach'", "did you mean 'max_match'"),
        (pair(NGRAM + ", model: MODELS/draft"), "'model'", "known:"),
        (pair(NGRAM, more="controller: {k_min: 4, k_max: 2}"), "k_min (4)", "swap them"),
        (pair(NGRAM, more="controller: fast"), "'controller", "fast"),
        (pair(NGRAM + ", controller: off", more="controller: off"), "controller is given twice", "keep one"),
        (pair(MODEL + "draft, draft_tensor_parallel_size: 2"), "draft_tensor_parallel_size is 2", "write 1"),
        # the target and the draft
        (pair(NGRAM).replace("MODELS/target", "MODELS/nowhere"), "no model folder", "the recipe's model"),
        (pair(NGRAM).replace("MODELS/target", "a model"), "'a model'", "org/name"),
        (pair("method: 'specx:draft_model'"), "'draft'", "'model' beside the method"),
        (pair(MODEL + "nowhere"), "'speculation.model'", "a path relative to the recipe or a hub name"),
        (pair(MODEL + "other"), "'speculation.model'", "target's family"),
        (pair(MODEL + "larger"), "'speculation.model'", "use a smaller model"),
        (pair(MODEL + "quantized"), "'speculation.model'", "original weights"),
        (pair(MODEL + "truncated"), "'speculation.model'", "copy it again"),
        (pair(STOCK + "padded"), "'speculation.model'", "specx:draft_model"),
        (pair(STOCK + "draft, draft_tensor_parallel_size: 1", "tensor-parallel-size: 2"), "'speculation.draft_tensor_parallel_size'", "specx:draft_model"),
        (pair(STOCK + "draft", "tensor-parallel-size: 2"), "'speculation.draft_tensor_parallel_size'", "other ranks"),
        (pair(MEDUSA + "nowhere"), "'speculation.model'", "a path relative to the recipe or a hub name"),
        (pair(MEDUSA + "empty"), "'speculation.model'", ""),
        (pair(MEDUSA + "medusa-wide"), "'speculation.model'", "trained for this target"),
        (pair(MEDUSA + "medusa-truncated"), "'speculation.model'", "copy it again"),
        (pair(EAGLE + "medusa"), "'speculation.model'", "specx:medusa"),
        (pair(EAGLE + "eagle-layer"), "'speculation.model'", ""),
        (pair(EAGLE + "eagle", "pipeline-parallel-size: 2"), "'serve.pipeline-parallel-size'", "tensor parallelism"),
    ],
)  # fmt: skip
def test_a_broken_recipe_is_refused_in_one_sentence(
    refused: Refused, text: str, key: str, fix: str
) -> None:
    said = refused(text)
    assert key in said
    assert fix in said


def test_what_is_broken_there_works_here(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the sentences above are about what they change."""
    path = tmp_path / "r.yaml"
    for speculation in (
        NGRAM,
        MODEL + "draft",
        STOCK + "draft",
        MEDUSA + "medusa",
        EAGLE + "eagle",
    ):
        path.write_text(pair(speculation).replace("MODELS", str(models)))
        assert main(["serve", str(path), "--dry-run"]) == 0, capsys.readouterr().err
        assert "vllm serve" in capsys.readouterr().out


def test_command_line_flags_are_examined_too(refused: Refused) -> None:
    assert "'serve.tensor-parallel-size'" in refused(pair(NGRAM), "--", "-tp", "4")
    assert "settings for 1 GPUs, not for 4" in refused(pair(NGRAM), "--gpus", "4")


def test_the_embedded_model_refuses_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in ("smollm2-135m-ngram", "smollm2-135m-auto"):
        assert main(["serve", recipe, "--dry-run", "--", "--tensor-parallel-size", "2"]) == 2
        said = only_sentence(*capsys.readouterr())
        assert "9 attention heads" in said
        assert "3 key-value heads" in said


@pytest.mark.parametrize(
    ("recipe", "flags", "said"),
    [
        ("smolm2-135m-ngram", [], "did you mean 'smollm2-135m-ngram'"),
        (".", [], "there is no recipe"),
        ("qwen2.5-7b-medusa", ["--dry-run"], "vllm-specx train medusa --target Qwen/Qwen2.5-7B"),
        ("qwen2.5-72b", ["--dry-run", "--gpus", "3"], "settings for 2, 4, 8 GPUs, not for 3"),
        ("llama-3-70b", ["--dry-run", "--", "-tp", "3"], "64 attention heads"),
    ],
)
def test_the_command_itself(recipe: str, flags: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_specx.cli", "serve", recipe, *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert said in only_sentence(done.stdout, done.stderr)
