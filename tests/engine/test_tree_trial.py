"""The trial of the kernel of tree attention when an engine starts, on vLLM's own Triton backend, interpreted.

test_tree_triton.py starts the process in which these run.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tree_gpu import like_a_gpu
from vllm_specx.engine import tree_gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="test_tree_triton.py runs it in its process"
)
if INTERPRETED:
    like_a_gpu()


def layer_of(kind: Any, cache: torch.Tensor) -> Any:
    """An attention layer of 4 heads, and as many kv heads as the cache [blocks, kv_heads, block, 2 * 64] has."""
    impl = kind(
        num_heads=4,
        head_size=64,
        scale=0.125,
        num_kv_heads=cache.shape[1],
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    one = torch.ones(1)
    return SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=one, _v_scale=one)


def cache_of(
    order: tuple[int, ...] = (0, 2, 1, 3), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Its dimensions in this order in memory."""
    return torch.empty_permuted((7, 2, 16, 128), order, dtype=dtype).zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_vllms_triton_backend(order: tuple[int, ...], dtype: torch.dtype) -> None:
    """With all orders of a layer's dimensions that vLLM's KVCacheLayout has."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    layer = layer_of(TritonAttentionImpl, cache_of(order, dtype))
    assert tree_gpu.is_known(layer) and tree_gpu.works(layer)
    assert not layer.kv_cache.any(), "the trial has memory of its own"


def test_a_cache_that_is_laid_out_otherwise() -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    class ValuesFirst(TritonAttentionImpl):
        def do_kv_cache_update(
            self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
        ) -> None:
            super().do_kv_cache_update(layer, value, key, kv_cache, slot_mapping)

    layer = layer_of(ValuesFirst, cache_of())
    assert not tree_gpu.works(layer)
    assert not tree_gpu.is_known(layer), "a class of another name is not even tried"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wrong_answers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that lets all rows of a tree see all."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    right = tree_gpu.rows_of

    def without_mask(*arguments: Any) -> Any:
        rows = right(*arguments)
        rows.visible.fill_(1)
        return rows

    monkeypatch.setattr(tree_gpu, "rows_of", without_mask)
    assert not tree_gpu.works(layer_of(TritonAttentionImpl, cache_of(dtype=dtype)))
    assert "wrong answers" in caplog.text


def test_the_benchmark_of_a_gpu_sees_what_is_wrong() -> None:
    from benchmarks.tree_kernel import BOUNDS, Shape, Step

    shape = Shape(2, 130, 9, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    step = Step(shape, torch.device("cpu"))
    assert step.error() < BOUNDS[shape.dtype]
    step.rows.visible.fill_(1)
    assert step.error() > BOUNDS[shape.dtype]


def test_a_trial_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """FlashAttention's backend cannot write into a cache without its kernels, as here."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    layer = layer_of(FlashAttentionImpl, cache_of())
    assert tree_gpu.is_known(layer)
    assert not tree_gpu.works(layer)
    assert "the trial of the kernel of tree attention failed" in caplog.text
