"""How long the drafts of a batch should be, given what a step costs: numpy, for any proposer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specx.draft.best_first import chain_length
from vllm_specx.draft.tree import IntArray

FloatArray = npt.NDArray[np.float64]


def goodput_lengths(
    reach: FloatArray, budgets: IntArray, costs: FloatArray, others: int = 0
) -> IntArray:
    """The lengths that promise the most tokens per unit of time.

    reach: [B, depth], the probability that all tokens of a draft down to each depth are accepted.
    budgets: int [B], the most of each. costs: [N], see DraftContext.costs; beyond its end it goes on
    in a straight line. others: requests of the step without a draft. Returns int32 [B].

    Reach falls with depth, so the n likeliest tokens of the batch are always whole drafts'
    beginnings; every n is tried (the controller chooses K by the same rule, control/choice.py).
    """
    size, depth = reach.shape
    allowed = np.arange(depth) < budgets[:, None]
    places = np.flatnonzero(allowed)
    # A later token of a draft is not likelier than an earlier one, also not by a rounding error.
    falling = np.minimum.accumulate(reach, axis=1).ravel()[places]
    order = np.argsort(-falling, kind="stable")
    gain = others + size + np.concatenate([[0.0], np.cumsum(falling[order])])
    best = int(np.argmax(gain / step_times(costs, np.arange(len(gain)))))
    rows = places[order[:best]] // depth
    lengths: IntArray = np.bincount(rows, minlength=size).astype(np.int32)
    return lengths


def step_times(costs: FloatArray, tokens: npt.ArrayLike) -> FloatArray:
    """Of steps that verify so many draft tokens in all, fractions interpolated; beyond the end of
    costs (DraftContext.costs) it goes on in a straight line."""
    tokens = np.asarray(tokens, np.float64)
    last = len(costs) - 1
    slope = costs[-1] - costs[-2] if last else 0.0
    times: FloatArray = np.interp(tokens, np.arange(len(costs)), costs)
    times += slope * np.maximum(tokens - last, 0.0)
    return times


def goes_on(
    acceptance: FloatArray,
    made: IntArray,
    lengths: IntArray,
    budgets: IntArray,
    following: float,
    costs: FloatArray | None,
    draft_cost: float | None,
    others: int = 0,
) -> npt.NDArray[np.bool_]:
    """Which chains deserve one more token, bool [B], when all those that go on take d tokens now.

    acceptance: [B, d], of each token given those before it. made, lengths: int [B], tokens of each
        chain, and how many of them deserve to be verified. following: acceptance of the tokens at
        depth d + 1, usually. costs, draft_cost: see DraftContext, costs after() the forwards so far; None:
        whoever is worth verifying so far goes on. others: requests of the step without a draft.
    """
    depth = acceptance.shape[1]
    stay: npt.NDArray[np.bool_] = (made == depth) & (lengths == depth) & (budgets > depth)
    if costs is None or draft_cost is None or not stay.any():
        return stay
    reach = np.cumprod(acceptance, axis=1, dtype=np.float64)
    inside = np.arange(depth) < lengths[:, None]
    verified = int(lengths.sum())
    now, then = step_times(costs, [verified, verified + int(stay.sum())])
    price = (others + len(lengths) + float(reach[inside].sum())) / now
    token = price * (then - now) / int(stay.sum())
    gain = np.where(stay, reach[:, -1] * following - token, 0.0)
    stay &= gain > 0.0
    if gain[stay].sum() <= price * draft_cost:
        stay[:] = False
    return stay


def chain_lengths(
    acceptance: FloatArray,
    budgets: IntArray,
    costs: FloatArray | None,
    *,
    min_probability: float | None,
    token_cost: float | None,
    default_cost: float,
    others: int = 0,
) -> IntArray:
    """How much of each chain is proposed, int32 [B].

    acceptance: [B, depth], of each token given those before it. costs: see DraftContext.costs.
    min_probability, token_cost: as configured (MedusaConfig, EagleConfig). default_cost: what
        token_cost is where neither it nor costs are known. others: requests of the step without a draft.
    """
    if min_probability is not None:
        reached = np.cumprod(acceptance, axis=1)
        chosen = (reached >= min_probability).sum(axis=1)
    elif costs is not None and token_cost is None:
        reach: FloatArray = np.cumprod(acceptance, axis=1, dtype=np.float64)
        return goodput_lengths(reach, budgets, costs, others)
    else:
        chosen = chain_length(acceptance, default_cost if token_cost is None else token_cost)
    lengths: IntArray = np.minimum(chosen, budgets).astype(np.int32)
    return lengths
