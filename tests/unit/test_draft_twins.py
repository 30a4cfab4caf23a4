"""Drafts for benchmarks: without some layers, or of random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import draft_twins
from benchmarks.lib.errors import BenchError
from tests.support.twins import tokenizer, twin
from vllm_specx.draft.draft_model_checkpoint import load_draft_model


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_SPECX_CACHE", str(tmp_path / "cache"))
    path = twin(tmp_path / "base", "llama", num_hidden_layers=5)
    tokenizer(path, [f"w{i}" for i in range(96)])
    return Path(path)


def test_layers_are_left_out_and_the_rest_stays(base: Path) -> None:
    folder = draft_twins.make("pruned:1-2,4", base)
    whole, pruned = (load_file(each / "model.safetensors") for each in (base, folder))
    assert len(load_draft_model(folder, torch.float32).layers) == 2
    for kept, source in ((0, 0), (1, 3)):
        name = "model.layers.{}.mlp.down_proj.weight"
        assert torch.equal(pruned[name.format(kept)], whole[name.format(source)])
    assert (folder / "tokenizer.json").is_file()
    assert draft_twins.make("pruned:1-2,4", base) == folder


def test_random_weights_have_the_models_shapes(base: Path) -> None:
    folder = draft_twins.make("random", base)
    whole, random = (load_file(each / "model.safetensors") for each in (base, folder))
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in random.items()}
    assert not torch.equal(whole["lm_head.weight"], random["lm_head.weight"])


@pytest.mark.parametrize("model", ["pruned:", "pruned:a", "pruned:3-", "pruned:9", "pruned:0-4"])
def test_what_cannot_be_left_out(base: Path, model: str) -> None:
    with pytest.raises(BenchError, match="layers"):
        draft_twins.make(model, base)
