"""Which draft models are read, and which tokens they may draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.twins import SIZES, tokenizer, twin
from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.draft_model_checkpoint import load_draft_model
from vllm_specx.draft.vocabularies import Draftable, draftable, read_vocabulary


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(twin(tmp_path_factory.mktemp("qwen") / "qwen", "qwen2"))


@pytest.fixture
def copy(qwen: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen, tmp_path / "copy"))


def configure(folder: Path, **changes: Any) -> None:
    """None takes a key out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    file.write_text(json.dumps(kept))


def change(folder: Path, changes: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changes(tensors)
    save_file(tensors, file)


def refusal(folder: Path) -> str:
    """The same sentence with and without the weights' values."""
    said = set()
    for values in (False, True):
        with pytest.raises(CheckpointError) as refused:
            load_draft_model(folder, torch.float32, values=values)
        said.add(str(refused.value))
    assert len(said) == 1, said
    assert "\n" not in said.copy().pop()
    return said.pop()


def test_shapes_are_known_without_reading_the_weights(qwen: Path) -> None:
    whole = load_draft_model(qwen, torch.bfloat16)
    shapes = load_draft_model(qwen, torch.bfloat16, values=False)
    assert shapes.embeddings.is_meta and not whole.embeddings.is_meta
    for a, b in ((whole, shapes), (whole.layers[2], shapes.layers[2])):
        for name, part in vars(a).items():
            if isinstance(part, torch.Tensor):
                assert part.shape == vars(b)[name].shape
                assert part.dtype == vars(b)[name].dtype == torch.bfloat16
    assert whole.layers[0].qkv_bias is not None
    assert not whole.tied


def test_a_bare_model_is_one_with_tied_embeddings(copy: Path) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(copy, bare)
    configure(copy, tie_word_embeddings=True)
    assert load_draft_model(copy, torch.float32).tied


LAYER = "model.layers.1."


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda tensors: tensors.__delitem__(name))


def _put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda tensors: tensors.__setitem__(name, tensor))


def _set(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: configure(folder, **changes)


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "there is no draft model"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights as .safetensors"),
        (_write("config.json", "{"), "cannot be read"),
        (_write("config.json", "[]"), "must be a JSON mapping"),
        (_set(model_type=None), "no 'model_type'"),
        (_set(model_type="gpt2"), "'gpt2' are not read; only those of Llama, Qwen2, Qwen3"),
        (_set(model_type="qwen2_moe"), "'qwen2_moe' are not read"),
        (_set(hidden_act="gelu"), "activation 'gelu'"),
        (_set(use_sliding_window=True), "sliding attention window"),
        (_set(quantization_config={"quant_method": "awq"}), "is quantized ('awq')"),
        (_set(num_hidden_layers=None), "no 'num_hidden_layers'"),
        (_set(vocab_size=None), "no 'vocab_size'"),
        (_set(num_attention_heads=5), "do not divide"),
        (_set(num_hidden_layers=2), "'model.layers.2.input_layernorm.weight'"),
        (_set(num_hidden_layers=4), "no 'model.layers.3."),
        (_set(vocab_size=97), "'model.embed_tokens.weight' has shape [96, 48], but its config"),
        (_set(tie_word_embeddings="yes"), "'tie_word_embeddings'"),
        (_drop("lm_head.weight"), "no 'lm_head.weight'"),
        (_drop(f"{LAYER}mlp.up_proj.weight"), f"no '{LAYER}mlp.up_proj.weight'"),
        (_drop(f"{LAYER}self_attn.k_proj.bias"), f"no '{LAYER}self_attn.k_proj.bias'"),
        (_put(f"{LAYER}self_attn.q_norm.weight", torch.ones(8)), "norms of queries and keys"),
        (_put(f"{LAYER}mlp.experts.0.up.weight", torch.ones(8)), "a mixture of experts"),
        (_put("model.norm.weight", torch.ones(47)), "has shape [47]"),
        (_put("model.norm.weight", torch.ones(48, dtype=torch.int8)), "quantized weights"),
        (
            _write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
            "has no b.safetensors",
        ),
        (_write("model.safetensors.index.json", "{}"), "is no index"),
        (_truncate, "may be truncated"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    copy: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(copy)
    assert said in refusal(copy)


def test_values_that_are_not_finite(copy: Path) -> None:
    _put("model.norm.weight", torch.full((48,), torch.nan))(copy)
    with pytest.raises(CheckpointError, match="not finite"):
        load_draft_model(copy, torch.float32)


WORDS = [f"w{i}" for i in range(80)]


def vocabularies(
    folder: Path, draft: list[str], added: tuple[str, ...] = ()
) -> tuple[Any, Any, tuple[str, str]]:
    """Of a target of WORDS and <end>, and of a draft."""
    for name, words, more in (("target", WORDS, ("<end>",)), ("draft", draft, added)):
        (folder / name).mkdir()
        tokenizer(str(folder / name), words, more)
    paths = str(folder / "target"), str(folder / "draft")
    return read_vocabulary(paths[0]), read_vocabulary(paths[1]), paths


def test_one_tokenizer_with_two_paddings(tmp_path: Path) -> None:
    target, draft, names = vocabularies(tmp_path, WORDS, ("<end>",))
    assert draftable(target, draft, rows=(96, 128), names=names) == Draftable(81)
    assert draftable(target, draft, rows=(128, 96), names=names) == Draftable(81)
    # Rows that a checkpoint does not have are never drafted either.
    assert draftable(target, draft, rows=(96, 70), names=names) == Draftable(70)


def test_other_added_tokens_are_never_drafted(tmp_path: Path) -> None:
    target, draft, names = vocabularies(tmp_path, WORDS, ("<stop>", "<tool>"))
    assert draftable(target, draft, rows=(96, 96), names=names) == Draftable(81, (80,))
    assert draftable(draft, target, rows=(96, 96), names=names) == Draftable(81, (80,))


def test_another_tokenizer_is_refused_and_the_first_difference_named(tmp_path: Path) -> None:
    words = [*WORDS[:30], "x", *WORDS[31:50], "y", *WORDS[51:]]
    target, draft, names = vocabularies(tmp_path, words, ("<end>",))
    with pytest.raises(CheckpointError) as refused:
        draftable(target, draft, rows=(96, 96), names=names)
    said = str(refused.value)
    assert (
        "token 30, the first of 2 that differ, is 'w30' in the target and 'x' in the draft" in said
    )
    assert names[1] in said and "\n" not in said


def test_without_a_tokenizer_it_is_believed_and_said(
    tmp_path: Path, qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft, names = vocabularies(tmp_path, WORDS)
    assert read_vocabulary(qwen) is None
    for a, b, name in ((None, draft, names[0]), (target, None, names[1])):
        caplog.clear()
        rows = (90, SIZES["vocab_size"])
        assert draftable(a, b, rows=rows, names=names) == Draftable(90)
        assert name in caplog.text and "no tokenizer" in caplog.text


def test_the_embedded_model_and_itself() -> None:
    from vllm_specx.models.embedded import checkpoint

    vocabulary = read_vocabulary(checkpoint("embedded:smollm2-135m-instruct"))
    assert vocabulary is not None
    ids = draftable(vocabulary, vocabulary, rows=(49152, 49152), names=("a", "b"))
    assert ids == Draftable(49152)
