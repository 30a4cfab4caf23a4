"""n-gram lookahead and a trained draft together: each step and request by what promises more.

A long match costs nothing and is often right; a trained draft covers the rest, but costs a forward
of its own. Which one a request gets is weighed by goodput: what it adds in expected tokens, less the
time of verifying them and of drafting, at the price that a token has in this step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.ngram import NgramLookahead, Prediction
from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.prospects import Prospects, accepted_of
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree, IntArray

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]
_CAUTION = 1.2
"""What the trained draft's steps are taken to cost, in units of what they are thought to."""
_PROBE_AFTER = 50
"""Steps without the trained draft after which it is asked for one token: the text may have changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A trained draft whose outcome is not known yet. at: committed tokens when it was made."""

    tokens: IntArray
    at: int


class AutoDrafter:
    """Implements draft.proposer.Proposer with an n-gram lookahead and a trained draft.

    trained: MedusaDrafter or EagleDrafter.
    depth: tokens that the trained draft is asked for at most.
    step_share: the time of one of its steps (one more token for every request), in units of a decode
        step of the target without drafts. The same on every tensor-parallel rank, as all here.
    prospects: of the trained draft.
    sources: how many drafts each has made so far.
    """

    def __init__(
        self,
        ngram: NgramLookahead,
        trained: Proposer,
        *,
        depth: int,
        step_share: float,
        prospects: Prospects,
    ) -> None:
        self.ngram, self.trained = ngram, trained
        self.depth, self.step_share = depth, step_share
        self.prospects = prospects
        self.needs_hidden_states = trained.needs_hidden_states
        self.needs_verified_rows = trained.needs_verified_rows
        self.sources = {"ngram": 0, "trained": 0}
        self._asked: dict[str, _Asked] = {}
        self._idle = 0

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One chain a request, from either source; see draft.proposer.DraftContext."""
        self._learn(context)
        found = self.ngram.predict(context)
        costs = self.ngram.costs(context)
        budgets = np.asarray(context.budgets, np.int64)
        by_ngram = self.ngram.lengths(found, budgets, costs)
        asked = self._choose(context, found, by_ngram, budgets, costs)
        # Those that get nothing of it are shown to it nevertheless: it keeps up with the text.
        shown = dataclasses.replace(context, budgets=asked.astype(np.int32))
        drafts = self.trained.propose(shown)
        self.sources["trained"] += int((asked > 0).sum())
        self.sources["ngram"] += int(((asked == 0) & (by_ngram > 0)).sum())
        return [
            self._kept(context, i, drafts[i])
            if asked[i]
            else DraftTree.chain(found.tokens[i, : by_ngram[i]])
            if by_ngram[i]
            else EMPTY_DRAFT
            for i in range(len(asked))
        ]

    def _kept(self, context: DraftContext, i: int, draft: DraftTree) -> DraftTree:
        self._asked[context.request_ids[i]] = _Asked(draft.tokens, int(context.num_tokens[i]))
        return draft

    def _learn(self, context: DraftContext) -> None:
        for i, request in enumerate(context.request_ids):
            sampled = context.sampled[i]
            if not sampled or (asked := self._asked.pop(request, None)) is None:
                continue
            if asked.at == int(context.num_tokens[i]) - len(sampled):
                right = accepted_of(asked.tokens, sampled)
                # The scheduler may have cut the draft: what it did not verify, it did not refuse.
                tried = min(len(asked.tokens), len(sampled))
                self.prospects.learn(request, tried, right)
        self.prospects.forget(context.finished)
        for request in context.finished:
            self._asked.pop(request, None)

    def _choose(
        self,
        context: DraftContext,
        found: Prediction,
        by_ngram: LongArray,
        budgets: LongArray,
        costs: FloatArray,
    ) -> LongArray:
        """int64 [B]: how many tokens each request is to have of the trained draft; 0: the n-gram's.

        Every number of steps is tried: within it, a request changes to the trained draft where that
        adds more tokens than its n-gram draft, both less the price of verifying them.
        """
        size = len(budgets)
        best = np.zeros(size, np.int64)
        able = (budgets > 0) & np.fromiter(map(bool, context.sampled), bool, size)
        if not able.any():
            return best
        reach = self.prospects.reach(context.request_ids)
        reach[np.arange(self.depth) >= np.where(able, budgets, 0)[:, None]] = 0.0
        inside = np.arange(found.reach.shape[1]) < by_ngram[:, None]
        gain = np.where(inside, found.reach, 0.0).sum(1)
        total = int(by_ngram.sum())
        price = (size + gain.sum()) / _cost(costs, total)
        token = price * (_cost(costs, total + size) - _cost(costs, total)) / size
        bar = np.maximum(gain - token * by_ngram, 0.0)
        gains = np.cumsum(reach, axis=1)
        worth = gains - token * np.arange(1, self.depth + 1)
        goodput = price
        for steps in range(1, self.depth + 1):
            lengths = worth[:, :steps].argmax(1) + 1
            lengths[worth[:, :steps].max(1) <= bar] = 0
            mine = lengths > 0
            if not mine.any():
                continue
            tokens = size + gain[~mine].sum() + gains[mine, lengths[mine] - 1].sum()
            time = _cost(costs, int(by_ngram[~mine].sum() + lengths.sum()))
            time += int(lengths.max()) * _CAUTION * self.step_share * float(costs[0])
            if tokens / time > goodput:
                goodput, best = tokens / time, lengths
        self._idle = 0 if best.any() else self._idle + 1
        if self._idle == _PROBE_AFTER:
            self._idle = 0
            best = (able & (by_ngram == 0)).astype(np.int64)
        return best


def _cost(costs: FloatArray, tokens: int) -> float:
    """Of a step that verifies `tokens` draft tokens; beyond the end it goes on in a straight line."""
    last = len(costs) - 1
    if tokens <= last:
        return float(costs[tokens])
    slope = float(costs[last] - costs[last - 1]) if last else 0.0
    return float(costs[last]) + slope * (tokens - last)
