"""A small language model as a proposer (arXiv 2211.17192, 2302.01318): chains of its likeliest tokens, or,
where requests sample and config.probabilistic says so, chains that it draws.

It reads what the request says with its own cache. Only committed tokens are written there, so there is
nothing to take back when a draft is rejected; an accepted token is read again, with the one after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from vllm_specx.draft.cached_drafter import DEPTH, CachedDrafter
from vllm_specx.draft.chains import ChainSteps, draw
from vllm_specx.draft.draft_model_checkpoint import DraftModelWeights
from vllm_specx.draft.draft_model_config import DraftModelConfig
from vllm_specx.draft.draft_model_net import DraftModelNet
from vllm_specx.draft.outcomes import Outcomes
from vllm_specx.draft.page_holders import Holder, Holders
from vllm_specx.draft.paged_cache import PAGE, PagedCache, Sequence
from vllm_specx.draft.paged_layers import Ahead, PagedLayers, Span
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.sampled_drafts import SampledRule, proposed
from vllm_specx.draft.sampling import Draws, SamplingRows, Source
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree, IntArray
from vllm_specx.draft.vocabularies import Draftable

_NEAR = DEPTH + 1
"""So many new tokens are those of a decode step: they are always read."""


class _Requests(Holders[Holder]):
    def new(self, age: int, acceptance: float, sequence: Sequence) -> Holder:
        return Holder(age, acceptance, sequence)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What is read of one request now. index: its place in the batch; tokens: [max_model_len], its."""

    request: Holder
    index: int
    tokens: IntArray
    span: Span


