"""Whether a draft is worth its forwards: decided before it is made, from what became of earlier ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.lengths import step_times
from vllm_specx.draft.outcomes import outcomes as outcomes_of
from vllm_specx.draft.proposer import DraftContext, TrainedDrafter
from vllm_specx.draft.prospects import Prospects
from vllm_specx.draft.tree import DraftTree, IntArray

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

_DRAFT_SHARE = 0.05
"""What a forward of the draft is taken to cost, in steps of the target, until it is measured."""
_PROBE_AFTER = 12
"""Steps without a draft after which some requests are tried again, as the text may have changed: for each of up
to _MANY requests, as the more there are the more is tried at a time."""
_MANY = 4
_PROBE_SELDOM = 192
"""After so many, where trying them has changed nothing again and again."""
_PROBE_STEPS = 4
"""For so many steps in a row."""
_PROBED = 8
"""One request in so many is tried."""
_SHAPE_MEMORY = 0.98
"""What is known of the shape of drafts is worth, after one more."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A draft whose outcome is not known yet. depth: tokens of its longest path. count: tokens asked for, of
    one path. at: committed tokens then. tried: it was made and verified whatever it cost."""

    draft: DraftTree
    depth: int
    count: int
    at: int
    tried: bool


class Gate:
    """Per step: which requests are to be drafted for, by expected tokens per unit of time.

    trained: the drafter whose drafts are weighed. depth: tokens it is asked for at most. trees: whether it
    drafts trees; how large they are is its own choice then, and depth is that of a path.
    """

    def __init__(self, trained: TrainedDrafter, depth: int, *, trees: bool = False) -> None:
        self._trees = trees
        # Nodes of a tree, for each token of its longest path.
        self._width = 1.0
        # Forwards of a step whose tokens were not worth verifying.
        self._dropped = 0.5
        self.depth = min(depth, trained.depth)
        self.prospects = Prospects(self.depth, trained.acceptance)
        self._trained = trained
        self._asked: dict[str, _Asked] = {}
        self._idle = 0
        self._patience = _PROBE_AFTER
        self._probes = 0
        self._probing = False

    def learn(self, context: DraftContext) -> None:
        """What became of the drafts that this step verified."""
        judged: list[str] = []
        outcomes: list[tuple[int, int, int, int]] = []
        for i, request in enumerate(context.request_ids):
            sampled = context.sampled[i]
            if not sampled or (asked := self._asked.pop(request, None)) is None:
                continue
            if asked.at == int(context.num_tokens[i]) - len(sampled):
                right = self._agreed(asked, sampled)
                # The scheduler may have cut the draft: what it did not verify, it did not refuse.
                failed = right < min(asked.count, len(sampled))
                judged.append(request)
                outcomes.append((asked.count, asked.depth, right, failed))
        if judged:
            self.prospects.learn(judged, *np.array(outcomes, np.int64).T)
        self.prospects.forget(context.finished)
        for request in context.finished:
            self._asked.pop(request, None)

    def _agreed(self, asked: _Asked, sampled: Sequence[int]) -> int:
        """Tokens in a row that were right."""
        if not self._trees:
            return agreeing(asked.draft.tokens, sampled)
        # What was tried whatever it cost says nothing of how wide trees are that pay.
        if asked.depth and not asked.tried:
            wide = len(asked.draft.tokens) / asked.depth
            self._width += (1.0 - _SHAPE_MEMORY) * (wide - self._width)
        return sum(right for _, right in outcomes_of(asked.draft, sampled))

    def expect(self, context: DraftContext, asked: LongArray, drafts: Sequence[DraftTree]) -> None:
        """The drafts that were made, as asked for."""
        steps = self._trained.draft_steps
        tried = self._probing or context.costs is None
        depths = [each.depth() if self._trees else len(each.tokens) for each in drafts]
        if steps > 0 and not tried:
            dropped = max(steps - max(depths, default=0), 0)
            self._dropped += (1.0 - _SHAPE_MEMORY) * (dropped - self._dropped)
        for i in np.flatnonzero(asked).tolist():
            if context.request_ids[i] in self._trained.missed:
                continue
            self._asked[context.request_ids[i]] = _Asked(
                drafts[i],
                depths[i],
                int(asked[i]),
                int(context.num_tokens[i]),
                tried,
            )

    def choose(
        self,
        context: DraftContext,
        costs: FloatArray,
        gain: FloatArray,
        tokens: LongArray,
    ) -> LongArray:
        """int64 [B]: how many tokens to ask for; 0: no draft, or what the request has without.

        costs: see DraftContext. gain, tokens: what each request has without: expected accepted tokens
        [B], of a draft of so many tokens [B]. A request changes where that brings more tokens, both
        less the price of verifying them; all that would change do, if that pays for the forwards.
        """
        self._probing = False
        size = len(tokens)
        budgets = np.minimum(np.asarray(context.budgets, np.int64), self.depth)
        nothing = np.zeros(size, np.int64)
        budgets[[not sampled for sampled in context.sampled]] = 0
        if not budgets.any():
            return nothing
        made, accepted = self.prospects.reach(context.request_ids)
        outside = np.arange(self.depth) >= budgets[:, None]
        made[outside] = accepted[outside] = 0.0
        verified, gains = self._width * np.cumsum(made, axis=1), np.cumsum(accepted, axis=1)
        total = int(tokens.sum())
        now, then = step_times(costs, [total, total + size])
        goodput = (size + gain.sum()) / now
        token = goodput * (then - now) / size
        bar = np.maximum(gain - token * tokens, 0.0)
        forward = context.draft_cost
        if forward is None:
            forward = _DRAFT_SHARE * float(costs[0])
        best = nothing
        early = self._trained.stops_early or self._trees
        for depth in [self.depth] if early else range(1, self.depth + 1):
            worth = gains[:, depth - 1] - token * verified[:, depth - 1]
            mine = (worth > bar) & (budgets > 0)
            if not mine.any():
                continue
            if early:
                # One forward for as long as any draft goes on, and those whose tokens are dropped.
                longest = float((1.0 - np.prod(1.0 - made[mine], axis=0)).sum())
                forwards = max(longest, 1.0) + self._dropped
            else:
                forwards = float(self._trained.forwards(int(min(depth, budgets[mine].max()))))
            expected = size + gain[~mine].sum() + gains[mine, depth - 1].sum()
            length = tokens[~mine].sum() + verified[mine, depth - 1].sum()
            rate = expected / (float(step_times(costs, length)) + forwards * forward)
            if rate > goodput:
                goodput, best = rate, np.where(mine, np.minimum(budgets, depth), 0)
        if best.any():
            self._idle, self._patience = 0, _PROBE_AFTER
        else:
            self._idle += 1
        wait = min(self._patience * min(size, _MANY), _PROBE_SELDOM)
        return self._probe(budgets, tokens, wait) if self._idle > wait else best

    def _probe(self, budgets: LongArray, tokens: LongArray, wait: int) -> LongArray:
        """A few of the requests that have nothing, another few each time. wait: steps before a trial."""
        asked = np.zeros(len(budgets), np.int64)
        able = np.flatnonzero((budgets > 0) & (tokens == 0))
        if not len(able):
            return asked
        self._probing = True
        chosen = (self._probes + np.arange(-(-len(able) // _PROBED)) * _PROBED) % len(able)
        asked[able[chosen]] = budgets[able[chosen]]
        if self._idle >= wait + _PROBE_STEPS:
            self._idle = 0
            self._patience = min(2 * self._patience, _PROBE_SELDOM)
            self._probes += 1
        return asked

    def shown(self, context: DraftContext, asked: LongArray) -> DraftContext:
        """What the drafter is given, as choose() has decided. Those that get nothing are shown to it
        nevertheless: it keeps up with the text. What is tried is drafted, a tree with no more nodes than a
        path may have, and verified whatever it costs: costs that are wrong, and keep drafts away, are only seen to be wrong by drafting."""
        budgets = asked
        if self._trees and not self._probing:
            budgets = np.where(asked > 0, context.budgets, 0)
        mine = dataclasses.replace(context, budgets=budgets.astype(np.int32))
        return dataclasses.replace(mine, costs=None, draft_cost=None) if self._probing else mine


def agreeing(draft: IntArray, sampled: Sequence[int]) -> int:
    """How many tokens of a chain the step after it has committed."""
    for i, (guess, truth) in enumerate(zip(draft.tolist(), sampled, strict=False)):
        if guess != truth:
            return i
    return min(len(draft), len(sampled))
