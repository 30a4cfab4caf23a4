"""Where the memory of a GPU goes, and how much context it leaves room for.

Weights and caches follow from the models; what a step needs beside them is an estimate of the largest
buffers of vLLM's profiling run, and the share of the CUDA context and its graphs a round figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specx.plan.drafts import Draft
from vllm_specx.plan.facts import ModelFacts

UTILIZATION = 0.92
"""vllm/config/cache.py: gpu_memory_utilization."""
RUNTIME = 1.5e9
"""Bytes of the CUDA context, NCCL and CUDA graphs: a round figure."""
BLOCK = 16
"""vllm/config/cache.py: tokens in a block of the K/V cache."""


@dataclass(frozen=True, slots=True)
class Use:
    """How the models are served. ranks: tensor-parallel ones; stages: pipeline-parallel ones.

    batched_tokens: max_num_batched_tokens. requests: max_num_seqs. kv_element: bytes of a value in
    vLLM's K/V cache; None: as the target's.
    """

    ranks: int = 1
    stages: int = 1
    batched_tokens: int = 2048
    requests: int = 256
    k: int = 0
    utilization: float = UTILIZATION
    kv_element: float | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on each GPU. kv_token: of a token of context in vLLM's cache, the draft's part with it."""

    capacity: float
    usable: float
    target: float
    draft: float
    draft_cache: float
    activations: float
    runtime: float
    kv_token: float

    @property
    def fixed(self) -> float:
        """All but vLLM's K/V cache."""
        return self.target + self.draft + self.draft_cache + self.activations + self.runtime

    @property
    def kv_room(self) -> float:
        """What is left for vLLM's K/V cache; below zero: the models do not fit."""
        return self.usable - self.fixed

    @property
    def kv_tokens(self) -> int:
        """Tokens of context, over all requests, that fit into it."""
        return max(0, int(self.kv_room / (self.kv_token * BLOCK))) * BLOCK

    def kv_bytes(self, batch: int, context: int) -> float:
        """Of so many requests of so much context, in whole blocks."""
        return batch * -(-context // BLOCK) * BLOCK * self.kv_token

    def fits(self, batch: int, context: int) -> bool:
        """Whether so many requests of so much context do."""
        return self.kv_bytes(batch, context) <= self.kv_room

    def largest_batch(self, context: int) -> int:
        """Requests of so much context that fit."""
        return max(0, int(self.kv_room // self.kv_bytes(1, context)))

    def largest_context(self, batch: int) -> int:
        """Tokens that each of so many requests may have."""
        return self.kv_tokens // BLOCK // batch * BLOCK


def budget(target: ModelFacts, draft: Draft, memory: float, use: Use) -> Budget:
    """The memory of each GPU. memory: bytes of one. With stages, those of the one with the most layers
    and the lm_head."""
    share = use.ranks * use.stages
    element = use.kv_element or target.element
    return Budget(
        capacity=memory,
        usable=memory * use.utilization,
        target=target.weight_bytes / share,
        draft=draft.resident,
        draft_cache=draft.cache,
        activations=_activations(target, use),
        runtime=RUNTIME,
        kv_token=target.kv_bytes(use.ranks, element) / use.stages + draft.kv_shared,
    )


def _activations(target: ModelFacts, use: Use) -> float:
    """The residual and a normed copy, q, k, v and the attention's output, gate, up and their product, for
    every token of the largest step; float32 logits and probabilities for every row that is sampled."""
    attention = (2 * target.heads + 2 * target.kv_heads) * target.head_dim
    rows = 3 * target.hidden + (attention + 3 * target.intermediate) / use.ranks
    sampled = min(use.requests * (1 + use.k), use.batched_tokens)
    return use.batched_tokens * rows * target.element + 2 * 4 * sampled * target.vocab
