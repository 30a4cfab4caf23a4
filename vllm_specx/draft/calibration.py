"""Estimated probabilities that are true: Beta counts by what is known of a prediction.

A cell of the table is (source, match length, votes); it starts from a prior that a few dozen
outcomes override, and old outcomes fade, so that the table follows the workload. Learning and
look-up are compiled (ngram_kernels.py: learn, estimate); here is the table itself.
"""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.ngram_kernels import (
    ALIGNED_OWN,
    CELLS,
    FROM_OUTPUT,
    FROM_POOL,
    FROM_PROMPT,
    LENGTH_BUCKETS,
    SOURCES,
    VOTE_BUCKETS,
    FloatArray,
)

PRIOR_STRENGTH = 6.0
"""Outcomes that weigh as much as the prior."""

_LENGTH = np.array([0.10, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.90, 0.94, 0.96, 0.97])
_ALIGNED = np.array([0.20, 0.30, 0.40, 0.50, 0.35, 0.50, 0.65, 0.75, 0.60, 0.70, 0.80, 0.90])
_VOTES = np.array([0.0, 0.3, 0.6, 0.0, -0.5, -1.0, -1.5])
_SOURCE = {FROM_PROMPT: 0.0, FROM_OUTPUT: 0.2, FROM_POOL: 0.0, ALIGNED_OWN: 0.0}


def prior() -> FloatArray:
    """float64 [SOURCES, LENGTH_BUCKETS, VOTE_BUCKETS]: the probability before any evidence."""
    table = np.empty((SOURCES, LENGTH_BUCKETS, VOTE_BUCKETS))
    for source, shift in _SOURCE.items():
        by_length = _ALIGNED if source == ALIGNED_OWN else _LENGTH
        odds = np.log(by_length / (1 - by_length))[:, None] + _VOTES[None, :] + shift
        table[source] = 1 / (1 + np.exp(-odds))
    return table


def new_table(strength: float = PRIOR_STRENGTH) -> FloatArray:
    """float64 [CELLS, 2]: agreed and disagreed outcomes, the prior included."""
    p = prior().reshape(CELLS)
    return np.stack([p * strength, (1 - p) * strength], axis=1)
