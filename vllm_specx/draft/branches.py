"""Whether a step's trees are worth being trees: verifying branches costs more than a chain of as many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.lengths import step_times
from vllm_specx.draft.tree import DraftTree

SHARE = 0.05
"""Of a step's time, what trees must gain: positions, masks, attention that is not causal, keys and values that
move. On two CPU cores a step with a tree of 32 took 1.08 to 1.16 of one with a chain of 32; small trees are
cheaper."""


def worth_their_branches(
    drafts: Sequence[DraftTree], costs: npt.NDArray[np.float64] | None
) -> list[DraftTree]:
    """The drafts, or if they promise as much for their time, the best path of each as a chain.

    drafts: of all requests of a step, with their reach. costs: see DraftContext; None: they are left alone.
    """
    if costs is None or all(draft.is_chain for draft in drafts):
        return list(drafts)
    paths = [draft.best_path() for draft in drafts]
    size = len(drafts)
    gain, alone = (sum(_promise(d) for d in group) for group in (drafts, paths))
    nodes, tokens = (sum(len(d.tokens) for d in group) for group in (drafts, paths))
    trees, chains = step_times(costs, [nodes, tokens])
    branched = (size + gain) / (float(trees) * (1.0 + SHARE))
    return list(drafts) if branched > (size + alone) / float(chains) else paths


def _promise(draft: DraftTree) -> float:
    return 0.0 if draft.reach is None else float(draft.reach.sum())
