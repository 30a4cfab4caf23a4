"""What a draft model will take of memory, from the shapes of its weights alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specx.draft.cached_drafter import DEPTH
from vllm_specx.draft.dense import multiplies_bfloat16
from vllm_specx.draft.draft_model_checkpoint import DraftModelWeights
from vllm_specx.draft.paged_cache import PAGE
from vllm_specx.draft.vocabularies import Draftable


@dataclass(frozen=True, slots=True)
class DraftModelMemory:
    """Bytes. weights: as they are stored; copies: as a CPU lays them out for its products; tables: of the
    rotary embedding; cache: keys and values."""

    weights: int
    copies: int
    tables: int
    cache: int

    @property
    def total(self) -> int:
        """All of it, on every rank."""
        return self.weights + self.copies + self.tables + self.cache


def memory_plan(
    weights: DraftModelWeights,
    draftable: Draftable,
    *,
    longest: int,
    cache_tokens: int,
    device: torch.device,
) -> DraftModelMemory:
    """weights: may have shapes alone (load_draft_model with values=False), in the dtype that they will
    have. longest: tokens of a request that is drafted for (draft_model.longest). cache_tokens: entries of
    the cache."""
    shape, element = weights.shape, weights.embeddings.element_size()
    products, small = [], [weights.norm]
    for layer in weights.layers:
        products += [layer.qkv, layer.out, layer.gate_up, layer.down]
        small += [
            gain
            for gain in (
                layer.qkv_bias, layer.q_norm, layer.k_norm, layer.input_norm, layer.hidden_norm,
                layer.post_norm,
            )
            if gain is not None
        ]  # fmt: skip
    numbers = sum(each.numel() for each in (*products, *small, weights.embeddings))
    if not weights.tied:
        numbers += weights.lm_head.numel()
    copied = sum(each.numel() for each in products) + draftable.size * shape.hidden_size
    copies = 0
    if device.type == "cpu" and weights.embeddings.dtype == torch.bfloat16:
        copies = copied * (2 if multiplies_bfloat16() else 2 + 4)
    entry = 2 * len(weights.layers) * shape.kv_heads * shape.head_dim
    pages = -(-cache_tokens // PAGE)
    return DraftModelMemory(
        weights=numbers * element,
        copies=copies,
        tables=(longest + DEPTH + 1) * 2 * shape.head_dim * element,
        cache=pages * PAGE * entry * element,
    )
