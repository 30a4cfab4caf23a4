"""What the scheduler tells the worker for the next drafts; travels on vLLM's SchedulerOutput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PLAN = "specx_plan"
"""The attribute of SchedulerOutput."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """limits: the most draft tokens of each request by id. costs: see DraftContext.costs."""

    limits: Mapping[str, int]
    costs: npt.NDArray[np.float64] | None = None
