"""How long a decode step without speculation took in a committed run of the harness."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

RESULT = Path("benchmarks/results/never_slower.json")


def milliseconds(result: Path = RESULT) -> dict[int, float]:
    """By batch size: the median over the groups of TPOT of the configuration `none`.

    Raises FileNotFoundError, or KeyError if the result has no such configuration.
    """
    times: dict[int, list[float]] = {}
    for row in json.loads(result.read_text())["results"]:
        if row["configuration"] == "none":
            times.setdefault(row["batch_size"], []).append(row["tpot_ms"]["median"])
    if not times:
        raise KeyError(f"{result} has no configuration 'none'")
    return {batch: round(statistics.median(each), 2) for batch, each in times.items()}
