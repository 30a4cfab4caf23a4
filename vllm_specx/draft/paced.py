"""A trained draft that is left out where it does not pay: in large batches, on text it cannot guess."""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.gate import Gate
from vllm_specx.draft.proposer import DraftContext, TrainedDrafter
from vllm_specx.draft.tree import DraftTree


class PacedDrafter:
    """Implements draft.proposer.Proposer. trained: the drafter; depth: tokens of a draft at most, of a path
    if it drafts trees.

    Until step times are known (DraftContext.costs), and where they are not wanted, it drafts always.
    """

    def __init__(self, trained: TrainedDrafter, depth: int, *, trees: bool = False) -> None:
        self.trained = trained
        self._trees = trees
        self.gate = Gate(trained, depth, trees=trees)
        self.needs_hidden_states = trained.needs_hidden_states
        self.needs_verified_rows = trained.needs_verified_rows

    @property
    def draft_steps(self) -> int:
        """See draft.proposer.Proposer."""
        return self.trained.draft_steps

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, or none; see draft.proposer.DraftContext."""
        self.gate.learn(context)
        asked = np.asarray(context.budgets, np.int64)
        if context.costs is not None:
            none = np.zeros(len(asked), np.int64)
            asked = self.gate.choose(context, context.costs, none.astype(np.float64), none)
        else:
            asked = np.minimum(asked, self.gate.depth)
        drafts = self.trained.propose(self.gate.shown(context, asked))
        self.gate.expect(context, asked, drafts)
        return drafts
