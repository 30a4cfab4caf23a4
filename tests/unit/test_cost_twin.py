"""The cost twin computes what the small model does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import cost_twin
from benchmarks.lib.errors import BenchError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, in the embedded model's layout, with its tokenizer's absence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal_to_the_bit(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("VLLM_SPECX_CACHE", str(tmp_path))
    folder = cost_twin.make_twin(5, base)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 8
    one, other = (AutoModelForCausalLM.from_pretrained(f, dtype=dtype) for f in (base, folder))
    assert other.num_parameters() > 1.5 * one.num_parameters()
    ids = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(one(ids).logits, other(ids).logits)


def test_it_is_made_once_and_leaves_nothing_half_done(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SPECX_CACHE", str(tmp_path))
    real = cost_twin.extra_layers

    def broken(*arguments: object) -> dict[str, torch.Tensor]:
        raise OSError("disk full")

    monkeypatch.setattr(cost_twin, "extra_layers", broken)
    with pytest.raises(OSError, match="disk full"):
        cost_twin.make_twin(2, base)
    assert [each for each in tmp_path.iterdir() if each.is_dir()] == []
    monkeypatch.setattr(cost_twin, "extra_layers", real)
    folder = cost_twin.make_twin(2, base)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert cost_twin.make_twin(2, base) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_no_layers_is_no_twin() -> None:
    with pytest.raises(BenchError, match="at least 1"):
        cost_twin.make_twin(0)
