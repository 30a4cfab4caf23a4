"""What verifying a tree costs: milliseconds a decode step, of trees and of chains of as many tokens.

    python -m benchmarks.tree_cost --out benchmarks/results/tree_cost.json

One engine, compiled, bfloat16. Its drafts are wrong, so that every step commits one token; chains, trees, and
steps without drafts take turns. "accepted": trees whose last two nodes are right, so that entries of
the K/V cache have to be moved and three tokens are committed. Beside them stands what planning, sampling
and committing took.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cost_curve import numbers, step_ms
from benchmarks.lib.engines import WorkerEngine
from benchmarks.lib.errors import BenchError
from benchmarks.lib.fixed_trees import CHAIN, LEADS, NODES, RIGHT, SECONDS, WRONG
from benchmarks.lib.models import resolve
from benchmarks.lib.provenance import describe, load, threads
from benchmarks.lib.rounds import say
from benchmarks.lib.scenario import Configuration, Group, Sampling, Scenario
from benchmarks.lib.stats import spread

PROPOSER = "benchmarks.lib.fixed_trees.FixedTreeProposer"
KINDS = {"chain": CHAIN, "tree": WRONG, "accepted": RIGHT}


def scenario(args: argparse.Namespace, seconds: Path) -> Scenario:
    """One configuration: whose proposer does what a prompt says."""
    most = max(args.nodes)
    proposer = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": most}
    return Scenario(
        name="tree_cost",
        model=args.model,
        baseline="trees",
        env={"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", SECONDS: str(seconds)},
        engine_args={
            "enforce_eager": args.eager,
            "dtype": args.dtype,
            "max_num_seqs": 16,
            "max_model_len": 2048,
            "enable_prefix_caching": False,
        },
        groups=(Group(name="unused", prompts="unused"),),
        configurations=(Configuration(name="trees", speculative_config=proposer),),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    sampling = Sampling(max_tokens=args.steps + 1, ignore_eos=True)
    head = {**describe(), "load_before": load()}
    times: dict[tuple[int, int, int, str], list[float]] = {}
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        seconds = Path(folder) / "seconds.json"
        chosen = scenario(args, seconds)
        log = args.out.with_suffix(".logs") / "trees.log"
        engine = WorkerEngine(chosen, chosen.configurations[0], resolve(args.model), log)
        try:
            say(f"loaded in {engine.start():.0f} s")
            head["threads"] = threads(engine.env)
            for repeat in range(-1, args.repeats):
                for batch, context in ((b, c) for b in args.batch for c in args.context):
                    texts = [
                        [rng.randrange(LEADS, 20_000) for _ in range(context - 2)]
                        for _ in range(batch)
                    ]
                    points = [(0, "none"), *((n, kind) for n in args.nodes for kind in KINDS)]
                    for nodes, kind in points:
                        prompts = [[nodes, KINDS.get(kind, 0), *text] for text in texts]
                        found = step_ms(engine.generate_ids(prompts, sampling))
                        if repeat >= 0:
                            times.setdefault((batch, context, nodes, kind), []).append(found)
                say(f"repeat {repeat + 1} of {args.repeats}" if repeat >= 0 else "warmed up")
        finally:
            engine.close()
        if seconds.exists():
            parts = json.loads(seconds.read_text())
    rows = []
    for (batch, context, nodes, kind), values in times.items():
        ms, none = spread(values), spread(times[batch, context, 0, "none"])
        chain = spread(times[batch, context, nodes, "chain" if nodes else "none"])
        assert ms is not None and none is not None and chain is not None
        rows.append(
            {
                "batch_size": batch,
                "context": context,
                "nodes": nodes,
                "kind": kind,
                "step_ms": ms,
                "to_no_drafts": round(ms["median"] / none["median"], 3),
                "to_chain": round(ms["median"] / chain["median"], 3),
            }
        )
    return {
        **head,
        "load_after": load(),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "results": rows,
        "parts_ms": {
            nodes: {part: round(1e3 * value, 3) for part, value in of.items()}
            for nodes, of in sorted(parts.items(), key=lambda item: int(item[0]))
        },
    }


def table(result: dict[str, Any]) -> str:
    """Markdown: a row for each batch size, context and number of nodes."""
    lines = [
        f"`{result['settings']['model']}`: median ms a step (x a step without drafts; x a chain)",
        "",
        "| batch | context | nodes | no drafts | chain | tree | with two accepted |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found = {(r["batch_size"], r["context"], r["nodes"], r["kind"]): r for r in result["results"]}
    for batch, context, nodes, kind in found:
        if kind != "chain":
            continue
        none = found[batch, context, 0, "none"]["step_ms"]["median"]
        cells = [f"{none:.2f}"]
        for name in KINDS:
            row = found[batch, context, nodes, name]
            cells.append(
                f"{row['step_ms']['median']:.2f} ({row['to_no_drafts']:.2f}; {row['to_chain']:.2f})"
            )
        lines.append(f"| {batch} | {context} | {nodes} | " + " | ".join(cells) + " |")
    lines += ["", "ms by nodes in the batch: " + json.dumps(result["parts_ms"])]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tree_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="RESULT.json")
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nodes", type=numbers, default=[8, 16, 32, 64])
    parser.add_argument("--batch", type=numbers, default=[1, 4, 8])
    parser.add_argument("--context", type=numbers, default=[100, 1500])
    parser.add_argument("--steps", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        if not 0 < min(args.nodes) <= max(args.nodes) < NODES:
            raise BenchError(f"--nodes {args.nodes}: each must be between 1 and {NODES - 1}.")
        result = measure(args)
    except BenchError as error:
        print(f"tree_cost: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tree_cost: stopped.", file=sys.stderr)
        return 130
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
