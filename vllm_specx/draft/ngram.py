"""The n-gram lookahead: drafts what followed the same tokens earlier, here or in other requests.

Training-free, exact for any target. In the line of prompt lookup decoding (Saxena, 2023), REST
(arXiv 2311.08252), Lookahead's n-gram pool (arXiv 2402.02057) and SuffixDecoding (arXiv
2411.04975); what is added here: probabilities calibrated online against what the target committed,
and drafts as long as those make worth verifying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.config import NgramConfig, PoolConfig
from vllm_specx.draft.branches import worth_their_branches
from vllm_specx.draft.calibration import initial_weights, kind_of, tree_weights
from vllm_specx.draft.lookahead import Lookahead
from vllm_specx.draft.ngram_arena import Arena
from vllm_specx.draft.ngram_kernels import (
    ALIGNED_SOURCE,
    CAPACITY,
    FIELDS,
    KINDS,
    LEAD_SOURCE,
    LENGTH,
    OFFSET,
    POOL,
    PROMPT,
    SHADOW,
    WEIGHTS,
    WEIGHTS_AT,
    FloatArray,
    IntArray,
    LongArray,
    Requests,
    choose_lengths,
    rebuild_own,
    step,
)
from vllm_specx.draft.ngram_pool import Pool
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.draft.tree_limits import TreeLimits

# Until the engine's own step times are known. Measured on CPUs: 0.03 to 0.1 of a step.
TOKEN_COST_CPU = 0.06
TOKEN_COST_GPU = 0.01
INDEX_QUOTA = 2048
"""Pool tokens indexed in one step at most."""


def match_levels(min_match: int, max_match: int) -> LongArray:
    """int64: the window lengths that are indexed: min_match and the powers of two above, to 32."""
    powers = [1 << k for k in range(6) if min_match < 1 << k <= max_match]
    return np.array([min(min_match, max_match), *powers], np.int64)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What may follow, for B requests.

    tokens: int32 [B, max_draft]; reach: float64 [B, max_draft], the probability that all tokens up to
    there are accepted; lengths: int64 [B], how many of both are predicted, the rest means nothing.
    parents: int32 [B, max_draft], of trees; None: chains.
    """

    tokens: IntArray
    reach: FloatArray
    lengths: LongArray
    parents: IntArray | None = None

    def draft(self, i: int, length: int) -> DraftTree:
        """The first `length` tokens predicted for request i."""
        if not length:
            return EMPTY_DRAFT
        if self.parents is None:
            return DraftTree.chain(self.tokens[i, :length])
        reach = self.reach[i, :length].astype(np.float32)
        return DraftTree(self.tokens[i, :length], self.parents[i, :length], reach)


