"""Where a chain ends: while it is drafted, and of what was drafted, how much is verified."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.chains import GoesOn, Probabilities
from vllm_specx.draft.draft_rule import DraftRule
from vllm_specx.draft.lengths import chain_lengths, goes_on
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import IntArray


class ChainRule(DraftRule):
    """By what the draft thinks of its tokens, corrected by what became of earlier ones."""

    def estimate(self, probabilities: Probabilities) -> npt.NDArray[np.float64]:
        """probabilities [B, depth] -> acceptance of each token given those before it."""
        return self._calibration.estimate(probabilities)

    def usual(self) -> npt.NDArray[np.float64]:
        """float64 [depth]: acceptance at each depth, whatever its probability."""
        return self._calibration.usual()

    def lengths(
        self, probabilities: Probabilities, budgets: IntArray, context: DraftContext
    ) -> IntArray:
        """probabilities [B, depth], budgets int [B] -> how much of each chain is proposed, int32 [B].
        context: after() the forwards of the draft."""
        return chain_lengths(
            self.estimate(probabilities),
            budgets,
            context.costs,
            others=len(context.request_ids) - len(probabilities),
            min_probability=self._min_probability,
            token_cost=self._token_cost,
            default_cost=self._default_cost,
        )

    def goes_on(self, budgets: IntArray, context: DraftContext) -> GoesOn:
        """For chains.draw()."""
        usual = self.usual()
        draft_cost = context.draft_cost if self.by_goodput else None

        def more(probabilities: Probabilities, made: IntArray) -> npt.NDArray[np.bool_]:
            now = context.after(probabilities.shape[1])
            return goes_on(
                self.estimate(probabilities),
                made,
                self.lengths(probabilities, np.minimum(budgets, made), now),
                budgets,
                float(usual[probabilities.shape[1]]),
                now.costs,
                draft_cost,
                others=len(context.request_ids) - len(probabilities),
            )

        return more
