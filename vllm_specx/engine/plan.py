"""What the scheduler tells the worker for the next drafts; travels on vLLM's SchedulerOutput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PLAN = "specx_plan"
"""The attribute of SchedulerOutput."""
DRAFT_STEPS = "specx_draft_steps"
"""The attribute of vLLM's DraftTokenIds, on its way back: forwards of the draft that it took."""

WINDOW_ROWS = "specx_window_rows"
"""The attribute of vLLM's DraftTokenIds: how many of each request's draft tokens, the last ones, are rows of
a window of lookahead decoding, by id."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """limits: the most draft tokens of each request by id. costs, draft_cost: see DraftContext."""

    limits: Mapping[str, int]
    costs: npt.NDArray[np.float64] | None = None
    draft_cost: float | None = None
