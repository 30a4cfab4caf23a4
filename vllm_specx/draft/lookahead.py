"""Lookahead decoding beside n-gram drafts: windows of guesses that make n-grams for their request.

Lookahead decoding (arXiv 2402.02057) spends rows of the target's forward that cost nothing, where decoding waits
for memory, on guessing n-grams; what was guessed is verified as any draft, among the n-grams that the text itself
has. Accepting a node of the window is lossless, too, and is done: each of its nodes has the path above it for
its context, as the nodes of any draft tree.

For greedy requests only: the window follows the likeliest tokens. For others it would be lossless, too, but
guess worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specx.draft.depth_calibration import DepthCalibration, bin_of
from vllm_specx.draft.guesses import Guesses, GuessPool
from vllm_specx.draft.jacobi_window import JacobiWindow
from vllm_specx.draft.lengths import FloatArray
from vllm_specx.draft.lookahead_config import LookaheadConfig
from vllm_specx.draft.merged import merged
from vllm_specx.draft.outcomes import Guess, Outcomes, outcomes
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.spare_rows import SpareRows
from vllm_specx.draft.tree import DraftTree, IntArray, Reach

_ACCEPTANCE = (0.15, 0.3, 0.4)
"""Of n-grams, by depth, what is expected at first."""


@dataclass(slots=True)
class _Request:
    """laid: committed tokens when the window was last in a draft."""

    window: JacobiWindow
    guesses: GuessPool
    laid: int = 0


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A draft whose outcome is not known yet. own: what there was without our n-grams; draft: what was
    drafted, without the window. at: committed tokens then."""

    own: DraftTree
    draft: DraftTree
    at: int
    with_window: bool


class Lookahead:
    """Of one NgramLookahead, which asks in this order: learn, add_to, and beside.

    branching: children of a node at most. max_model_len: tokens of a request at most. gained: accepted
    tokens that there would not have been without windows, in all.
    """

    def __init__(self, config: LookaheadConfig, branching: int, max_model_len: int) -> None:
        self.config = config
        self.gained: Counter[str] = Counter()
        self._branching, self._max_model_len = branching, max_model_len
        self._spare = SpareRows()
        self._calibration = DepthCalibration(config.ngram - 1, _ACCEPTANCE)
        self._outcomes = Outcomes(self._calibration)
        self._requests: dict[str, _Request] = {}
        self._drafted: dict[str, _Drafted] = {}
        self._own: dict[int, DraftTree] = {}

    def learn(self, context: DraftContext) -> None:
        """What became of the last drafts, and what the target said to the windows."""
        for request in context.finished:
            self._requests.pop(request, None)
            self._drafted.pop(request, None)
        self._outcomes.learn(context)
        self._weigh(context)
        for i, request in enumerate(context.request_ids):
            known, said = self._requests.get(request), context.answers.get(request)
            if known is None or said is None or len(said) != self.config.window:
                continue
            if known.laid == int(context.num_tokens[i]) - len(context.sampled[i]):
                known.guesses.add(known.window.update(said))

    def add_to(
        self,
        context: DraftContext,
        tokens: IntArray,
        parents: IntArray,
        reach: FloatArray,
        lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        """Our n-grams into what is predicted: the fields of an ngram.Prediction of trees, in place."""
        self._own.clear()
        for i, request in enumerate(context.request_ids):
            known = self._requests.get(request)
            if known is None or not context.sampled[i] or context.budgets[i] <= 0:
                continue
            last = int(context.token_ids[context.rows[i], context.num_tokens[i] - 1])
            found = known.guesses.after(last, self._branching)
            if found is None:
                continue
            size = int(lengths[i])
            own = DraftTree(
                tokens[i, :size].copy(),
                parents[i, :size].copy(),
                reach[i, :size].astype(np.float32),
            )
            mine = DraftTree(found.tokens, found.parents, self._reach(found))
            both = merged(own, mine).prefix(tokens.shape[1])
            assert both.reach is not None
            size = len(both.tokens)
            tokens[i, :size], parents[i, :size] = both.tokens, both.parents
            reach[i, :size], lengths[i] = both.reach, size
            self._own[i] = own
            guess = Guess(mine, found.depths, found.shares, int(context.num_tokens[i]))  # type: ignore[arg-type]
            self._outcomes.expect(request, guess)

    def beside(
        self, context: DraftContext, drafts: Sequence[DraftTree], costs: FloatArray
    ) -> list[DraftTree]:
        """The drafts, with a window each where there should be one. costs: see DraftContext."""
        places = [i for i in range(len(drafts)) if self._may_have(context, i, drafts[i])]
        rows = len(places) * self.config.rows
        size = sum(map(bool, context.sampled))
        spend = bool(places) and (
            self.config.when == "always"
            or self._spare.pay(size, sum(len(d.tokens) for d in drafts), rows, len(places), costs)
        )
        made = list(drafts)
        if spend:
            for i in places:
                made[i] = drafts[i].beside(self._lay(context, i), self.config.window)
        for i, request in enumerate(context.request_ids):
            if context.sampled[i]:
                own = self._own.get(i, drafts[i])
                at = int(context.num_tokens[i])
                self._drafted[request] = _Drafted(own, drafts[i], at, bool(made[i].window))
        return made

    def _may_have(self, context: DraftContext, i: int, draft: DraftTree) -> bool:
        """Whether request i can have a window beside this draft."""
        room = self._max_model_len - int(context.num_tokens[i]) - 1 - len(draft.tokens)
        return bool(
            context.sampled[i]
            and context.budgets[i] > 0
            and context.temperatures[i] <= 0.0
            and i not in context.chains
            and room >= self.config.rows
        )

    def _lay(self, context: DraftContext, i: int) -> DraftTree:
        request, now = context.request_ids[i], int(context.num_tokens[i])
        text = context.token_ids[context.rows[i], :now]
        known = self._requests.get(request)
        if known is None:
            window = JacobiWindow(self.config.window, self.config.ngram, text)
            known = self._requests[request] = _Request(window, GuessPool(self.config.window))
        known.laid = now
        return known.window.tree(int(text[-1]))

    def _weigh(self, context: DraftContext) -> None:
        requests = tokens = windows = gained = 0
        for i, request in enumerate(context.request_ids):
            sampled = context.sampled[i]
            before = self._drafted.pop(request, None) if sampled else None
            if before is None or before.at != int(context.num_tokens[i]) - len(sampled):
                continue
            requests += 1
            tokens += len(sampled)
            accepted = len(sampled) - 1
            if before.draft is not before.own or before.with_window:
                without = min(_right(before.own, sampled), _right(before.draft, sampled))
                brought = max(accepted - without, 0)
                self.gained[""] += brought
                gained += brought
            windows += before.with_window
        self._spare.learn(requests, tokens, windows, gained)

    def _reach(self, found: Guesses) -> Reach:
        """float32 [n], by what became of n-grams so far: of each node, if all above it is accepted, at most
        what its siblings leave."""
        rates = self._calibration.table()[found.depths, bin_of(found.shares)]
        together = np.zeros(len(rates) + 1)
        np.add.at(together, found.parents + 1, rates)
        rates /= np.maximum(together[found.parents + 1], 1.0)
        for node, parent in enumerate(found.parents.tolist()):
            if parent >= 0:
                rates[node] *= rates[parent]
        return rates.astype(np.float32)


def _right(tree: DraftTree, sampled: Sequence[int]) -> int:
    """Tokens in a row that are right."""
    return sum(right for _, right in outcomes(tree, sampled))
