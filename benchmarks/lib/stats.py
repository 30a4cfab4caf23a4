"""Medians, spread and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict


class Spread(TypedDict):
    """Five numbers that describe a sample; quartiles are inclusive (type 7)."""

    n: int
    median: float
    min: float
    max: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread | None:
    """None for an empty sample."""
    if not values:
        return None
    ordered = sorted(values)
    if len(ordered) == 1:
        q1 = q3 = ordered[0]
    else:
        q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(
        n=len(ordered),
        median=statistics.median(ordered),
        min=ordered[0],
        max=ordered[-1],
        q1=q1,
        q3=q3,
    )


def ratios(values: Mapping[int, float], baseline: Mapping[int, float]) -> dict[int, float]:
    """value / baseline for every round that has both; rounds are compared only with themselves."""
    return {
        key: values[key] / baseline[key] for key in sorted(values) if baseline.get(key, 0.0) > 0.0
    }
