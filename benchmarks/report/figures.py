"""Which plots a result has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.report import ALL
from benchmarks.report.svg import COLORS, Bar, Series, bars, lines

Row = Mapping[str, Any]
Result = Mapping[str, Any]


KNOWN = {"ngram": 1, "medusa": 2, "hydra": 2, "eagle3": 3, "auto": 4, "stock": 5, "stock eagle": 5}
"""Methods by the number of their colour."""


def names(result: Result) -> list[str]:
    """Configurations in their order, the baseline first."""
    found = dict.fromkeys([result["scenario"]["baseline"]])
    return list(found | dict.fromkeys(row["configuration"] for row in result["results"]))


def colors(result: Result) -> dict[str, str]:
    """The same in every result for the methods that each has; the rest take what is left."""
    found = {}
    left = list(COLORS[6:] + COLORS[1:6])
    for name in names(result):
        plain = name.removeprefix("smollm2-135m-")
        if name == result["scenario"]["baseline"]:
            found[name] = COLORS[0]
        elif plain in KNOWN:
            found[name] = COLORS[KNOWN[plain]]
        else:
            found[name] = left[0]
            left = [*left[1:], left[0]]
    return found


def called(result: Result, name: str) -> str:
    """A configuration's name; of vLLM's own methods one that says so."""
    for configuration in result["scenario"]["configurations"]:
        method = (configuration["speculative_config"] or {}).get("method", "specx:")
        if configuration["name"] == name and not method.startswith("specx:"):
            return name if method in name else f"stock {method}"
    return name


def first_seen(result: Result) -> list[Row]:
    return [row for row in result["results"] if row["phase"] == "first seen"]


def overall(result: Result) -> list[Row]:
    """The rows of all groups together, or of the only one."""
    rows = first_seen(result)
    found = [row for row in rows if row["group"] == ALL]
    return found or rows


def batches(result: Result) -> list[int]:
    return sorted({row["batch_size"] for row in result["results"]})


def speedups(result: Result, batch: int, style: str = "", *, only_all: bool = False) -> str:
    color = colors(result)
    baseline = result["scenario"]["baseline"]
    rows = overall(result) if only_all else first_seen(result)
    sections: dict[str, list[Bar]] = {}
    for row in rows:
        ratio = row.get("ratio")
        if row["batch_size"] == batch and row["configuration"] != baseline and ratio:
            sections.setdefault("" if only_all else row["group"], []).append(
                Bar(
                    called(result, row["configuration"]),
                    ratio["median"],
                    ratio["min"],
                    ratio["max"],
                    color[row["configuration"]],
                )
            )
    if not sections:
        return ""
    return bars(f"Speed over {baseline}, batch {batch}", list(sections.items()), style)


def by_depth(result: Result, batch: int) -> str:
    color = colors(result)
    series = [
        Series(
            called(result, row["configuration"]),
            list(enumerate(row["acceptance_by_depth"][:8], 1)),
            color[row["configuration"]],
        )
        for row in overall(result)
        if row["batch_size"] == batch and row["acceptance_by_depth"]
    ]
    return lines(
        f"Acceptance by depth, batch {batch}", "depth in the draft", "drafts accepted to it",
        series, percent=True,
    )  # fmt: skip


def pareto(result: Result) -> str:
    """Latency and throughput, a line a configuration through its batch sizes."""
    color = colors(result)
    series = []
    for name in names(result):
        rows = sorted(
            (row for row in overall(result) if row["configuration"] == name and row["tpot_ms"]),
            key=lambda row: int(row["batch_size"]),
        )
        points = [(row["tpot_ms"]["median"], row["tok_s"]["median"]) for row in rows]
        labels = [str(row["batch_size"]) for row in rows]
        series.append(Series(called(result, name), points, color[name], labels))
    if len(batches(result)) < 2:
        return ""
    return lines(
        "Latency and throughput by concurrency", "time per output token, ms", "tok/s", series
    )


def step_curves(result: Result) -> list[tuple[str, str]]:
    """For each traced configuration: step time by verified tokens, and the draft lengths chosen."""
    color = colors(result)
    found = []
    for name, steps in result.get("steps", {}).items():
        points = [(v, ms) for v, n, ms in steps["curve"] if n >= 3]
        if len(points) < 2:
            continue
        spikes = [(k, n) for k, n in steps["k"] if k <= max(v for v, _ in points)]
        picture = lines(
            f"Step time and chosen K, {name}", "tokens verified in a step; K", "step, ms",
            [Series("step time", points, color.get(name, COLORS[1]))],
            spikes=spikes, spikes_name="how often K was chosen",
        )  # fmt: skip
        found.append((f"Step time and chosen K: {name}", picture))
    return found


def timelines(result: Result) -> list[tuple[str, str]]:
    """For each traced configuration: draft length and concurrency on the mixed stream."""
    found = []
    for name, steps in result.get("steps", {}).items():
        points: Sequence[Sequence[float]] = steps.get("timeline", [])
        if len(points) < 2:
            continue
        picture = lines(
            f"K on the mixed stream, {name}", "seconds", "requests, tokens",
            [
                Series("requests running", [(t, b) for t, b, _ in points], COLORS[0], marks=False, steps=True),
                Series("mean draft length", [(t, k) for t, _, k in points], COLORS[1], marks=False),
            ],
        )  # fmt: skip
        found.append((f"K on the mixed stream: {name}", picture))
    return found
