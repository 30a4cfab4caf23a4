"""What verifying costs: milliseconds a decode step for K drafted tokens, through the real engine.

    python -m benchmarks.cost_curve --out benchmarks/results/cost_curve.json [--model twin:170]

One engine without speculation, and one whose proposer drafts K tokens that are rejected, so every
step commits one token. K and the batch size take turns; the median over --repeats is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.engines import Batch, WorkerEngine
from benchmarks.lib.errors import BenchError
from benchmarks.lib.fixed_proposer import LEADS
from benchmarks.lib.models import resolve
from benchmarks.lib.provenance import describe, load, threads
from benchmarks.lib.rounds import say
from benchmarks.lib.scenario import Configuration, Group, Sampling, Scenario
from benchmarks.lib.stats import spread

MAX_K = 32
PROPOSER = "benchmarks.lib.fixed_proposer.FixedProposer"
NONE = "none"


def scenario(model: str, eager: bool, dtype: str) -> Scenario:
    """Two configurations: without speculation, and with the fixed proposer."""
    proposer = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": MAX_K}
    return Scenario(
        name="cost_curve",
        model=model,
        baseline=NONE,
        env={"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        engine_args={
            "enforce_eager": eager,
            "dtype": dtype,
            "max_num_seqs": 32,
            "max_model_len": 1024,
        },
        groups=(Group(name="unused", prompts="unused"),),
        configurations=(
            Configuration(name=NONE),
            Configuration(name="fixed", speculative_config=proposer),
        ),
    )


def step_ms(batch: Batch) -> float:
    """Milliseconds a decode step: the time from each request's first to its last token over steps.

    A draft token that was accepted by chance saved its request a step.
    """
    tokens = len(batch.answers[0].token_ids) - 1
    steps = tokens - batch.counters.accepted_tokens / len(batch.answers)
    decode = [answer.tpot * tokens for answer in batch.answers if answer.tpot]
    return 1e3 * sum(decode) / len(decode) / steps


def prompt_ids(k: int, length: int, rng: random.Random) -> list[int]:
    return [k, *(rng.randrange(LEADS, 20_000) for _ in range(length - 1))]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    chosen = scenario(args.model, args.eager, args.dtype)
    model = resolve(args.model)
    sampling = Sampling(max_tokens=args.steps + 1, ignore_eos=True)
    rng = random.Random(0)
    head = {**describe(), "load_before": load()}
    engines: list[WorkerEngine] = []
    times: dict[tuple[str, int, int], list[float]] = {}
    try:
        for configuration in chosen.configurations:
            log = args.out.with_suffix(".logs") / f"{configuration.name}.log"
            engines.append(WorkerEngine(chosen, configuration, model, log))
            say(f"{configuration.name}: loaded in {engines[-1].start():.0f} s")
            engines[-1].group.freeze()
        head["threads"] = threads(engines[0].env)
        none, fixed = engines
        points = [(none, 0), *((fixed, k) for k in args.k)]
        for repeat in range(-1, args.repeats):
            for batch_size in args.batch:
                for engine, k in points:
                    ids = [prompt_ids(k, args.prompt, rng) for _ in range(batch_size)]
                    batch = engine.generate_ids(ids, sampling)
                    if repeat >= 0:
                        times.setdefault((engine.name, batch_size, k), []).append(step_ms(batch))
            say(f"repeat {repeat + 1} of {args.repeats}" if repeat >= 0 else "warmed up")
    except KeyboardInterrupt:
        complete = (NONE, max(args.batch), 0) in times
        if not complete:
            raise
        say("stopped early: what is measured is kept")
    finally:
        for engine in engines:
            engine.close()
    rows = []
    for (name, batch_size, k), values in sorted(times.items(), key=lambda item: item[0][1:]):
        ms = spread(values)
        plain = spread(times[(NONE, batch_size, 0)])
        assert ms is not None and plain is not None
        rows.append(
            {
                "configuration": name,
                "batch_size": batch_size,
                "k": k,
                "step_ms": ms,
                "ratio": round(ms["median"] / plain["median"], 4),
            }
        )
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    return {**head, "load_after": load(), "settings": settings, "results": rows}


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each K, a column for each batch size."""
    rows = result["results"]
    batches = sorted({row["batch_size"] for row in rows})
    lines = [
        f"`{result['settings']['model']}`: median ms a step (x a step without speculation)",
        "",
        "| drafted tokens | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
        "|---:|" + "---:|" * len(batches),
    ]
    for name, k in dict.fromkeys((row["configuration"], row["k"]) for row in rows):
        cells = [
            f"{row['step_ms']['median']:.2f} ({row['ratio']:.2f})"
            for batch in batches
            for row in rows
            if (row["configuration"], row["k"], row["batch_size"]) == (name, k, batch)
        ]
        label = "no speculation" if name == NONE else str(k)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="RESULT.json")
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=numbers, default=[0, 1, 2, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--batch", type=numbers, default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=48, help="decode steps a measurement")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        if min(args.k) < 0 or max(args.k) > MAX_K:
            raise BenchError(f"--k {max(args.k, key=abs)}: K must be between 0 and {MAX_K}.")
        result = measure(args)
    except BenchError as error:
        print(f"cost_curve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cost_curve: stopped before anything was measured.", file=sys.stderr)
        return 130
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
