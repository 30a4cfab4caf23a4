"""Interleaved comparisons of speculative configurations on the real engine.

    python -m benchmarks.harness run benchmarks/scenarios/repetitive.yaml --out RESULT.json
    python -m benchmarks.harness table RESULT.json [--baseline NAME]

Each configuration is a process of its own that stays loaded; all but the one at work are stopped
(SIGSTOP), so that they cost no CPU time. Finished cells are kept in RESULT.partial.jsonl: the same
command continues a run that was cut off, and a larger --rounds adds to a finished one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.errors import BenchError
from benchmarks.lib.partial import Partial
from benchmarks.lib.provenance import load
from benchmarks.lib.report import (
    add_goodput,
    add_ratios,
    aggregate,
    all_steps,
    peak_memory,
    table,
)
from benchmarks.lib.rounds import run_rounds
from benchmarks.lib.scenario import Scenario, load_scenario


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise BenchError(f"{message[:1].lower()}{message[1:]}; see --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks.harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="run a scenario and write its result")
    run.add_argument("scenario", type=Path)
    run.add_argument("--out", type=Path, required=True, metavar="RESULT.json")
    run.add_argument("--rounds", type=int, help="instead of the scenario's")
    run.add_argument("--only", default="", metavar="NAME,NAME", help="only these configurations")
    run.add_argument(
        "--dataset",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a prompt file in place of the scenario's groups; may be repeated",
    )
    run.add_argument("--restart", action="store_true", help="throw partial results away")
    show = commands.add_parser("table", help="print a result as a Markdown table")
    show.add_argument("result", type=Path)
    show.add_argument("--baseline", help="compute ratios against this configuration instead")
    return parser


def write_result(out: Path, scenario: Scenario, partial: Partial) -> dict[str, Any]:
    """Aggregate the cells and write RESULT.json, atomically."""
    rows = aggregate(partial.cells)
    add_ratios(rows, scenario.baseline)
    add_goodput(rows, partial.cells, scenario.slo)
    result = {
        "scenario": scenario.described(),
        "sessions": partial.sessions,
        "memory": peak_memory(partial.cells, scenario.baseline),
        "results": rows,
    }
    if steps := all_steps(partial.cells):
        result["steps"] = steps
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, out)
    return result


def run(args: argparse.Namespace) -> None:
    scenario = load_scenario(args.scenario, args.dataset)
    only = [name for name in args.only.split(",") if name]
    print(table(measure(scenario.select(only, args.rounds), args.out, restart=args.restart)))


def measure(scenario: Scenario, out: Path, *, restart: bool = False) -> dict[str, Any]:
    """Run what RESULT.partial.jsonl does not have yet, and write the result."""
    stem = out.with_suffix("")
    partial = Partial(
        stem.with_name(stem.name + ".partial.jsonl"), scenario.fingerprint(), restart=restart
    )
    logs = stem.with_name(stem.name + ".logs")
    logs.mkdir(parents=True, exist_ok=True)

    def keep_texts(texts: Mapping[str, Any]) -> None:
        with (logs / "texts.jsonl").open("a") as file:
            file.write(json.dumps(texts) + "\n")

    try:
        run_rounds(scenario, partial, logs, keep_texts)
    finally:
        if partial.cells:
            if partial.sessions:
                partial.sessions[-1]["load_after"] = load()
            result = write_result(out, scenario, partial)
    return result


def show(args: argparse.Namespace) -> None:
    try:
        result = json.loads(args.result.read_text())
        text = table(result, args.baseline)
    except FileNotFoundError:
        raise BenchError(f"there is no result {args.result}; make one with `run`.") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise BenchError(
            f"{args.result} is no result of this harness; make one with `run`."
        ) from None
    print(text)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        args = _parser().parse_args(arguments)
        {"run": run, "table": show}[args.command](args)
    except BenchError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"harness: stopped by {error}; the same command continues it.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
