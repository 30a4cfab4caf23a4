"""EAGLE and EAGLE-3 (arXiv 2401.15077, 2503.01840) as a proposer.

Chains by argmax, trees as EAGLE-2's (2406.16858).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from vllm_specx.draft.attention import Places
from vllm_specx.draft.cached_drafter import DEPTH, CachedDrafter
from vllm_specx.draft.chains import ChainSteps
from vllm_specx.draft.checkpoints import CheckpointError
from vllm_specx.draft.eagle_config import EagleConfig
from vllm_specx.draft.eagle_net import EagleNet
from vllm_specx.draft.eagle_requests import Piece, Request, Requests
from vllm_specx.draft.eagle_weights import EagleWeights
from vllm_specx.draft.growth import Growth
from vllm_specx.draft.paged_cache import PAGE, PagedCache
from vllm_specx.draft.paged_layers import Ahead, PagedLayers, Span
from vllm_specx.draft.proposer import DraftContext, VerifiedRows
from vllm_specx.draft.resting import Resting
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.draft.tree_limits import TreeLimits
from vllm_specx.draft.tree_rule import TreeRule, proposed_trees

_WAITING = 256
"""Features of one request that may wait to go through the layer."""
_WAITING_BYTES = 64 << 20
"""What all waiting features may take."""
_RECENT = 128
"""Of a request whose waiting features are too many while the draft rests, so many stay."""
_BLOCK = 1024
"""Rows whose features are made together."""


@dataclass(slots=True, eq=False)
class _Work:
    """New rows of one request: [first, first + count) of this step's states, [begin, end) in all.

    index: its place in the batch; row: in token_ids.
    """

    request: Request
    index: int
    row: int
    first: int
    count: int
    drafts: bool

    @property
    def begin(self) -> int:
        return self.request.sequence.end

    @property
    def end(self) -> int:
        return self.request.known + self.count


class EagleDrafter(CachedDrafter):
    """Implements draft.proposer.Proposer with an EAGLE draft.

    weights: a checkpoint that fits the target (eagle_checkpoints.load_eagle); its vocabulary is drafted
        from, whatever config.vocab says (eagle_checkpoints.most_frequent cuts it).
    lm_head, embeddings: [V, hidden], all rows of the target's, in its dtype; used where the draft has
        none of its own.
    max_batch, max_model_len: the engine's. cache_tokens: entries that the draft's K/V cache holds;
        config.cache_tokens goes before it.
    tree: how large the trees may be; None: chains.
    Everything runs in the dtype and on the device of lm_head. One transfer to the host a step, except
    on CPUs, where a draft that promises no more is not continued.

    Raises CheckpointError where config and weights do not fit together.
    """

    needs_verified_rows: ClassVar[bool] = True

    def __init__(
        self,
        config: EagleConfig,
        weights: EagleWeights,
        *,
        lm_head: torch.Tensor,
        embeddings: torch.Tensor,
        max_batch: int,
        max_model_len: int,
        cache_tokens: int,
        device: torch.device | None = None,
        tree: TreeLimits | None = None,
    ) -> None:
        self._device = device or lm_head.device
        vocab = weights.vocab
        rows = weights.lm_head
        if rows is None:
            rows = lm_head if vocab is None else lm_head[vocab.token_ids.to(lm_head.device)]
        if rows.shape[1] != weights.shape.hidden_size:
            raise CheckpointError(
                f"{config.heads} has hidden size {weights.shape.hidden_size} and no lm_head of its own, "
                f"and the target's has {rows.shape[1]}; the checkpoint was made for another target."
            )
        dtype = lm_head.dtype
        if weights.embeddings is not None:
            embeddings = weights.embeddings.to(self._device)
        self._last_token = len(embeddings) - 1
        self._token_map = None if vocab is None else vocab.token_ids.to(self._device)
        self._net = EagleNet(
            weights,
            lm_head=rows.to(dtype),
            embeddings=embeddings,
            positions=max_model_len + DEPTH + 1,
            device=self._device,
        )
        tokens = cache_tokens if config.cache_tokens is None else config.cache_tokens
        self._cache = PagedCache(
            tokens=min(tokens, max_batch * -(-max_model_len // PAGE) * PAGE),
            layers=len(weights.layers),
            kv_heads=weights.shape.kv_heads,
            head_dim=weights.shape.head_dim,
            feature=weights.shape.hidden_size,
            dtype=dtype,
            device=self._device,
        )
        self._requests = Requests(self._cache)
        self._layers = PagedLayers(
            self._net.layers, self._net.rotary, self._cache, self._net.between
        )
        self._waiting_rows = 0
        self._resting = Resting()
        super().__init__(
            self._cache,
            self._requests,
            device=self._device,
            net_bytes=self._net.bytes,
            acceptance=weights.acceptance,
            min_probability=config.min_probability,
            token_cost=config.token_cost,
        )
        self._tree = tree = config.tree if tree is None else tree
        self._tree_rule = TreeRule(
            self._calibration,
            min_probability=config.min_probability,
            token_cost=config.token_cost,
            on_cpu=self.stops_early,
        )
        if tree is not None:
            self.depth = min(tree.depth, DEPTH)

    def _forget(self) -> None:
        super()._forget()
        self._waiting_rows = 0

    def _propose(self, context: DraftContext) -> list[DraftTree]:
        verified = context.verified
        assert verified is not None
        self._resting.learn(context)
        works = self._works(context, verified)
        drafting = [work.index for work in works if work.drafts]
        depth = self._asked_depth(context, drafting)
        room = depth if self._tree is None else self._tree.branching * depth
        ahead = self._absorb(works, context, verified, room) if works else None
        if self._tree is None or ahead is None:
            return self._drafted(context, drafting, ahead, depth)
        trees = self._grown(self._tree, ahead, depth, drafting, context)
        return [trees.get(i, EMPTY_DRAFT) for i in range(len(context.request_ids))]

    def _works(self, context: DraftContext, verified: VerifiedRows) -> list[_Work]:
        """Whose features go through the layer now; those of the others are kept."""
        works: list[_Work] = []
        keeping: list[_Work] = []
        rows = context.rows.tolist()
        committed = context.num_tokens.tolist()
        budgets = context.budgets.tolist()
        keys = context.state_keys
        places = zip(
            verified.first.tolist(),
            verified.position.tolist(),
            verified.count.tolist(),
            strict=True,
        )
        for i, (first, position, count) in enumerate(places):
            if not count:
                continue
            name = context.request_ids[i]
            key = "" if keys is None else keys[i]
            request = self._requests.follow(name, position, context.token_ids[rows[i]], key)
            if request is None:
                continue
            drafts = budgets[i] > 0 and position + count == committed[i] - 1
            work = _Work(request, i, rows[i], first, count, drafts)
            now = drafts or request.waiting + count > _WAITING
            if now and not drafts and self._resting:
                self._skip(work)
                now = False
            (works if now else keeping).append(work)
        if keeping:
            fresh = sum(work.count for work in keeping)
            size = sum(state.shape[1] * state.element_size() for state in verified.states)
            full = (self._waiting_rows + fresh) * size > _WAITING_BYTES
            if full and self._resting:
                # Much of it is of rows that are forgotten.
                self._waiting_rows = self._compact()
                full = (self._waiting_rows + fresh) * size > _WAITING_BYTES // 2
            if full:
                works += keeping
                works.sort(key=lambda work: work.index)
                self._compact({id(work.request) for work in works})
                self._waiting_rows = 0
            else:
                self._waiting_rows += fresh
                _keep(keeping, verified.states)
        for work in works:
            if not work.request.lost:
                self._requests.make_room(work.request, work.end)
        return [work for work in works if not work.request.lost]

    def _compact(self, but: Collection[int] = ()) -> int:
        """What waits is held by itself, of all requests but these. How many rows that is."""
        others = [request for request in self._requests if id(request) not in but]
        for request in others:
            request.compact()
        return sum(request.waiting for request in others)

    def _skip(self, work: _Work) -> None:
        """Of what the request has waiting, and of its new rows, only the last ones are kept."""
        request, known = work.request, work.end
        unread = max(work.count - _RECENT, 0)
        work.first += unread
        work.count -= unread
        request.forget_older(_RECENT - work.count)
        self._cache.restart(request.sequence, known - work.count - request.waiting)

    def _absorb(
        self,
        works: list[_Work],
        context: DraftContext,
        verified: VerifiedRows,
        room: int,
    ) -> Ahead | None:
        """The new rows' keys and values go into the pages; the last rows of those that draft go on.

        room: entries that will be drafted after each."""
        spans = [Span(w.request.sequence, w.begin, w.end, w.drafts) for w in works]
        counts = np.array([span.end - span.begin for span in spans], np.int64)
        firsts = np.cumsum(counts) - counts
        following = np.concatenate(
            [
                context.token_ids[work.row, span.begin + 1 : span.end + 1]
                for work, span in zip(works, spans, strict=True)
            ]
        )
        # A target's placeholders of images may lie outside of its vocabulary.
        tokens = self._moved(np.clip(following.astype(np.int64), 0, self._last_token))
        features = self._features(works, firsts, verified)
        state = self._layers.absorb(
            spans, lambda part: self._net.enter(tokens[part], features[part]), room
        )
        self._register(works, spans, firsts, context, features)
        return state

    def _features(
        self, works: Sequence[_Work], firsts: Places, verified: VerifiedRows
    ) -> torch.Tensor:
        """[R, hidden]: the features of all new rows."""
        if all(not work.request.kept and work.request.edge is None for work in works):
            start, stop = works[0].first, works[-1].first + works[-1].count
            total = sum(work.count for work in works)
            if stop - start == total and total <= _BLOCK:
                return self._net.features([state[start:stop] for state in verified.states])
            if total <= _BLOCK:
                rows = self._moved(
                    np.concatenate([np.arange(w.first, w.first + w.count) for w in works])
                )
                return self._net.features([s.index_select(0, rows) for s in verified.states])
        blocks = [
            self._net.features([torch.cat([piece.joined() for piece in block])])
            for block in _blocks(works, verified.states)
        ]
        features = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        edges = [(j, w.request.edge) for j, w in enumerate(works) if w.request.edge is not None]
        if not edges:
            return features
        whole = features.new_empty(len(features) + len(edges), features.shape[1])
        others = np.ones(len(whole), bool)
        others[[firsts[j] for j, _ in edges]] = False
        whole[self._moved(np.flatnonzero(~others))] = torch.stack([edge for _, edge in edges])
        whole[self._moved(np.flatnonzero(others))] = features
        return whole

    def _register(
        self,
        works: Sequence[_Work],
        spans: Sequence[Span],
        firsts: Places,
        context: DraftContext,
        features: torch.Tensor,
    ) -> None:
        pages: list[int] = []
        rows: list[int] = []
        for work, span, first in zip(works, spans, firsts.tolist(), strict=True):
            filled, positions = self._cache.register(
                span.sequence, context.token_ids[work.row], span.end
            )
            work.request.forget_waiting()
            pages += filled
            rows += [first + position - span.begin for position in positions]
        if pages:
            last = features.index_select(0, self._moved(np.array(rows, np.int64)))
            self._cache.edges.index_copy_(0, self._moved(np.array(pages, np.int64)), last)

    def _grown(
        self,
        tree: TreeLimits,
        ahead: Ahead,
        depth: int,
        drafting: list[int],
        context: DraftContext,
    ) -> dict[int, DraftTree]:
        """Trees by place in the batch: at each depth all nodes that get children go through the layers
        together, each seeing those above it."""
        budgets = context.budgets[drafting]
        growth = Growth(
            self._calibration.table(), len(drafting), tree.branching, self._targets, self._device
        )
        visible: torch.Tensor | None = None
        while True:
            logits, feature = self._net.leave(ahead.moved, ahead.residual)
            beam = growth.add(logits)
            if growth.depth == depth:
                break
            rows = growth.stay(self._tree_rule, budgets, context) if self.stops_early else None
            tokens, above = beam.tokens, beam.above
            feature = feature.view(len(above), -1, feature.shape[-1])
            if rows is not None:
                if not len(rows):
                    break
                tokens, above, feature = (
                    part.index_select(0, rows) for part in (tokens, above, feature)
                )
                visible = None if visible is None else visible.index_select(0, rows)
                self._layers.keep(ahead, rows)
            visible = _seen(visible, above)
            places = above[..., None].expand(-1, -1, feature.shape[-1])
            entered = self._net.enter(tokens.flatten(), feature.gather(1, places).flatten(0, 1))
            self._layers.advance(ahead, *entered, visible)
        self.draft_steps = growth.depth
        nodes = min(tree.nodes, int(budgets.max()))
        spent = context.after(growth.depth)
        return proposed_trees(growth.trees(nodes), drafting, spent, self._tree_rule, self._outcomes)

    def _targets(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self._token_map is None else self._token_map[draft_ids]

    def _steps(self, ahead: Ahead, depth: int) -> ChainSteps:
        for d in range(depth):
            logits, feature = self._net.leave(ahead.moved, ahead.residual)
            probability, best = torch.softmax(logits, -1, dtype=torch.float32).max(-1)
            token = best if self._token_map is None else self._token_map.index_select(0, best)
            keep = yield token, probability
            if d + 1 == depth:
                return
            if keep is not None:
                token, feature = (part.index_select(0, keep) for part in (token, feature))
                self._layers.keep(ahead, keep)
            self._layers.advance(ahead, *self._net.enter(token, feature))


def _seen(visible: torch.Tensor | None, above: torch.Tensor) -> torch.Tensor:
    """bool [B, W, T + W]: what nodes see of the drafted entries, they the last of them: themselves, and what
    their parents see. visible: [B, V, T] of the depth before; above: [B, W], parents among its V nodes."""
    batch, width = above.shape
    own = torch.eye(width, dtype=torch.bool, device=above.device).expand(batch, width, width)
    if visible is None:
        return own
    return torch.cat(
        (visible.gather(1, above[..., None].expand(-1, -1, visible.shape[-1])), own), -1
    )


def _keep(works: Sequence[_Work], states: Sequence[torch.Tensor]) -> None:
    """Copy the works' rows: one copy for all."""
    rows = np.concatenate([np.arange(w.first, w.first + w.count) for w in works])
    if len(rows) == rows[-1] - rows[0] + 1:
        parts = [state[rows[0] : rows[-1] + 1] for state in states]
        copy = parts[0].clone() if len(parts) == 1 else torch.cat(parts, -1)
    else:
        index = torch.from_numpy(rows).to(states[0].device, non_blocking=True)
        copies = [state.index_select(0, index) for state in states]
        copy = copies[0] if len(copies) == 1 else torch.cat(copies, -1)
    first = 0
    for work in works:
        work.request.keep(Piece((copy,), first, work.count))
        first += work.count


def _blocks(works: Sequence[_Work], states: tuple[torch.Tensor, ...]) -> Iterator[list[Piece]]:
    """All works' rows in order (without edges), at most _BLOCK at a time."""
    block: list[Piece] = []
    size = 0
    for work in works:
        for piece in (*work.request.kept, Piece(states, work.first, work.count)):
            first, left = piece.first, piece.count
            while left:
                count = min(left, _BLOCK - size)
                block.append(Piece(piece.states, first, count))
                first, left, size = first + count, left - count, size + count
                if size == _BLOCK:
                    yield block
                    block, size = [], 0
    if block:
        yield block
