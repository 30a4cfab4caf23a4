"""How much of a chain that was drawn at random is proposed.

Whether a token is proposed must not depend on which one was drawn in its place, nor on what was drawn after
it: else the target would see some tokens more often than q says, and what is said would not have its
distribution (tests/unit/test_verify_chain.py shows the fault). So lengths are decided as the chain grows,
by what the draft's distribution looks like, and are never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.chain_rule import ChainRule
from vllm_specx.draft.chains import Chains, Probabilities
from vllm_specx.draft.depth_calibration import DepthCalibration, bin_of
from vllm_specx.draft.outcomes import Guess, Outcomes
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.sampling import Draws, Source
from vllm_specx.draft.tree import DraftTree, IntArray

FloatArray = npt.NDArray[np.float64]


class SampledRule(ChainRule):
    """A ChainRule for batches in which some drafts are drawn: those are accepted more often, so they have
    a calibration of their own, the lower half of one with twice the depth."""

    def __init__(
        self,
        depth: int,
        *,
        min_probability: float | None,
        token_cost: float | None,
        on_cpu: bool,
    ) -> None:
        self.calibration = DepthCalibration(depth, kinds=2)
        self.depth = depth
        self.drawn: npt.NDArray[np.bool_] | None = None
        """bool [B], of the rows that are asked about."""
        super().__init__(
            self.calibration,
            min_probability=min_probability,
            token_cost=token_cost,
            on_cpu=on_cpu,
        )

    def estimate(self, probabilities: Probabilities) -> FloatArray:
        """Acceptance of each token given those before it [B, d]."""
        depths = np.arange(probabilities.shape[1])
        if self.drawn is None:
            return self.calibration.estimate(probabilities)
        places = depths + self.depth * self.drawn[:, None]
        estimated: FloatArray = self.calibration.table()[places, bin_of(probabilities)]
        return estimated

    def usual(self) -> FloatArray:
        """float64 [depth]: acceptance at each depth, whatever its probability."""
        both = self.calibration.usual().reshape(2, self.depth)
        share = 0.0 if self.drawn is None else float(self.drawn.mean())
        mixed: FloatArray = (1.0 - share) * both[0] + share * both[1]
        return mixed

    def as_it_grew(
        self, probabilities: Probabilities, budgets: IntArray, context: DraftContext
    ) -> IntArray:
        """int32 [B]: how long each chain is if every length is decided by the tokens up to there. budgets:
        int [B], not above the tokens that were made."""
        size, depth = probabilities.shape
        lengths = np.zeros(size, np.int32)
        grows = np.ones(size, np.bool_)
        for d in range(1, depth + 1):
            now = self.lengths(probabilities[:, :d], np.minimum(budgets, d), context.after(d))
            grows &= now >= d
            if not grows.any():
                break
            lengths[grows] = d
        return lengths


def proposed(
    chains: Chains,
    draws: Draws,
    requests: Sequence[int],
    context: DraftContext,
    rule: SampledRule,
    outcomes: Outcomes,
) -> tuple[dict[int, DraftTree], dict[str, Source]]:
    """The drafts by place in the batch, and what those that were drawn come from, by request.

    requests: the places that the rows of chains and draws are of; rule.drawn is of them.
    """
    most = np.minimum(context.budgets[list(requests)], chains.made)
    lengths = rule.lengths(chains.probabilities, most, context.after(chains.steps))
    grown = rule.as_it_grew(chains.probabilities, most, context)
    # Also decided without a look at the tokens.
    grown = np.minimum(grown + draws.explored, most)
    lengths = np.where(draws.drawn, grown, lengths)
    drafts: dict[int, DraftTree] = {}
    sources: dict[str, Source] = {}
    for j, i in enumerate(requests):
        length, drawn = int(lengths[j]), bool(draws.drawn[j])
        drafts[i] = DraftTree.chain(chains.tokens[j, :length])
        # What was drawn and is not proposed says nothing: the target does not draw the same token as
        # often as it would accept it.
        watched = length if drawn else int(chains.made[j])
        depths = np.arange(watched, dtype=np.int32) + rule.depth * drawn
        if drawn and length:
            sources[context.request_ids[i]] = draws.source(j, length)
        outcomes.expect(
            context.request_ids[i],
            Guess(
                DraftTree.chain(chains.tokens[j, :watched]),
                depths.astype(np.int32),
                chains.probabilities[j, :watched],
                int(context.num_tokens[i]),
            ),
        )
    return drafts, sources
