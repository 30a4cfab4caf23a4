"""How well the controller foresees a step, and how fast drafts follow a change of workload.

    python -m benchmarks.control_trace [--out benchmarks/results/control_trace.json]

A stream that changes in the middle, code at T=0, stories at T=1, code again, on the real engine, with
`specx.controller.trace` on. From the trace, for pure decode steps after the first 50:
  time_error      median of |predicted / measured - 1| of a step's time
  accepted_error  median of |predicted / accepted - 1| of the draft tokens accepted in 25 steps
  tokens_error    the same of all tokens (accepted and bonus)
and for each phase `steps_to_settle`: decode steps until the draft tokens that a request verifies, in the
mean of the next 10 steps, are first within a quarter (at least 0.75 tokens) of what the phase
settles at: the median of such means over its last two thirds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.engines import WorkerEngine
from benchmarks.lib.errors import BenchError
from benchmarks.lib.models import resolve
from benchmarks.lib.prompts import make_prompts
from benchmarks.lib.provenance import describe, load
from benchmarks.lib.rounds import say
from benchmarks.lib.scenario import BENCHMARKS, Configuration, Group, Sampling, Scenario

METHODS: dict[str, dict[str, Any]] = {
    "specx:ngram": {"method": "specx:ngram", "num_speculative_tokens": 32},
    "stock ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
}
PHASES = (("code", 0.0), ("creative", 1.0), ("code", 0.0))
PROMPTS = BENCHMARKS / "prompts" / "workloads.jsonl"
SKIPPED, WINDOW, NEAR = 50, 25, 10
Line = dict[str, Any]


def run(name: str, batch: int, model: str, logs: Path, count: int) -> list[list[Line]]:
    """The trace's lines of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        keys = {"controller": {"trace": str(trace)}}
        config = {**METHODS[name], **(keys if name.startswith("specx:") else {"specx": keys})}
        scenario = Scenario(
            name="control_trace",
            model=model,
            baseline=name,
            env={"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
            engine_args={"max_num_seqs": 32, "max_model_len": 1024},
            groups=(Group(name="unused", prompts="unused"),),
            configurations=(Configuration(name=name, speculative_config=config),),
        )
        log = logs / f"{name.replace(' ', '-').replace(':', '-')}.log"
        engine = WorkerEngine(scenario, scenario.configurations[0], resolve(model), log)
        ends = [0]
        try:
            say(f"{name}, batch {batch}: loaded in {engine.start():.0f} s")
            for index, (task, temperature) in enumerate(PHASES):
                prompts = make_prompts(
                    PROMPTS, seed=1, cell=f"trace/{batch}", round_index=index,
                    count=count * batch, tasks=[task],
                )  # fmt: skip
                sampling = Sampling(temperature=temperature, max_tokens=96, ignore_eos=True)
                engine.generate(prompts, sampling, [batch] * len(prompts))
                # What the trace still holds in memory is written with a later step's line.
                ends.append(len(trace.read_text().splitlines()))
        finally:
            engine.close()
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
    return [lines[a:b] for a, b in pairwise([*ends[:-1], len(lines)])]


def errors(lines: Sequence[Line]) -> dict[str, float]:
    """Median relative errors of predictions, each made before its step was measured."""
    pure = [line for line in lines[SKIPPED:] if line["pure_decode"]]
    groups = [pure[i : i + WINDOW] for i in range(0, len(pure) - WINDOW + 1, WINDOW)]
    times = [abs(line["expected_seconds"] / line["seconds"] - 1.0) for line in pure]
    sums = [
        (
            sum(line["expected_tokens"] for line in group),
            sum(line["tokens"] for line in group),
            sum(line["batch"] for line in group),
        )
        for group in groups
    ]
    accepted = [abs((e - b) / (t - b) - 1.0) for e, t, b in sums if t - b >= WINDOW]
    tokens = [abs(e / t - 1.0) for e, t, _ in sums]
    return {
        "steps": len(pure),
        "time_error": round(statistics.median(times), 4),
        "accepted_error": round(statistics.median(accepted), 4),
        "tokens_error": round(statistics.median(tokens), 4),
    }


def settled(lines: Sequence[Line]) -> dict[str, float]:
    """Steps until the drafted tokens a request are first near what the phase settles at."""
    drafted = [sum(line["drafted"]) / line["batch"] for line in lines]
    means = [statistics.fmean(drafted[i : i + NEAR]) for i in range(len(drafted) - NEAR + 1)]
    late = means[len(means) // 3 :]
    level = statistics.median(late)
    near = max(0.25 * level, 0.75)
    first = next(i for i, mean in enumerate(means) if abs(mean - level) <= near)
    return {"settles_at": round(level, 2), "steps_to_settle": first}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--count", type=int, default=4, help="answers a phase, times the batch")
    args = parser.parse_args(arguments)
    head = {**describe(), "load_before": load()}
    rows = []
    logs = (args.out or Path("control_trace.json")).with_suffix(".logs")
    try:
        for name in METHODS:
            for batch in args.batch:
                phases = run(name, batch, args.model, logs, args.count)
                changes = [
                    {"to": f"{task}, T={temperature:g}", **settled(lines)}
                    for (task, temperature), lines in zip(PHASES, phases, strict=True)
                ]
                all_lines = [line for lines in phases for line in lines]
                rows.append(
                    {"method": name, "batch": batch, **errors(all_lines), "phases": changes}
                )
                print(json.dumps(rows[-1]), flush=True)
    except BenchError as error:
        print(f"control_trace: {error}", file=sys.stderr)
        return 2
    if args.out:
        result = {**head, "load_after": load(), "results": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
