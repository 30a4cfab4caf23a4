"""Attention of draft trees on a GPU: which layers can have it, and what of a step is on the device.

Not run on a GPU yet; tests/engine/test_tree_gpu.py has it on a CPU, with vLLM's Triton backend interpreted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.engine.tree_plan import COLUMNS, TreePlan
from vllm_specx.engine.tree_requests import is_plain
from vllm_specx.verify.tree import visible
from vllm_specx.verify.tree_attention import attend_rows

logger = logging.getLogger(f"vllm.{__name__}")

DEVICE = "cuda"
"""The type of device that all this is for."""
BACKENDS = {
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionImpl",
    "vllm.v1.attention.backends.triton_attn": "TritonAttentionImpl",
}
"""Whose cache is [blocks, kv_heads, block, 2 * head_dim], keys before values; nothing that is derived from
them."""


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    from vllm.utils.torch_utils import async_tensor_h2d

    copied: torch.Tensor = async_tensor_h2d(values, device=device)
    return copied


class GpuRows:
    """The device's part of TreeAttention, for the attention layers of one runner's target."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._device: torch.device = layers[0].kv_cache.device
        self._processors = processors_of(self._device)
        self._rows: Any = None

    def begin(self, plan: TreePlan | None) -> None:
        """A step is about to run: its plan goes to the device."""
        self._rows = None if plan is None else rows_of(plan, self._device)

    def attend(
        self,
        impl: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """The rows of trees; shapes as tree_triton.tree_rows says."""
        from vllm_specx.engine.tree_triton import tree_rows

        tree_rows(
            query,
            key,
            value,
            kv_cache,
            impl.scale,
            self._rows,
            block_table,
            output,
            self._processors,
        )

    def commit(self, plan: TreePlan, slots: torch.Tensor) -> None:
        """As TreeAttention.commit, within the cache, which has what the layers wrote. slots: int64, of the
        forward's rows."""
        places, target = plan.moves()
        if not len(places):
            return
        rows = to_device(np.stack((plan.order[places], target)), self._device)
        source, into = slots[rows]
        for layer in self._layers:
            move(layer.kv_cache, source, into)


def rows_of(plan: TreePlan, device: torch.device) -> Any:
    """The tree_triton.Rows of a plan, by one copy."""
    from vllm_specx.engine.tree_triton import Rows

    count = len(plan.rows)
    packed = to_device(plan.packed(), device)
    trees = packed[: 4 * COLUMNS * count].view(torch.int32).view(count, COLUMNS)
    masks = packed[4 * COLUMNS * count :]
    return Rows(trees, masks, count, int(plan.rows.max()), int(plan.rows.sum()))


def move(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the entries of slots to others, int64 [n] each, all at once: a slot may be in both."""
    block = kv_cache.shape[2]
    kv_cache[target // block, :, target % block] = kv_cache[source // block, :, source % block]


def read_pages(
    kv_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, length, head_dim] of the first `length` tokens of a request. pages: int32, its
    row of the block table."""
    _, kv_heads, block, double = kv_cache.shape
    used = kv_cache[pages[: -(-length // block)].long()]
    flat = used.permute(1, 0, 2, 3).reshape(kv_heads, -1, double)[:, :length]
    return flat[..., : double // 2], flat[..., double // 2 :]


def can_be_ours(layers: Sequence[Any], compilation: Any) -> bool:
    """Whether we can do what these attention layers of the target do, for the rows of trees. compilation:
    vLLM's CompilationConfig, as the runner has settled it."""
    if DEVICE == "cuda" and torch.version.hip is not None:
        return False
    if compilation.cudagraph_mode.has_full_cudagraphs() or compilation.pass_config.fuse_attn_quant:
        return False
    if not all(map(is_known, layers)):
        return False
    kinds = {_kind(layer): layer for layer in layers}
    return all(map(works, kinds.values()))


def is_known(layer: Any) -> bool:
    """Whether a layer's backend, cache and attention are those that the kernel is for."""
    from vllm_specx.engine.tree_triton import takes

    impl, kv_cache = layer.impl, layer.kv_cache
    if BACKENDS.get(type(impl).__module__) != type(impl).__qualname__:
        return False
    return (
        is_plain(impl)
        and isinstance(kv_cache, torch.Tensor)
        and kv_cache.device.type == DEVICE
        and kv_cache.dim() == 4
        and kv_cache.shape[1] == impl.num_kv_heads
        and kv_cache.shape[3] == 2 * impl.head_size
        and kv_cache.stride(3) == 1
        and takes(kv_cache.dtype, impl.head_size)
    )


def _kind(layer: Any) -> tuple[Any, ...]:
    impl, kv_cache = layer.impl, layer.kv_cache
    shape = (*kv_cache.shape[1:], *kv_cache.stride(), kv_cache.dtype, kv_cache.device)
    return (type(impl), impl.num_heads, impl.head_size, *shape)


def works(layer: Any) -> bool:
    """A trial on scratch memory: whether what the layer writes into a cache of its own kind is where we look
    for it, and whether the kernel's answers are right; it is compiled on the way."""
    try:
        return _works(layer)
    except Exception:
        logger.warning(
            "vllm_specx: the trial of the kernel of tree attention failed.", exc_info=True
        )
        return False


def _works(layer: Any) -> bool:
    from vllm_specx.engine.tree_kernels import LEAST_PART
    from vllm_specx.engine.tree_triton import tree_rows

    impl, like = layer.impl, layer.kv_cache
    device, dtype, block, size = like.device, like.dtype, like.shape[2], impl.head_size
    length = max(2 * block, LEAST_PART) + 5
    pages = -(-length // block)
    generator = torch.Generator().manual_seed(0)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        drawn = torch.randn((tokens, heads, size), generator=generator)
        return drawn.to(device=device, dtype=dtype)

    # Its dimensions in memory as those of the cache, without what may lie between.
    outer_first = sorted(range(4), key=lambda d: -like.stride(d))
    scratch = torch.empty_permuted(
        (pages + 1, *like.shape[1:]), outer_first, dtype=dtype, device=device
    ).zero_()
    order = torch.arange(pages, 0, -1, device=device)
    slots = (order[:, None] * block + torch.arange(block, device=device)).flatten()[:length]
    key, value = normal(length, impl.num_kv_heads), normal(length, impl.num_kv_heads)
    impl.do_kv_cache_update(layer, key, value, scratch, slots)
    table = order.int()[None]
    keys, values = read_pages(scratch, table[0], length)
    if not (torch.equal(keys, key.transpose(0, 1)) and torch.equal(values, value.transpose(0, 1))):
        return False

    # Without a context, too: there a row's answer depends most on which rows it sees.
    for nodes, context in itertools.product((1, 40), (0, length)):
        parents = np.arange(nodes, dtype=np.int32) // 2 - 1
        rows = rows_of(alone(parents, context), device)
        q, k, v = (normal(nodes + 1, n) for n in (impl.num_heads, *2 * [impl.num_kv_heads]))
        exact = attend_rows(
            q.cpu().double(),
            k.cpu().double(),
            v.cpu().double(),
            keys[:, :context].cpu().double(),
            values[:, :context].cpu().double(),
            torch.from_numpy(visible(parents)),
            impl.scale,
        )
        for parts in (1, 2):
            out = torch.zeros_like(q)
            tree_rows(q, k, v, scratch, impl.scale, rows, table, out, 1, parts)
            error = float((out.cpu().double() - exact).abs().max())
            if not error < (1e-4 if dtype == torch.float32 else 3e-2):
                logger.warning(
                    "vllm_specx: the kernel of tree attention gives wrong answers here (%g off).",
                    error,
                )
                return False
    return True


def alone(parents: npt.NDArray[np.int32], context: int) -> TreePlan:
    """The plan of a step with one tree and nothing else; of `trees` it has none."""
    count = len(parents) + 1
    one, none = np.array([count], np.int64), np.zeros(1, np.int64)
    mask = visible(parents).ravel().view(np.uint8)
    order = np.arange(count, dtype=np.int64)
    return TreePlan([], none, one, np.array([context], np.int64), none, mask, True, order)


def processors_of(device: torch.device) -> int:
    """How many multiprocessors the GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
