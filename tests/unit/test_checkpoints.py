"""Checkpoints of every layout give the same heads; what does not fit is one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import synthetic_heads as synthetic
from vllm_specx.draft.checkpoints import (
    CheckpointError,
    TargetShape,
    load_heads,
    save_for_vllm,
)

TARGET = TargetShape(synthetic.HIDDEN, synthetic.VOCAB)
SHARED = Path(os.environ.get("SPECX_SHARED", Path(__file__).parents[3] / "shared"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
def test_faster_decoding_names(tmp_path: Path, suffix: str, prefix: str) -> None:
    tensors = synthetic.old_names(prefix)
    if suffix == ".pt":
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"})
    )
    heads = load_heads(tmp_path, TARGET)
    assert heads.conditioning == "none" and heads.depth == synthetic.HEADS
    assert heads.blocks is not None and torch.equal(heads.blocks, synthetic.blocks())
    assert heads.biases is not None and heads.biases[2, 1, 0] == pytest.approx(0.2)
    assert heads.lm_heads is not None and torch.equal(heads.lm_heads, synthetic.lm_heads())


def test_a_file_alone_is_enough(tmp_path: Path) -> None:
    torch.save({"state_dict": synthetic.old_names(bias=False, own=False)}, tmp_path / "m.pt")
    heads = load_heads(tmp_path / "m.pt", TARGET)
    assert heads.biases is None and heads.lm_heads is None and heads.vocab is None


def test_vllm_names_with_a_shared_lm_head(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, synthetic.vllm_names(), synthetic.vllm_config())
    heads = load_heads(folder, TARGET)
    assert heads.lm_heads is not None and heads.lm_heads.shape[0] == 1


def test_vllm_names_with_a_token_map(tmp_path: Path) -> None:
    """lm_head with rows for the whole vocabulary or for the reduced one."""
    ids = torch.tensor([7, 3, 199, 20])
    whole = {**synthetic.vllm_names(), "token_map": ids}
    config = synthetic.vllm_config(truncated_vocab_size=4)
    heads = load_heads(synthetic.write(tmp_path / "a", whole, config), TARGET)
    assert heads.vocab is not None and heads.vocab.token_ids.tolist() == ids.tolist()
    rows = {**whole, "lm_head.weight": whole["lm_head.weight"][ids].clone()}
    same = load_heads(synthetic.write(tmp_path / "b", rows, config), TARGET)
    assert heads.lm_heads is not None and same.lm_heads is not None
    assert torch.equal(heads.lm_heads, same.lm_heads)


def test_eagle_offsets_are_read_too(tmp_path: Path) -> None:
    tensors = synthetic.vllm_names(rows=3)
    tensors["d2t"] = torch.tensor([4, 4, 10])
    heads = load_heads(synthetic.write(tmp_path, tensors, synthetic.vllm_config()), TARGET)
    assert heads.vocab is not None and heads.vocab.token_ids.tolist() == [4, 5, 12]


def test_the_targets_dtype(tmp_path: Path) -> None:
    target = TargetShape(synthetic.HIDDEN, synthetic.VOCAB, torch.bfloat16)
    heads = load_heads(synthetic.write(tmp_path, synthetic.vllm_names(), None), target)
    assert heads.blocks is not None and heads.blocks.dtype == torch.bfloat16


class _Code:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/specx-was-here",))


def test_code_is_never_run(tmp_path: Path) -> None:
    torch.save({"x": _Code()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="never run"):
        load_heads(tmp_path / "m.pt", TARGET)
    assert not Path("/tmp/specx-was-here").exists()


def _broken(tmp_path: Path, what: str) -> Path:
    tensors, config = synthetic.vllm_names(), synthetic.vllm_config()
    if what == "hidden":
        config = synthetic.vllm_config(hidden_size=64)
    elif what == "shape":
        tensors["blocks.1.layers.0.weight"] = torch.zeros(16, 16)
    elif what == "vocab":
        config = synthetic.vllm_config(vocab_size=1000)
    elif what == "rows":
        tensors["lm_head.weight"] = torch.zeros(150, synthetic.HIDDEN)
    elif what == "missing":
        del tensors["blocks.1.layers.1.weight"]
    elif what == "int8":
        tensors["blocks.0.layers.0.weight"] = torch.zeros(32, 32, dtype=torch.int8)
    elif what == "nan":
        tensors["blocks.0.layers.0.weight"][0, 0] = torch.nan
    elif what == "map":
        config = synthetic.vllm_config(truncated_vocab_size=100)
    elif what == "mapsize":
        tensors["token_map"] = torch.arange(50)
        config = synthetic.vllm_config(truncated_vocab_size=100)
    elif what == "mapid":
        tensors["token_map"] = torch.arange(180, 230)
    elif what == "format":
        config = synthetic.vllm_config(specx={"format": 99})
    elif what == "other":
        tensors = {"model.layers.0.weight": torch.zeros(3, 3)}
    folder = synthetic.write(tmp_path, tensors, config)
    if what == "truncated":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:5000])
    elif what == "json":
        (folder / "config.json").write_text("{")
    elif what == "empty":
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hidden", "hidden_size 64, but this target has 32"),
        ("shape", r"'blocks.1.layers.0.weight' has shape \[16, 16\]"),
        ("vocab", "vocab_size 1000, but this target has 200"),
        ("rows", r"'lm_head.weight' has shape \[150, 32\]"),
        ("missing", "no 'blocks.1.layers.1.weight'"),
        ("int8", "'blocks.0.layers.0.weight' is int8"),
        ("nan", "not finite"),
        ("map", "no token_map"),
        ("mapsize", "token_map has 50 tokens, but the configuration says 100"),
        ("mapid", "has the id 229"),
        ("format", "format 99"),
        ("other", "has no Medusa heads"),
        ("truncated", "may be truncated"),
        ("json", "config.json cannot be read"),
        ("empty", "has no weights"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_heads(_broken(tmp_path, what), TARGET)
    assert "\n" not in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_heads(tmp_path / "no", TARGET)


@pytest.mark.parametrize("own", [False, True])
def test_what_is_written_for_vllm_is_the_same_heads(tmp_path: Path, own: bool) -> None:
    names = synthetic.old_names(own=own)
    heads = load_heads(synthetic.write(tmp_path / "a", names, None), TARGET)
    lm_head = synthetic.lm_heads(seed=5, count=1)[0]
    save_for_vllm(heads, lm_head, tmp_path / "b")
    again = load_heads(tmp_path / "b", TARGET)
    assert heads.blocks is not None and again.blocks is not None and again.lm_heads is not None
    assert torch.equal(heads.blocks, again.blocks)
    assert torch.equal(again.lm_heads, synthetic.lm_heads() if own else lm_head[None])


def test_the_prototype_heads() -> None:
    folder = SHARED / "heads" / "medusa_8k"
    if not folder.is_dir():
        pytest.skip("the prototype heads are not here")
    heads = load_heads(folder, TargetShape(576, 49152, torch.bfloat16))
    assert heads.depth == 4 and heads.vocab is not None and len(heads.vocab) == 8192
    assert heads.lm_heads is not None and heads.lm_heads.shape == (1, 8192, 576)
