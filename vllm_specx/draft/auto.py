"""n-gram lookahead and a trained draft together: each step and request by what promises more.

A long match costs nothing and is often right; a trained draft covers the rest, but costs forwards of
its own. Which one a request gets is weighed by goodput (draft/gate.py).
"""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.gate import Gate
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext, TrainedDrafter
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree


class AutoDrafter:
    """Implements draft.proposer.Proposer with an n-gram lookahead and a trained draft.

    depth: tokens that the trained draft is asked for at most.
    sources: how many drafts each has made so far.
    """

    def __init__(self, ngram: NgramLookahead, trained: TrainedDrafter, *, depth: int) -> None:
        self.ngram, self.trained = ngram, trained
        self.gate = Gate(trained, depth)
        self.needs_hidden_states = trained.needs_hidden_states
        self.needs_verified_rows = trained.needs_verified_rows
        self.sources = {"ngram": 0, "trained": 0}

    @property
    def draft_steps(self) -> int:
        """See draft.proposer.Proposer."""
        return self.trained.draft_steps

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One chain a request, from either source; see draft.proposer.DraftContext."""
        self.gate.learn(context)
        found = self.ngram.predict(context)
        costs = self.ngram.costs(context)
        by_ngram = self.ngram.lengths(found, np.asarray(context.budgets, np.int64), costs)
        inside = np.arange(found.reach.shape[1]) < by_ngram[:, None]
        gain = np.where(inside, found.reach, 0.0).sum(1)
        asked = self.gate.choose(context, costs, gain, by_ngram)
        drafts = self.trained.propose(self.gate.shown(context, asked))
        self.gate.expect(context, asked, drafts)
        self.sources["trained"] += int((asked > 0).sum())
        self.sources["ngram"] += int(((asked == 0) & (by_ngram > 0)).sum())
        return [
            drafts[i]
            if len(drafts[i].tokens)
            else DraftTree.chain(found.tokens[i, :length])
            if length
            else EMPTY_DRAFT
            for i, length in enumerate(by_ngram.tolist())
        ]
