"""From drafted chains to what is proposed, and to what is learned from what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specx.draft.chain_rule import ChainRule
from vllm_specx.draft.chains import Chains
from vllm_specx.draft.outcomes import Guess, Outcomes
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree


def proposed(
    chains: Chains,
    requests: Sequence[int],
    context: DraftContext,
    rule: ChainRule,
    outcomes: Outcomes,
) -> dict[int, DraftTree]:
    """The drafts by place in the batch. requests: the places that the rows of chains are of."""
    budgets = context.budgets[list(requests)]
    most = np.minimum(budgets, chains.made)
    lengths = rule.lengths(chains.probabilities, most, context.after(chains.steps))
    depths = np.arange(chains.tokens.shape[1], dtype=np.int32)
    drafts: dict[int, DraftTree] = {}
    for j, i in enumerate(requests):
        drafts[i] = DraftTree.chain(chains.tokens[j, : lengths[j]])
        made = int(chains.made[j])
        outcomes.expect(
            context.request_ids[i],
            Guess(
                DraftTree.chain(chains.tokens[j, :made]),
                depths[:made],
                chains.probabilities[j, :made],
                int(context.num_tokens[i]),
            ),
        )
    return drafts
