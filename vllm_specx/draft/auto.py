"""n-gram lookahead and a trained draft together: each step and request by what promises more.

A long match costs nothing and is often right; a trained draft covers the rest, but costs forwards of
its own. Which one a request gets is weighed by goodput (draft/gate.py). Where drafts are trees, a trained
one has what n-grams promise in it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_specx.draft.branches import worth_their_branches
from vllm_specx.draft.gate import Gate, LongArray
from vllm_specx.draft.lengths import goodput_lengths
from vllm_specx.draft.merged import merged
from vllm_specx.draft.ngram import NgramLookahead, Prediction
from vllm_specx.draft.ngram_kernels import CAUTION
from vllm_specx.draft.proposer import DraftContext, TrainedDrafter
from vllm_specx.draft.tree import DraftTree


class AutoDrafter:
    """Implements draft.proposer.Proposer with an n-gram lookahead and a trained draft.

    depth: tokens that the trained draft is asked for at most, of a path if it drafts trees.
    sources: how many drafts each has made so far.
    """

    def __init__(
        self, ngram: NgramLookahead, trained: TrainedDrafter, *, depth: int, trees: bool = False
    ) -> None:
        self.ngram, self.trained = ngram, trained
        self._trees = trees
        self.gate = Gate(trained, depth, trees=trees)
        self.needs_hidden_states = trained.needs_hidden_states
        self.needs_verified_rows = trained.needs_verified_rows
        self.sources = {"ngram": 0, "trained": 0}

    @property
    def draft_steps(self) -> int:
        """See draft.proposer.Proposer."""
        return self.trained.draft_steps

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, from either source or both; see draft.proposer.DraftContext."""
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
        if self._trees and len(drafts):
            spent = context.after(max(self.trained.draft_steps, 0))
            return self._both(spent, drafts, found, by_ngram)
        return [
            drafts[i] if len(drafts[i].tokens) else found.draft(i, length)
            for i, length in enumerate(by_ngram.tolist())
        ]

    def _both(
        self,
        context: DraftContext,
        drafts: Sequence[DraftTree],
        found: Prediction,
        by_ngram: LongArray,
    ) -> list[DraftTree]:
        """Trees of both sources, of which the nodes that pay are kept."""
        trees: list[DraftTree] = []
        for i, length in enumerate(by_ngram.tolist()):
            mine, other = drafts[i], found.draft(i, length)
            if not len(mine.tokens) or not len(other.tokens):
                trees.append(mine if len(mine.tokens) else other)
                continue
            assert other.reach is not None
            # As n-gram drafts are cut: what is chosen for a high estimate is overestimated.
            trees.append(merged(mine, replace(other, reach=other.reach**CAUTION)))
        reach = np.zeros((len(trees), max(len(tree.tokens) for tree in trees)))
        for row, tree in zip(reach, trees, strict=True):
            if tree.reach is not None:
                row[: len(tree.tokens)] = tree.reach
        sizes = [len(tree.tokens) for tree in trees]
        budgets = np.minimum(np.minimum(context.budgets, sizes), self.ngram.max_draft)
        kept = goodput_lengths(reach, budgets.astype(np.int32), self.ngram.costs(context))
        # What one source alone has, it has cut itself.
        chosen = [
            tree.prefix(int(size)) if len(drafts[i].tokens) and by_ngram[i] else tree
            for i, (tree, size) in enumerate(zip(trees, kept, strict=True))
        ]
        return worth_their_branches(chosen, context.costs)
