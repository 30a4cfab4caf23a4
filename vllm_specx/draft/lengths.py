"""How long the drafts of a batch should be, given what a step costs: numpy, for any proposer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.best_first import chain_length
from vllm_specx.draft.tree import IntArray

FloatArray = npt.NDArray[np.float64]


def goodput_lengths(reach: FloatArray, budgets: IntArray, costs: FloatArray) -> IntArray:
    """The lengths that promise the most tokens per unit of time.

    reach: [B, depth], the probability that all tokens of a draft down to each depth are accepted.
    budgets: int [B], the most of each. costs: [N], see DraftContext.costs; beyond its end it goes on
    in a straight line. Returns int32 [B].

    Reach falls with depth, so the n likeliest tokens of the batch are always whole drafts'
    beginnings; every n is tried (the controller chooses K by the same rule, control/choice.py).
    """
    size, depth = reach.shape
    allowed = np.arange(depth) < budgets[:, None]
    places = np.flatnonzero(allowed)
    # A later token of a draft is not likelier than an earlier one, also not by a rounding error.
    falling = np.minimum.accumulate(reach, axis=1).ravel()[places]
    order = np.argsort(-falling, kind="stable")
    gain = size + np.concatenate([[0.0], np.cumsum(falling[order])])
    tokens = np.arange(len(gain))
    slope = costs[-1] - costs[-2] if len(costs) > 1 else 0.0
    time = np.interp(tokens, np.arange(len(costs)), costs)
    time += slope * np.maximum(tokens - (len(costs) - 1), 0)
    best = int(np.argmax(gain / time))
    rows = places[order[:best]] // depth
    lengths: IntArray = np.bincount(rows, minlength=size).astype(np.int32)
    return lengths


def chain_lengths(
    acceptance: FloatArray,
    budgets: IntArray,
    costs: FloatArray | None,
    *,
    min_probability: float | None,
    token_cost: float | None,
    default_cost: float,
) -> IntArray:
    """How much of each chain is proposed, int32 [B].

    acceptance: [B, depth], of each token given those before it. costs: see DraftContext.costs.
    min_probability, token_cost: as configured (MedusaConfig, EagleConfig). default_cost: what
        token_cost is where neither it nor costs are known.
    """
    if min_probability is not None:
        reached = np.cumprod(acceptance, axis=1)
        chosen = (reached >= min_probability).sum(axis=1)
    elif costs is not None and token_cost is None:
        reach: FloatArray = np.cumprod(acceptance, axis=1, dtype=np.float64)
        return goodput_lengths(reach, budgets, costs)
    else:
        chosen = chain_length(acceptance, default_cost if token_cost is None else token_cost)
    lengths: IntArray = np.minimum(chosen, budgets).astype(np.int32)
    return lengths
