"""The controller's trace, cell by cell: what a step costs by the tokens it verifies, and K over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POINTS = 240
"""Of a timeline, at most."""
_read: dict[Path, int] = {}


def new_lines(trace: Path | None) -> list[dict[str, Any]]:
    """The whole lines that were written since the last call. What the engine still holds in memory
    comes with a later call."""
    if trace is None or not trace.exists():
        return []
    with trace.open("rb") as file:
        file.seek(_read.get(trace, 0))
        whole, newline, _ = file.read().rpartition(b"\n")
        _read[trace] = _read.get(trace, 0) + len(whole) + len(newline)
    return [json.loads(line) for line in whole.splitlines()]


def summary(lines: Sequence[Mapping[str, Any]], *, timeline: bool) -> dict[str, Any]:
    """`curve`: [verified tokens, steps, ms in all] of decode steps; `k`: [draft length, requests].

    With `timeline`: [seconds since the first step, requests, mean draft length], averaged so that
    there are at most POINTS.
    """
    curve: dict[int, list[float]] = {}
    lengths: dict[int, int] = {}
    points: list[tuple[float, float, float]] = []
    now = 0.0
    for line in lines:
        now += float(line["seconds"] or 0.0)
        drafted = [int(each) for each in line["drafted"]]
        for each in drafted:
            lengths[each] = lengths.get(each, 0) + 1
        if drafted:
            points.append((now, float(line["batch"]), sum(drafted) / len(drafted)))
        if line["pure_decode"] and line["seconds"]:
            kept = curve.setdefault(int(line["batch"]) + sum(drafted), [0, 0.0])
            kept[0] += 1
            kept[1] += 1e3 * float(line["seconds"])
    found: dict[str, Any] = {
        "curve": [[verified, int(n), round(ms, 2)] for verified, (n, ms) in sorted(curve.items())],
        "k": sorted([length, n] for length, n in lengths.items()),
    }
    if timeline:
        found["timeline"] = thin(points)
    return found


def thin(points: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Means of runs of neighbours."""
    width = -(-len(points) // POINTS) or 1
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [[round(sum(values) / len(part), 3) for values in zip(*part)] for part in parts]  # noqa: B905
