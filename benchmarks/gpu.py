"""Everything that is to be measured on a GPU, in one run.

    python -m benchmarks.gpu --out FOLDER [--rounds 3] [--tiny]

Scenarios gpu_overheads (a Llama in the shape of 8B whose text is known) and gpu_smollm2 (real acceptance):
tok/s of no speculation, of vLLM's own methods, and of ours on both of vLLM's model runners, batch 1, 8 and
64, engines taking turns on the same prompts. Writes FOLDER/NAME.json each; the same command goes on where
it was stopped. Before them tree_kernel, the kernel of tree attention by itself (benchmarks/tree_kernel.py). --tiny is a trial without a GPU: a tiny target, few tokens, and what needs Model Runner V2 or
a GPU left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks import harness, tree_kernel
from benchmarks.lib.errors import BenchError
from benchmarks.lib.scenario import BENCHMARKS

SCENARIOS = ("gpu_overheads", "gpu_smollm2")
NEEDS_GPU = ("ngram_gpu",)


def tiny(data: dict[str, Any]) -> dict[str, Any]:
    """The scenario for a trial on a CPU."""

    def small(value: Any) -> Any:
        return value.replace(":8b", ":tiny") if isinstance(value, str) else value

    kept = []
    for each in data["configurations"]:
        speculative = each.get("speculative_config") or {}
        if speculative.get("runner") != "v2" and speculative.get("method") not in NEEDS_GPU:
            shrunk = {key: small(value) for key, value in speculative.items()}
            kept.append({**each, **({"speculative_config": shrunk} if shrunk else {})})
    for group in data["groups"]:
        group["count"] = 2
    engine = {**data["engine_args"], "kv_cache_memory_bytes": 2**27, "enforce_eager": True}
    return {
        **data,
        "model": small(data["model"]),
        "rounds": 1,
        "batch_sizes": [1, 2],
        "sampling": {**data["sampling"], "max_tokens": 24},
        "engine_args": {**engine, "max_num_seqs": 2},
        "env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        "configurations": kept,
    }


def main(arguments: list[str] | None = None) -> int:
    """The exit status: of the first scenario that did not end well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--only", default="", choices=["", tree_kernel.NAME, *SCENARIOS], help="one of them"
    )
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only in ("", tree_kernel.NAME) and (status := tree_kernel.run(args.out)):
        return status
    for name in SCENARIOS:
        if args.only not in ("", name):
            continue
        scenario = BENCHMARKS / "scenarios" / f"{name}.yaml"
        if args.tiny:
            data = tiny(yaml.safe_load(scenario.read_text()))
            scenario = args.out / f"{name}_tiny.yaml"
            scenario.write_text(yaml.safe_dump(data, sort_keys=False))
        run = ["run", str(scenario), "--out", str(args.out / f"{name}.json")]
        if status := harness.main([*run, *(["--rounds", str(args.rounds)] if args.rounds else [])]):
            return status
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