class DraftModelDrafter(CachedDrafter):
    """Implements draft.proposer.TrainedDrafter with a draft model.

    weights: in the dtype that it runs in (draft_model_checkpoint.load_draft_model). draftable: the ids
        that mean the same to the target (vocabularies.draftable).
    max_batch, max_model_len: the engine's. cache_tokens: entries that the draft's K/V cache holds;
        config.cache_tokens goes before it. seed: of the drafts that are drawn.

    sources: what the last step's drafts were drawn from, by request; the others are its likeliest tokens.

    A prompt is read while the target reads it, unless nobody is drafted for. A request that has not been
    read to its end, or whose pages were needed by others, drafts nothing.
    One that is longer than the draft can read, or than the cache, never does.
    """

    needs_verified_rows: ClassVar[bool] = False

    def __init__(
        self,
        config: DraftModelConfig,
        weights: DraftModelWeights,
        draftable: Draftable,
        *,
        max_batch: int,
        max_model_len: int,
        cache_tokens: int,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        self._device = device or weights.norm.device
        self._longest = longest(config, weights, max_model_len)
        self._read_tokens = config.read_tokens
        self._last_token = len(weights.embeddings) - 1
        self._net = DraftModelNet(
            weights, draftable, positions=self._longest + DEPTH + 1, device=self._device
        )
        tokens = cache_tokens if config.cache_tokens is None else config.cache_tokens
        self._cache = PagedCache(
            tokens=min(tokens, max_batch * -(-self._longest // PAGE) * PAGE),
            layers=len(weights.layers),
            kv_heads=weights.shape.kv_heads,
            head_dim=weights.shape.head_dim,
            feature=0,
            dtype=weights.embeddings.dtype,
            device=self._device,
            looks_ahead=False,
        )
        self._layers = PagedLayers(
            self._net.layers, self._net.rotary, self._cache, self._net.between
        )
        self._requests = _Requests(self._cache)
        super().__init__(
            self._cache,
            self._requests,
            device=self._device,
            net_bytes=self._net.bytes,
            acceptance=(),
            min_probability=config.min_probability,
            token_cost=config.token_cost,
        )
        self.sources: dict[str, Source] = {}
        self._draws: Draws | None = None
        self._seed = seed
        self._pays = True
        self._sampled: SampledRule | None = None
        if config.probabilistic:
            self._sampled = SampledRule(
                DEPTH,
                min_probability=config.min_probability,
                token_cost=config.token_cost,
                on_cpu=self.stops_early,
            )
            self.rule, self._outcomes = self._sampled, Outcomes(self._sampled.calibration)

    def _propose(self, context: DraftContext) -> list[DraftTree]:
        works, reads = self._works(context)
        drafting = [work.index for work in works if work.span.drafts]
        depth = self._asked_depth(context, drafting)
        ahead = self._absorb(works, depth) if works else None
        drafts = self._drafted(context, drafting, ahead, depth)
        if works and reads:
            self.draft_steps = -1
        return drafts

    def _works(self, context: DraftContext) -> tuple[list[_Work], bool]:
        """What is read now, and whether a prompt is among it."""
        near: list[tuple[Holder, int]] = []
        behind: list[tuple[Holder, int]] = []
        keys = context.state_keys
        sizes = context.num_tokens.tolist()
        asked = np.flatnonzero(context.budgets > 0).tolist()
        if any(map(len, context.sampled)):
            self._pays = bool(asked)
        along = context.reading if self._pays else ()
        for i in (*asked, *along):
            if sizes[i] > self._longest:
                continue
            key = "" if keys is None else keys[i]
            request = self._requests.holder(context.request_ids[i], key)
            if request is None:
                continue
            if i in along:
                if sizes[i] - request.sequence.end >= PAGE:
                    behind.append((request, i))
                continue
            if request.sequence.end >= sizes[i]:
                self._cache.free(request.sequence)
            short = sizes[i] - request.sequence.end <= _NEAR
            (near if short else behind).append((request, i))
        works = [
            self._work(context, request, i, sizes[i])
            for request, i in near
            if not request.lost and self._requests.make_room(request, sizes[i])
        ]
        left = max(self._read_tokens, context.tokens_read)
        reads = False
        for request, i in sorted(behind, key=lambda each: each[0].age):
            if left < PAGE:
                break
            sequence, size = request.sequence, sizes[i]
            if not request.lost:
                tokens = context.token_ids[context.rows[i]]
                self._cache.adopt_prefix(sequence, tokens, size - 1)
            # All that it needs, so that nothing is read in vain.
            if request.lost or not self._requests.make_room(request, size):
                continue
            end = size if size - sequence.end <= left else (sequence.end + left) // PAGE * PAGE
            left -= end - sequence.end
            reads = True
            works.append(self._work(context, request, i, end))
        # Who came later may have needed the pages of who came earlier.
        return [work for work in works if not work.request.lost], reads

    def _work(self, context: DraftContext, request: Holder, i: int, end: int) -> _Work:
        sequence = request.sequence
        drafts = end == int(context.num_tokens[i]) and bool(context.budgets[i])
        span = Span(sequence, sequence.end, end, drafts=drafts)
        return _Work(request, i, context.token_ids[context.rows[i]], span)

    def _absorb(self, works: list[_Work], depth: int) -> Ahead | None:
        new = np.concatenate([w.tokens[w.span.begin : w.span.end] for w in works])
        # A target's placeholders of images may lie outside of the draft's vocabulary.
        tokens = self._moved(np.clip(new.astype(np.int64), 0, self._last_token))
        spans = [work.span for work in works]
        ahead = self._layers.absorb(spans, lambda part: self._net.enter(tokens[part]), depth)
        for work in works:
            self._cache.register(work.span.sequence, work.tokens, work.span.end)
        return ahead

    def _drafted(
        self, context: DraftContext, drafting: list[int], ahead: Ahead | None, depth: int
    ) -> list[DraftTree]:
        self.sources, self._draws = {}, None
        rows, rule = context.sampling, self._sampled
        if rule is None or rows is None or ahead is None:
            if rule is not None:
                rule.drawn = None
            return super()._drafted(context, drafting, ahead, depth)
        mine = SamplingRows(*(getattr(rows, name)[drafting] for name in SamplingRows.__slots__))
        rule.drawn = mine.drawn
        requests = [context.request_ids[i] for i in drafting]
        positions = context.num_tokens[drafting].tolist()
        draws = Draws(mine, requests, positions, depth, self._seed, self._device)
        self._draws = draws
        goes_on = rule.goes_on(context.budgets[drafting], context) if self.stops_early else None
        chains = draw(self._steps(ahead, depth), len(drafting), depth, goes_on)
        self.draft_steps = chains.steps
        made, self.sources = proposed(chains, draws, drafting, context, rule, self._outcomes)
        return [made.get(i, EMPTY_DRAFT) for i in range(len(context.request_ids))]

    def _steps(self, ahead: Ahead, depth: int) -> ChainSteps:
        draws = self._draws
        for d in range(depth):
            logits = self._net.leave(ahead.moved, ahead.residual)
            if draws is None:
                probability, token = torch.softmax(logits, -1, dtype=torch.float32).max(-1)
            else:
                token, probability = draws.choose(logits, d)
            keep = yield token, probability
            if d + 1 == depth:
                return
            if keep is not None:
                token = token.index_select(0, keep)
                if draws is not None:
                    draws.keep(keep)
                self._layers.keep(ahead, keep)
            self._layers.advance(ahead, *self._net.enter(token))


def longest(config: DraftModelConfig, weights: DraftModelWeights, max_model_len: int) -> int:
    """Tokens of a request that is drafted for, at most."""
    own = config.max_model_len or weights.shape.max_position_embeddings
    return min(own, max_model_len)
