"""Reading results, and writing the report's three files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.errors import BenchError
from benchmarks.report.page import page

COLUMNS = (
    "result", "target", "group", "batch_size", "phase", "configuration", "requests", "tokens",
    "tok_s", "tok_s_min", "tok_s_max", "ratio", "ratio_min", "ratio_max", "decode_ratio", "ttft_ms", "tpot_ms",
    "itl_ms", "goodput_requests_s", "acceptance_length", "acceptance_rate", "tokens_per_step", "equal", "of",
    "agreement", "extra_mib",
)  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """A result of the harness. Raises BenchError: one sentence."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        for row in result["results"]:
            _ = row["group"], row["batch_size"], row["phase"], row["tok_s"]["median"], row["ratio"]
        _ = result["scenario"]["baseline"], result["sessions"][-1]["versions"]
    except FileNotFoundError:
        raise BenchError(f"there is no result {path.name}; name files that exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path.name} cannot be read: {error}.") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise BenchError(
            f"{path.name} is no result of the harness; make one with vllm-specx bench."
        ) from None
    return result


def flat(name: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A result's rows with one value a column."""
    rows = []
    for row in result["results"]:
        equal = row.get("equal_to_baseline") or {}
        memory = result.get("memory", {}).get(row["configuration"], {})
        speed, ratio = row["tok_s"], row.get("ratio") or {}
        values = {
            **row,
            **{key: (row.get(key) or {}).get("median") for key in _SPREADS},
            "result": name,
            "target": result["scenario"]["model"],
            "tok_s_min": speed["min"],
            "tok_s_max": speed["max"],
            "ratio_min": ratio.get("min"),
            "ratio_max": ratio.get("max"),
            "goodput_requests_s": (row.get("goodput") or {}).get("requests_s"),
            "equal": equal.get("equal"),
            "of": equal.get("of"),
            "extra_mib": memory.get("extra_mib"),
        }
        rows.append({column: values.get(column) for column in COLUMNS})
    return rows


_SPREADS = ("tok_s", "ratio", "decode_ratio", "ttft_ms", "tpot_ms", "itl_ms", "agreement")


def write(paths: Sequence[Path], out: Path) -> None:
    """`out` (.html), and beside it .json and .csv of the same rows. Raises BenchError."""
    results = {path.stem: read(path) for path in paths}
    if len(results) != len(paths):
        raise BenchError("two of the results have the same name; rename one.")
    rows = [row for name, result in results.items() for row in flat(name, result)]
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    summary = {
        "runs": {
            name: {key: result[key] for key in ("scenario", "sessions")}
            for name, result in results.items()
        },
        "rows": rows,
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(results))
        out.with_suffix(".csv").write_text(table.getvalue())
        beside = out.with_suffix(".json")
        if beside.resolve() in {path.resolve() for path in paths}:
            beside = out.with_suffix(".rows.json")
        beside.write_text(json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"{out} cannot be written: {error.strerror}.") from None
