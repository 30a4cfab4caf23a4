"""Attention of draft trees in the target: vLLM's own for all other rows, ours for those of trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_specx.engine import tree_gpu, tree_native
from vllm_specx.engine.tree_plan import Longs, TreePlan
from vllm_specx.engine.tree_requests import is_plain
from vllm_specx.verify.tree_attention import attend_rows

CPU_BACKEND = "vllm.v1.attention.backends.cpu_attn"
CURRENT = "specx_trees"
"""The attribute of an attention implementation that holds the TreeAttention it belongs to."""


@dataclass(slots=True)
class _Written:
    """What one layer wrote at the rows of trees: [rows of all trees, kv_heads, head_dim]."""

    impl: Any
    layer: Any
    kv_cache: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class TreeAttention:
    """Of one runner. plan: of the step that runs, None without trees."""

    def __init__(self) -> None:
        self.plan: TreePlan | None = None
        self._written: list[_Written] = []
        self._slots: torch.Tensor | None = None
        self._order: torch.Tensor | None = None
        self._native: bool | None = None
        self._gpu: tree_gpu.GpuRows | None = None

    def begin(self, plan: TreePlan | None) -> None:
        """A step is about to run."""
        self.plan = plan
        self._written.clear()
        self._order = None if plan is None else torch.from_numpy(plan.order)
        if self._gpu is not None:
            self._gpu.begin(plan)

    def attach(self, layers: Sequence[Any]) -> None:
        """Make these attention layers of the target ours: each implementation gets a subclass of its own
        class, with the same attributes. Compiled graphs look it up when they run."""
        if all(map(on_gpu, layers)):
            self._gpu = tree_gpu.GpuRows(layers)
        made: dict[type, type] = {}
        for layer in layers:
            kind = type(layer.impl)
            layer.impl.__class__ = made.setdefault(kind, _subclass(kind))
            setattr(layer.impl, CURRENT, self)

    def attend(
        self,
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """The rows of trees, whose keys and values the layer has written to the cache."""
        plan, order = self.plan, self._order
        assert plan is not None and order is not None
        self._slots = metadata.slot_mapping
        out = output.view(len(output), impl.num_heads, impl.head_size)
        if self._gpu is not None:
            self._gpu.attend(impl, query, key, value, kv_cache, metadata.block_table, out)
            return
        whole = plan.whole and len(plan.order) == len(key)
        self._written.append(
            _Written(
                impl,
                layer,
                kv_cache,
                key.clone() if whole else key.index_select(0, order),
                value.clone() if whole else value.index_select(0, order),
            )
        )
        if self._native is None:
            self._native = tree_native.takes(query.dtype, impl.head_size, kv_cache.shape[2])
        if self._native:
            tree_native.tree_rows(
                query,
                key,
                value,
                kv_cache,
                impl.scale,
                plan.first,
                plan.rows,
                plan.context,
                plan.request,
                metadata.block_table,
                plan.visible,
                out,
            )
            return
        for tree, context, mask in zip(
            plan.trees, plan.context.tolist(), plan.masks(), strict=True
        ):
            rows = slice(tree.row, tree.row + tree.size)
            pages = metadata.block_table[tree.request]
            keys, values = read_context(kv_cache, pages, context)
            out[rows] = attend_rows(
                query[rows], key[rows], value[rows], keys, values, mask, impl.scale
            )

    def commit(self) -> None:
        """The accepted nodes' keys and values go to where those of a chain would be: one write a layer."""
        assert self.plan is not None and self._slots is not None
        if self._gpu is not None:
            self._gpu.commit(self.plan, self._slots)
            return
        source, target = self.plan.moves()
        if len(source):
            rows = torch.from_numpy(source)
            slots = self._slots[torch.from_numpy(target)]
            for of in self._written:
                of.impl.do_kv_cache_update(
                    of.layer,
                    of.key.index_select(0, rows),
                    of.value.index_select(0, rows),
                    of.kv_cache,
                    slots,
                )
        self._written.clear()


def _subclass(kind: type) -> type:
    own: Callable[..., torch.Tensor] = kind.forward  # type: ignore[attr-defined]

    def forward(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        trees: TreeAttention = getattr(self, CURRENT)
        if attn_metadata is None or trees.plan is None:
            return own(
                self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if not trees.plan.whole:
            own(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        trees.attend(self, layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    return type(f"Tree{kind.__name__}", (kind,), {"forward": forward})


def read_context(
    kv_cache: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, length, head_dim] of the first `length` tokens of a request.

    kv_cache [blocks, kv_heads, block, 2 * head_dim], each block of a head having its keys as
    [head_dim, block] and then its values as [block, head_dim] (isa "vec" of vLLM's CPU_ATTN); pages: int32,
    the request's row of the block table.
    """
    _, kv_heads, block, double = kv_cache.shape
    size = double // 2
    used = pages[: -(-length // block)].long()
    blocks = kv_cache.reshape(len(kv_cache), kv_heads, 2, block * size)[used]
    keys = blocks[:, :, 0].reshape(-1, kv_heads, size, block).permute(1, 0, 3, 2)
    values = blocks[:, :, 1].reshape(-1, kv_heads, block, size).permute(1, 0, 2, 3)
    flat = (kv_heads, -1, size)
    return keys.reshape(flat)[:, :length], values.reshape(flat)[:, :length]


def on_gpu(layer: Any) -> bool:
    """Whether a layer's cache is on a device for which there is a kernel in tree_gpu.py."""
    return (
        isinstance(layer.kv_cache, torch.Tensor) and layer.kv_cache.device.type == tree_gpu.DEVICE
    )


def can_be_ours(layers: Sequence[Any], compilation: Any) -> bool:
    """Whether we can do what these attention layers of the target do, for the rows of trees. compilation:
    vLLM's CompilationConfig."""
    if not layers:
        return False
    if all(map(on_gpu, layers)):
        return tree_gpu.can_be_ours(layers, compilation)
    return all(map(_on_cpu, layers))


def _on_cpu(layer: Any) -> bool:
    impl, kv_cache = layer.impl, layer.kv_cache
    if not isinstance(kv_cache, torch.Tensor) or kv_cache.device.type != "cpu":
        return False
    if type(impl).__module__ != CPU_BACKEND:
        return False
    if not is_plain(impl) or kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * impl.head_size:
        return False
    return layout_is_known(impl, layer, kv_cache)


def layout_is_known(impl: Any, layer: Any, kv_cache: torch.Tensor) -> bool:
    """Whether what this layer writes into a cache of its own kind is read back by read_context."""
    blocks, length = 3, kv_cache.shape[2] + 5
    scratch = torch.zeros((blocks, *kv_cache.shape[1:]), dtype=kv_cache.dtype)
    shape = (length, impl.num_kv_heads, impl.head_size)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(shape, generator=generator).to(kv_cache.dtype) for _ in range(2))
    slots = torch.arange(length) + kv_cache.shape[2]
    impl.do_kv_cache_update(layer, key, value, scratch, slots)
    keys, values = read_context(scratch, torch.tensor([1, 2], dtype=torch.int32), length)
    return torch.equal(keys, key.transpose(0, 1)) and torch.equal(values, value.transpose(0, 1))


def order_of(rows: Longs | None, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The states' rows in this order; None: as they are."""
    if rows is None:
        return states
    index = torch.from_numpy(rows).to(states[0].device, non_blocking=True)
    return tuple(state.index_select(0, index) for state in states)
