"""Estimated probabilities that are true: logistic regression, learned online.

A prediction has four features: its source with the match length, its source with how often the
token is in the request already, its source with the vote, and how often predictions for this
request came true lately. Each has a weight in log-odds; every prediction whose outcome is known,
drafted or not, moves the weights (ngram_kernels.py: learn, estimate), so they follow the workload.
Here is what they start from, fitted on greedy outputs of a small chat model (benchmarks/
ngram_offline.py).
"""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.ngram_kernels import FloatArray

# Rows: FROM_PROMPT, FROM_OUTPUT, FROM_POOL, aligned. Columns: the buckets of the kernels.
_LENGTH = np.array(
    [
        [-1.85, -1.1, -0.5, -0.2, 0.0, 0.1, 0.3, 0.5, 0.9, 1.5, 1.6, 1.7],
        [-1.15, -0.95, -0.45, 0.0, 0.0, 0.05, 0.1, 0.3, 0.8, 1.1, 1.3, 1.7],
        [-1.7, -1.4, -0.9, -0.5, -0.4, -0.2, 0.3, 0.5, 0.7, 1.0, 1.6, 2.4],
        [-1.6, -1.5, -1.5, -1.3, 0.1, 0.1, 0.0, 0.2, 0.3, 0.9, 1.0, 1.0],
    ]
)
_COUNT = np.array(
    [
        [0.0, 0.4, 0.3, 0.5, 0.6, 0.3],
        [0.0, 0.1, 0.15, 0.3, 0.6, 0.7],
        [-0.75, -0.1, -0.1, 0.1, 0.35, 0.5],
        [-1.35, -1.1, -0.7, -0.3, -0.2, 0.2],
    ]
)
_VOTE = np.array(
    [
        [0.5, 1.3, 0.8, 0.6, -0.2, -0.3, -0.6],
        [0.55, 1.45, 2.2, 0.7, -0.6, -0.95, -1.45],
        [0.45, 1.2, 0.9, 0.45, -0.45, -0.95, -1.2],
        [-1.0, -0.5, 0.0, -0.2, -0.5, -1.1, -0.8],
    ]
)
_AGREEMENT = np.array([0.35, 0.4, 0.55, 0.7, 0.8, 0.95, 1.05, 1.15, 1.2, 1.5])


# Each kind of request has weights of its own: greedy, mildly sampled, freely sampled. A sampled token
# comes true less often; by how much less in log-odds:
_SAMPLED = (0.0, 0.5, 1.0)
FREELY = 0.85
"""The temperature from which sampling is free."""


def kind_of(temperature: float) -> int:
    """The kind of a request: 0 greedy, 1 mildly sampled, 2 freely sampled."""
    if temperature <= 0.0:
        return 0
    return 1 if temperature < FREELY else 2


SIBLING = 0.5
"""By how much less, in log-odds, what is not the likeliest continuation comes true."""


def tree_weights() -> FloatArray:
    """float64 [2 * kinds * kernels.WEIGHTS]: those of first children, then those of their siblings."""
    return np.concatenate([initial_weights(), initial_weights(SIBLING)])


def initial_weights(less_likely: float = 0.0) -> FloatArray:
    """float64 [kinds * kernels.WEIGHTS]: log-odds of each feature, in the kernels' order."""
    return np.concatenate(
        [
            part
            for less in _SAMPLED
            for part in (
                _LENGTH.ravel(),
                _COUNT.ravel(),
                _VOTE.ravel(),
                _AGREEMENT - less - less_likely,
            )
        ]
    )
