"""What `vllm-specx bench` does with the scenarios it has built."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.lib.errors import BenchError
from benchmarks.lib.report import table
from benchmarks.lib.scenario import Scenario, validated
from benchmarks.report import write


def scenario_of(plan: Mapping[str, Any]) -> Scenario:
    """The validated scenario. Raises BenchError."""
    return validated(dict(plan), "bench")


def measure_all(
    plans: Sequence[tuple[Scenario, Mapping[str, str]]], folder: Path, *, restart: bool
) -> None:
    """One result a target, then the report of all of them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {folder} cannot be made: {error.strerror}.") from None
    written = []
    for scenario, left_out in plans:
        name = re.sub(r"[^\w.]+", "-", scenario.model.rpartition("/")[2].removeprefix("embedded:"))
        out = folder / f"{name}.json"
        result = harness.measure(scenario, out, restart=restart)
        if left_out:
            result["not_run"] = dict(left_out)
            out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(result))
        written.append(out)
    write(written, folder / "report.html")
    print(folder / "report.html")
