"""Draft trees on a GPU, as far as it can be seen without one: which layers get the kernel, which CUDA graphs
there are, and an engine on the CPU with vLLM's Triton attention and ours, interpreted."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from benchmarks import gpu
from tests.support.tiny import VOCAB, attentive_llama
from tests.support.tree_gpu import run
from vllm_specx.engine import contract, seams, tree_attention, tree_gpu, tree_graphs

PIECEWISE = CompilationConfig(cudagraph_mode=CUDAGraphMode.PIECEWISE)
PLAIN: dict[str, Any] = {
    "num_heads": 4,
    "head_size": 64,
    "scale": 0.125,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
}


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_gpu, "DEVICE", "cpu")


def layer_of(kind: Any = TritonAttentionImpl, cache: Any = None, **changes: Any) -> Any:
    cache = torch.zeros(3, 2, 16, 128, dtype=torch.bfloat16) if cache is None else cache
    return SimpleNamespace(impl=kind(**{**PLAIN, **changes}), kv_cache=cache)


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize("kind", [FlashAttentionImpl, TritonAttentionImpl])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_that_get_the_kernel(kind: Any, dtype: torch.dtype) -> None:
    for name in ("auto", str(dtype).removeprefix("torch.")):
        cache = torch.zeros(3, 2, 16, 128, dtype=dtype)
        assert tree_gpu.is_known(layer_of(kind, cache, kv_cache_dtype=name))


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"alibi_slopes": [0.5] * 4},
        {"use_alibi_sqrt": True},
        {"chunk_lookback": 1},
        {"sinks": torch.zeros(4)},
        {"attn_type": "encoder_only"},
        {"kv_sharing_target_layer_name": "model.layers.0"},
        {"kv_cache_dtype": "fp8"},
        {"head_size": 256, "cache": torch.zeros(3, 2, 16, 512)},
        {"cache": torch.zeros(3, 2, 16, 128, dtype=torch.uint8)},
        {"cache": torch.zeros(3, 2, 16, 64)},
        {"cache": torch.zeros(2, 3, 2, 16, 64)},
        {"cache": torch.zeros(3, 2, 128, 16).transpose(2, 3)},
        {"cache": torch.zeros(3, 2, 16, 128, device="meta")},
        {"cache": []},
    ],
)
def test_layers_that_do_not(changes: dict[str, Any]) -> None:
    assert not tree_gpu.is_known(layer_of(**changes))


@pytest.mark.usefixtures("cpu_as_gpu")
def test_other_backends_do_not() -> None:
    """Nor what is derived from one that does, or only has its name."""
    assert not tree_gpu.is_known(layer_of(FlashAttentionDiffKVImpl))
    of_its_name = type("TritonAttentionImpl", (TritonAttentionImpl,), {})
    assert not tree_gpu.is_known(layer_of(of_its_name))


def test_a_device_is_told_by_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(tree_gpu, "works", lambda layer: tried.append(layer) or True)
    layers = [layer_of(), layer_of()]
    assert not tree_attention.can_be_ours(layers, PIECEWISE), "a CPU with a GPU's backend"
    assert not tree_attention.can_be_ours([], PIECEWISE)
    assert not tried
    monkeypatch.setattr(tree_gpu, "DEVICE", "cpu")
    assert tree_attention.can_be_ours(layers, PIECEWISE)
    assert tried == layers[1:], "layers of one kind are tried once"
    assert not tree_attention.can_be_ours([*layers, layer_of(sliding_window=64)], PIECEWISE)


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize(
    "compilation",
    [
        {"cudagraph_mode": "FULL"},
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_attn_quant": True}},
    ],
)
def test_graphs_and_fusions_that_we_have_no_part_in(
    compilation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_gpu, "works", lambda layer: True)
    assert tree_gpu.can_be_ours([layer_of()], PIECEWISE)
    assert not tree_gpu.can_be_ours([layer_of()], CompilationConfig(**compilation))


TREE = {"specx": {"proposer": "ngram", "tree": {"nodes": 16}}}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.check()  # Imports modules of vLLM that would look for CUDA's libraries.
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    # Engines that ran in this process have set up vLLM's logging.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def mode_of(asked: str | None, own: dict[str, Any], **keywords: Any) -> CUDAGraphMode | None:
    compilation = CompilationConfig() if asked is None else CompilationConfig(cudagraph_mode=asked)
    before = compilation.cudagraph_mode
    arguments = EngineArgs("m", additional_config=own, compilation_config=compilation, **keywords)
    tree_graphs.leave_attention_out(arguments)
    assert compilation.cudagraph_mode == before, "what the user gave is not changed"
    found: CUDAGraphMode | None = arguments.compilation_config.cudagraph_mode
    return found


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("asked", [None, "FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_full_graphs_become_piecewise(asked: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=tree_graphs.logger.name):
        assert mode_of(asked, TREE) == CUDAGraphMode.PIECEWISE
    assert caplog.text.count("cudagraph_mode is PIECEWISE") == 1
    untouched = CompilationConfig().cudagraph_mode if asked is None else CUDAGraphMode[asked]
    assert mode_of(asked, {"specx": {"proposer": "ngram"}}) == untouched
    assert mode_of(asked, {}) == untouched
    assert mode_of(asked, TREE, enforce_eager=True) == untouched


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("asked", ["PIECEWISE", "NONE"])
def test_other_graphs_stay(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=tree_graphs.logger.name):
        assert mode_of(asked, TREE) == CUDAGraphMode[asked]
    assert "vllm_specx" not in caplog.text


def test_graphs_are_left_alone_without_a_gpu() -> None:
    assert mode_of("FULL", TREE) == CUDAGraphMode.FULL


@pytest.mark.usefixtures("on_cuda")
def test_vllm_makes_its_configuration_from_that() -> None:
    arguments = EngineArgs("m", speculative_config={"method": "specx:ngram", "tree": {"nodes": 16}})

    class Asked(Exception):
        pass

    def original(given: EngineArgs) -> Any:
        raise Asked(given.compilation_config.cudagraph_mode)

    with pytest.raises(Asked) as asked:
        seams._create_engine_config(original, arguments)
    assert asked.value.args == (CUDAGraphMode.PIECEWISE,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_the_kernel_is_left_out_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path), "--only", "tree_kernel"]) == 0
    assert capsys.readouterr().out.count("there is none: left out") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
def test_an_engine(tmp_path: Path) -> None:
    """Greedy tokens are those without drafts: trees alone and beside chains, one at a time and together, the
    context in several parts; and leaving out a part of verifying is seen."""
    prompts = [np.random.default_rng(i).integers(3, VOCAB, 12 + 60 * i).tolist() for i in range(3)]
    left_out = ("commit", "positions", "mask")
    scripts: list[dict[str, Any]] = [
        {"mode": "trees", "nodes": 12, "batch": 1},
        {"mode": "mixed", "nodes": 16, "batch": 3},
        *({"mode": "trees", "nodes": 12, "batch": 3, "left_out": part} for part in left_out),
    ]
    model = attentive_llama(tmp_path / "model")
    found = run(model, tmp_path, prompts, scripts, max_tokens=24)
    assert "draft trees are verified in one forward of the target" in found["log"]
    without, trees, mixed, *faulty = found["tokens"]
    assert trees == without and mixed == without
    assert found["accepted"][0] == 0
    assert found["accepted"][1] > 20 and found["accepted"][2] > 5
    for said in faulty:
        assert sum(mine == right for mine, right in zip(said, without, strict=True)) <= 1
