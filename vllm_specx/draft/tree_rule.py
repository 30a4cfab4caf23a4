"""How many nodes of each tree are verified, and how deep trees are drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.best_nodes import FloatArray, Trees
from vllm_specx.draft.branches import worth_their_branches
from vllm_specx.draft.draft_rule import DraftRule
from vllm_specx.draft.lengths import goodput_lengths, step_times
from vllm_specx.draft.outcomes import Guess, Outcomes
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree, IntArray


class TreeRule(DraftRule):
    """By the probability that a node is accepted, against the time of verifying one more."""

    def children(self, probabilities: npt.NDArray[np.floating]) -> FloatArray:
        """probabilities [..., depth, k] of the best tokens of each depth -> acceptance of each if all
        above it is accepted, same shape; all of one place together are at most 1."""
        swapped = np.swapaxes(probabilities, -1, -2)
        estimate = np.swapaxes(self._calibration.estimate(swapped), -1, -2)
        children: FloatArray = estimate / np.maximum(estimate.sum(-1, keepdims=True), 1.0)
        return children

    def sizes(self, reach: FloatArray, budgets: IntArray, context: DraftContext) -> IntArray:
        """reach [B, N], falling; budgets int [B] -> nodes to verify, int32 [B]. context: after() the
        forwards of the draft."""
        if self._min_probability is not None:
            enough = (reach >= self._min_probability) & (reach > 0.0)
            chosen = enough.sum(1)
        elif context.costs is not None and self.by_goodput:
            others = len(context.request_ids) - len(reach)
            return goodput_lengths(reach, budgets, context.costs, others)
        else:
            cost = self._default_cost if self._token_cost is None else self._token_cost
            gain = np.concatenate([np.ones((len(reach), 1)), 1.0 + np.cumsum(reach, 1)], 1)
            chosen = (gain / (1.0 + cost * np.arange(gain.shape[1]))).argmax(1)
        sizes: IntArray = np.minimum(chosen, budgets).astype(np.int32)
        return sizes

    def goes_on(
        self,
        candidates: FloatArray,
        frontier: FloatArray,
        ratio: FloatArray,
        budgets: IntArray,
        context: DraftContext,
    ) -> npt.NDArray[np.bool_]:
        """Which trees deserve one more depth, bool [B].

        candidates: [B, M], reach of all nodes so far, in any order. frontier: [B, W], of those that would
        get children; 0: none. ratio: [B], what the last depth had together over what was above it, which
        the next one is taken to have, too. context: after() the forwards so far.
        """
        best = frontier.max(1)
        alive: npt.NDArray[np.bool_] = best > 0.0
        if self._min_probability is not None:
            alive &= best >= self._min_probability
            return alive
        if context.costs is None or not self.by_goodput:
            return alive
        ranked = -np.sort(-candidates, axis=1)
        size = len(candidates)
        others = len(context.request_ids) - size
        sizes = goodput_lengths(ranked, budgets, context.costs, others)
        verified = int(sizes.sum())
        now, then = step_times(context.costs, [verified, verified + size])
        gained = float(ranked[np.arange(ranked.shape[1]) < sizes[:, None]].sum())
        price = (len(context.request_ids) + gained) / now
        token = price * (then - now) / size
        gain = np.maximum(frontier * ratio[:, None] - token, 0.0).sum(1)
        alive &= gain > 0.0
        if context.draft_cost is not None and gain[alive].sum() <= price * context.draft_cost:
            alive[:] = False
        return alive


def proposed_trees(
    trees: Trees,
    requests: Sequence[int],
    context: DraftContext,
    rule: TreeRule,
    outcomes: Outcomes,
) -> dict[int, DraftTree]:
    """The drafts by place in the batch, and what is learned from what becomes of them. requests: the places
    that the rows of trees are of. context: after() the forwards of the draft."""
    budgets = context.budgets[list(requests)]
    sizes = rule.sizes(trees.reach, np.minimum(budgets, trees.made), context)
    chosen: list[DraftTree] = []
    for j, i in enumerate(requests):
        made = int(trees.made[j])
        whole = DraftTree(
            trees.tokens[j, :made],
            trees.parents[j, :made],
            trees.reach[j, :made].astype(np.float32),
        )
        chosen.append(whole.prefix(int(sizes[j])))
        outcomes.expect(
            context.request_ids[i],
            Guess(
                whole,
                trees.depths[j, :made],
                trees.probabilities[j, :made],
                int(context.num_tokens[i]),
            ),
        )
    if rule.by_goodput:
        chosen = worth_their_branches(chosen, context.costs)
    return dict(zip(requests, chosen, strict=True))
