"""The best draft lengths against every combination of lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.draft.lengths import goodput_lengths


def goodput(reach: np.ndarray, lengths: tuple[int, ...], costs: np.ndarray) -> float:
    gain = len(lengths) + sum(float(reach[i, :k].sum()) for i, k in enumerate(lengths))
    return gain / float(costs[sum(lengths)])


@settings(max_examples=200, deadline=None)
@given(
    p=st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=3),
    rises=st.lists(st.floats(0.0, 2.0), min_size=9, max_size=9),
    budgets=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_against_all_combinations(
    p: list[list[float]], rises: list[float], budgets: list[int]
) -> None:
    reach = np.cumprod(np.array(p), axis=1)
    size = len(p)
    costs = np.cumsum([1.0, *rises])
    most = np.array(budgets[:size], np.int32)
    lengths = goodput_lengths(reach, most, costs)
    assert (lengths <= most).all()
    every = [k for k in np.ndindex(*[4] * size) if (np.array(k) <= most).all()]
    best = max(goodput(reach, k, costs) for k in every)
    assert goodput(reach, tuple(lengths.tolist()), costs) == pytest.approx(best)


def test_costs_go_on_in_a_straight_line() -> None:
    reach = np.cumprod(np.full((2, 8), 0.9), axis=1)
    most = np.full(2, 8, np.int32)
    short = goodput_lengths(reach, most, 1 + 0.1 * np.arange(3.0))
    assert short.tolist() == goodput_lengths(reach, most, 1 + 0.1 * np.arange(17.0)).tolist()
    assert 0 < short.sum() < 16