class NgramLookahead:
    """The proposer `specx:ngram`. Not thread-safe; one per worker.

    max_batch: requests in a step at most. max_model_len: tokens of a request at most.
    max_draft: tokens of a draft at most. tree: drafts are trees of at most so many nodes, as deep as there are
    nodes, whatever tree.depth says; None: chains, and no windows of lookahead decoding. Memory grows with the
    tokens of the live requests, and by at most `config.pool.max_tokens` tokens for what is shared, at some 50
    bytes a token.
    """

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = False
    draft_steps: ClassVar[int] = 0

    def __init__(
        self,
        config: NgramConfig,
        max_batch: int,
        max_model_len: int,
        max_draft: int,
        tree: TreeLimits | None = None,
    ) -> None:
        tree = config.tree if tree is None else tree
        self.config, self.tree = config, tree
        self.max_draft = max(1, max_draft if tree is None else min(max_draft, tree.nodes))
        self.max_model_len = max_model_len
        self.levels = match_levels(config.min_match, config.max_match)
        self.weights = initial_weights() if tree is None else tree_weights()
        usual_cost = TOKEN_COST_GPU if torch.cuda.is_available() else TOKEN_COST_CPU
        self.token_cost = config.token_cost or usual_cost
        self._cost_given = config.token_cost is not None
        self.minimum = -1.0 if config.min_probability is None else config.min_probability
        self.pool = Pool(config.pool.max_tokens if config.pool.enabled else 1024, self.levels)
        self._requests = 2 * max_batch
        self._record: LongArray = np.zeros((self._requests, FIELDS), np.int64)
        self._agreement = np.zeros(self._requests)
        self._shadow_tokens: IntArray = np.zeros((self._requests, self.max_draft), np.int32)
        self._shadow_features: IntArray = np.zeros((*self._shadow_tokens.shape, KINDS), np.int32)
        self._shadow_parents: IntArray | None = None
        self.lookahead: Lookahead | None = None
        if tree is not None and config.lookahead is not None:
            self.lookahead = Lookahead(config.lookahead, tree.branching, max_model_len)
        if tree is not None:
            self._shadow_parents = np.full(self._shadow_tokens.shape, -1, np.int32)
        self._last_seen: LongArray = np.full(self._requests, -1, np.int64)
        self._arena = Arena(len(self.levels))
        self._slots: dict[str, int] = {}
        self._free = list(range(self._requests - 1, -1, -1))
        self._step = 0
        self._arrays = self._gather()

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, in the order of `context.request_ids`; see Proposer."""
        found = self.predict(context)
        if self.lookahead is not None:
            assert found.parents is not None
            self.lookahead.learn(context)
            self.lookahead.add_to(context, found.tokens, found.parents, found.reach, found.lengths)
        budgets = np.asarray(context.budgets, np.int64)
        costs = self.costs(context)
        lengths = self.lengths(found, budgets, costs)
        if found.parents is not None:
            drafts = [found.draft(i, length) for i, length in enumerate(lengths.tolist())]
            if self.minimum < 0:
                drafts = worth_their_branches(drafts, context.costs)
            if self.lookahead is not None:
                drafts = self.lookahead.beside(context, drafts, costs)
            return drafts
        return [
            DraftTree.chain(found.tokens[i, :length]) if length else EMPTY_DRAFT
            for i, length in enumerate(lengths.tolist())
        ]

    def lengths(self, found: Prediction, budgets: LongArray, costs: FloatArray) -> LongArray:
        """int64 [B]: how much of each prediction to draft, at most budgets [B]."""
        lengths: LongArray = np.empty(len(budgets), np.int64)
        choose_lengths(found.reach, found.lengths, budgets, costs, self.minimum, lengths)
        return lengths

    def predict(self, context: DraftContext) -> Prediction:
        """All that could be drafted; once a step, instead of propose()."""
        self._step += 1
        for request_id in context.finished:
            self._finish(request_id)
        self.pool.index(INDEX_QUOTA)
        size = len(context.request_ids)
        num_tokens = np.asarray(context.num_tokens, np.int64)
        num_sampled = np.fromiter(map(len, context.sampled), np.int64, size)
        slots = self._find_slots(context, num_tokens, num_sampled)
        token_ids, rows = _plain(context)
        found = Prediction(
            np.empty((size, self.max_draft), np.int32),
            np.empty((size, self.max_draft)),
            np.zeros(size, np.int64),
            None if self.tree is None else np.empty((size, self.max_draft), np.int32),
        )
        if size == 0:
            return found
        floor = self._floor(size, self.costs(context))
        if found.parents is not None:
            self._step_tree(context, found, slots, rows, token_ids, num_tokens, num_sampled, floor)
            return found
        step(
            self._arrays,
            self.pool.arrays,
            slots,
            rows,
            token_ids,
            num_tokens,
            num_sampled,
            self.levels,
            self.config.max_match,
            context.vocab_size,
            floor,
            self.weights,
            found.tokens,
            found.reach,
            found.lengths,
        )
        return found

    def _step_tree(
        self,
        context: DraftContext,
        found: Prediction,
        slots: LongArray,
        rows: IntArray,
        token_ids: IntArray,
        num_tokens: LongArray,
        num_sampled: LongArray,
        floor: float,
    ) -> None:
        # Not above: compiling takes seconds, and chains do not need it.
        from vllm_specx.draft.ngram_tree_kernels import step_tree

        assert self.tree is not None and self._shadow_parents is not None
        assert found.parents is not None
        step_tree(
            self._arrays,
            self.pool.arrays,
            slots,
            rows,
            token_ids,
            num_tokens,
            num_sampled,
            self.levels,
            self.config.max_match,
            context.vocab_size,
            self.tree.branching,
            floor,
            self.weights,
            len(self.weights) // 2,
            self._shadow_parents,
            found.tokens,
            found.parents,
            found.reach,
            found.lengths,
        )

    def warm_up(self) -> None:
        """Compile everything now, so that no request waits for it. State is left as it was."""
        small = self.config.model_copy(update={"pool": PoolConfig(max_tokens=1024)})
        twin = NgramLookahead(small, 2, self.max_model_len, self.max_draft, self.tree)
        token_ids: IntArray = np.tile(np.arange(8, dtype=np.int32), (1, 64))
        for name in ("first", "second"):
            for length in (40, 41, 511):
                twin.propose(
                    DraftContext(
                        request_ids=[name],
                        rows=np.zeros(1, np.int32),
                        token_ids=token_ids,
                        num_tokens=np.array([length], np.int32),
                        num_prompt_tokens=np.array([16], np.int32),
                        sampled=[[int(token_ids[0, length - 1])]],
                        budgets=np.full(1, self.max_draft, np.int32),
                        temperatures=np.zeros(1, np.float32),
                        pools=["default"],
                        finished=["first"] if name == "second" else [],
                        vocab_size=8,
                    )
                )

    def _floor(self, batch: int, costs: FloatArray) -> float:
        """Predict on while a token is at least half as likely to be accepted as drafting asks."""
        if self.minimum >= 0:
            return max(0.5 * self.minimum, 0.002)
        slope = float(costs[-1] - costs[0]) / max(1, len(costs) - 1)
        return min(max(0.5 * batch * slope / float(costs[0]), 0.002), 0.5)

    def costs(self, context: DraftContext) -> FloatArray:
        """float64 [N]: what a step costs that verifies 0, 1, ... draft tokens in all."""
        batch = len(context.request_ids)
        if context.costs is not None and not self._cost_given:
            return context.costs
        tokens: FloatArray = np.arange(batch, batch * (1 + self.max_draft) + 1, dtype=np.float64)
        tokens *= self.token_cost
        tokens += 1.0
        return tokens

    def _find_slots(
        self, context: DraftContext, num_tokens: LongArray, num_sampled: LongArray
    ) -> LongArray:
        """int64 [B]: the slot of each request, with room for its tokens; -1 drafts nothing."""
        known = self._slots
        slots = np.array([known.get(name, -1) for name in context.request_ids], np.int64)
        active = num_sampled > 0
        if not active.all():
            slots[~active] = -1
        self._last_seen[slots[slots >= 0]] = self._step
        for i in np.flatnonzero(active & (slots < 0)):
            slots[i] = self._admit(
                context.request_ids[i],
                int(num_tokens[i]),
                int(context.num_prompt_tokens[i]),
                context.pools[i],
                kind_of(float(context.temperatures[i])),
            )
        full = (slots >= 0) & (self._record[slots, CAPACITY] < num_tokens)
        for i in np.flatnonzero(full):
            self._enlarge(int(slots[i]), int(num_tokens[i]))
        return slots

    def _admit(self, request_id: str, length: int, prompt: int, pool: str | None, kind: int) -> int:
        if not self._free:
            self._forget_longest_unseen()
        if not self._free:
            return -1
        slot = self._free.pop()
        self._slots[request_id] = slot
        self._last_seen[slot] = self._step
        record = self._record[slot]
        record[:] = 0
        record[[POOL, LEAD_SOURCE, ALIGNED_SOURCE]] = -1
        record[PROMPT] = prompt
        record[WEIGHTS_AT] = kind * WEIGHTS
        if pool is not None and self.config.pool.enabled:
            record[POOL] = self.pool.join(pool)
        self._agreement[slot] = 0.5
        self._enlarge(slot, length)
        return slot

    def _enlarge(self, slot: int, length: int) -> None:
        """Give a request a larger piece of the arena, its index built anew."""
        record = self._record[slot]
        kept = int(record[LENGTH])
        old, old_capacity = int(record[OFFSET]), int(record[CAPACITY])
        capacity = self._arena.capacity_for(length)
        offset = self._arena.allocate(capacity)
        self._arrays = self._gather()
        arena = self._arena
        arena.tokens[offset : offset + kept] = arena.tokens[old : old + kept]
        record[OFFSET], record[CAPACITY] = offset, capacity
        rebuild_own(self._arrays, slot, kept, self.levels)
        if old_capacity:
            arena.release(old, old_capacity)

    def _finish(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        record = self._record[slot]
        offset, length, prompt = (int(record[k]) for k in (OFFSET, LENGTH, PROMPT))
        pool = int(record[POOL])
        if pool >= 0:
            tokens = self._arena.tokens[offset : offset + length]
            tail = tokens[max(0, prompt - self.config.max_match) : prompt]
            self.pool.add(pool, tail, tokens[prompt:])
            self.pool.leave(pool)
        self._arena.release(offset, int(record[CAPACITY]))
        record[SHADOW] = 0
        self._last_seen[slot] = -1
        self._free.append(slot)

    def _forget_longest_unseen(self) -> None:
        """Make room where more requests were preempted than there are slots for."""
        oldest = min(self._slots, key=lambda name: self._last_seen[self._slots[name]])
        if self._last_seen[self._slots[oldest]] < self._step:
            self._finish(oldest)

    def _gather(self) -> Requests:
        return Requests(
            record=self._record,
            agreement=self._agreement,
            shadow_tokens=self._shadow_tokens,
            shadow_features=self._shadow_features,
            tokens=self._arena.tokens,
            prev=self._arena.prev,
            head=self._arena.head,
            counts=self._arena.counts,
        )


def _plain(context: DraftContext) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """token_ids and rows in the one memory layout the kernels are compiled for."""
    token_ids = context.token_ids
    flags = token_ids.flags
    rows = np.ascontiguousarray(context.rows, np.int32)
    if flags.c_contiguous and flags.writeable and token_ids.dtype == np.int32:
        return token_ids, rows
    return np.array(token_ids[rows], np.int32, order="C"), np.arange(len(rows), dtype=np.int32)
