"""Replay of real greedy outputs through training-free proposers: ours, stock ngram, stock suffix.

    python -m benchmarks.ngram_offline generate OUTPUTS.json [--dataset QUESTIONS.jsonl]
    python -m benchmarks.ngram_offline replay OUTPUTS.json --out RESULT.json

`generate` runs the engine once, without speculation. `replay` needs no engine: a greedy output is
the same with any drafts, so what each proposer would have drafted, and what of it would have been
accepted, follows from the outputs; tok/s is PREDICTED with the step times below. Every prompt is
replayed twice in one proposer's life: first seen, then seen again. Prompt templates at even places
are for tuning, those at odd places are held out.
Stock suffix decoding needs: pip install --no-deps arctic-inference==0.3.0
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.lib.errors import BenchError
from benchmarks.lib.prompts import make_prompts
from vllm_specx.config import NgramConfig
from vllm_specx.draft.proposer import DraftContext

PROMPTS = Path(__file__).parent / "prompts"
SEED = 7001
DRAFT = 32

# ms a step against draft tokens a request, SmolLM2-135M bf16 on 2 cores (AVX-512, AMX).
STEP_MS: dict[int, tuple[Sequence[float], Sequence[float]]] = {
    1: (
        (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
        (8.7, 9.3, 9.5, 10.0, 10.3, 11.7, 14.1, 15.3, 16.4, 23.2),
    ),
    4: ((0, 1, 2, 3, 4, 6, 8, 32), (10.2, 11.6, 13.3, 15.7, 16.6, 19.6, 22.2, 60.0)),
    8: ((0, 1, 2, 3, 4, 6, 8, 32), (12.0, 15.2, 18.6, 22.0, 25.5, 33.2, 37.7, 120.0)),
    32: ((0, 1, 2, 3, 4, 32), (29.4, 38.7, 49.2, 64.2, 88.4, 600.0)),
}


@dataclass(frozen=True)
class Item:
    """One prompt and its greedy output, as token ids."""

    group: str
    id: str
    held_out: bool
    prompt: list[int]
    output: list[int]


@dataclass
class Lane:
    """A request that is being replayed."""

    name: str
    item: Item
    row: int
    done: int = 1
    sampled: list[int] = field(default_factory=list)


class Drafter(Protocol):
    """What is compared: drafts for the lanes of a batch."""

    def draft(
        self, lanes: Sequence[Lane], tokens: np.ndarray[Any, Any], finished: Sequence[str]
    ) -> list[list[int]]: ...


class NoDrafts:
    def draft(
        self, lanes: Sequence[Lane], tokens: np.ndarray[Any, Any], finished: Sequence[str]
    ) -> list[list[int]]:
        return [[] for _ in lanes]


class Ours:
    """vllm_specx's lookahead."""

    def __init__(self, batch: int, **keys: Any) -> None:
        # Not above: with numba loaded, vLLM 0.32's CPU workers do not start (`generate`).
        from vllm_specx.draft.ngram import NgramLookahead

        self.lookahead = NgramLookahead(NgramConfig(**keys), batch, 4096, DRAFT)

    def draft(
        self, lanes: Sequence[Lane], tokens: np.ndarray[Any, Any], finished: Sequence[str]
    ) -> list[list[int]]:
        lengths = [len(lane.item.prompt) + lane.done for lane in lanes]
        left = [len(lane.item.output) - lane.done for lane in lanes]
        context = DraftContext(
            request_ids=[lane.name for lane in lanes],
            rows=np.array([lane.row for lane in lanes], np.int32),
            token_ids=tokens,
            num_tokens=np.array(lengths, np.int32),
            num_prompt_tokens=np.array([len(lane.item.prompt) for lane in lanes], np.int32),
            sampled=[lane.sampled for lane in lanes],
            budgets=np.array([min(DRAFT, max(0, n - 1)) for n in left], np.int32),
            temperatures=np.zeros(len(lanes), np.float32),
            pools=["default"] * len(lanes),
            finished=finished,
            vocab_size=49152,
        )
        return [tree.tokens.tolist() for tree in self.lookahead.propose(context)]


class StockNgram:
    """vLLM's `ngram` method: its own matching function."""

    def __init__(self, k: int, shortest: int, longest: int) -> None:
        from vllm.v1.spec_decode import ngram_proposer

        self.match = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
        self.k, self.shortest, self.longest = k, shortest, longest

    def draft(
        self, lanes: Sequence[Lane], tokens: np.ndarray[Any, Any], finished: Sequence[str]
    ) -> list[list[int]]:
        drafts = []
        for lane in lanes:
            context = tokens[lane.row, : len(lane.item.prompt) + lane.done]
            found = self.match(context, self.shortest, self.longest, 4096, self.k)
            drafts.append(found.tolist())
        return drafts


class StockSuffix:
    """vLLM's `suffix` method with its defaults, by the package it uses."""

    def __init__(self, k: int, depth: int = 24) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10000)
        self.k, self.depth = k, depth

    def draft(
        self, lanes: Sequence[Lane], tokens: np.ndarray[Any, Any], finished: Sequence[str]
    ) -> list[list[int]]:
        drafts = []
        for name in finished:
            self.cache.stop_request(name)
        for lane in lanes:
            if lane.name not in self.cache.active_requests:
                self.cache.start_request(lane.name, np.array(lane.item.prompt, np.int32))
            self.cache.add_active_response(lane.name, lane.sampled)
            end = len(lane.item.prompt) + lane.done
            pattern = tokens[lane.row, max(0, end - self.depth) : end]
            draft = self.cache.speculate(
                lane.name, pattern, max_spec_tokens=self.k, max_spec_factor=1.0, min_token_prob=0.1
            )
            drafts.append(list(draft.token_ids))
        return drafts


def replay(drafter: Drafter, items: Sequence[Item], batch: int, turn: int) -> list[dict[str, Any]]:
    """Serve the items through `batch` lanes. Returns one record a request; see `summary`."""
    depths, times = STEP_MS[batch]
    tokens = np.zeros((batch, 4096), np.int32)
    waiting: Iterator[tuple[int, Item]] = iter(enumerate(items))
    lanes: list[Lane] = []
    records: dict[str, dict[str, Any]] = {}
    finished: list[str] = []
    free = list(range(batch))
    while True:
        while free and (entry := next(waiting, None)) is not None:
            number, item = entry
            if len(item.output) < 2:
                continue
            lane = Lane(f"{turn}-{number}", item, free.pop(), sampled=item.output[:1])
            text = item.prompt + item.output
            tokens[lane.row, : len(text)] = text
            lanes.append(lane)
            records[lane.name] = {
                "group": item.group, "id": item.id, "held_out": item.held_out, "turn": turn,
                "tokens": len(item.output) - 1, "steps": 0, "drafted": 0, "accepted": 0, "ms": 0.0,
            }  # fmt: skip
        if not lanes:
            return list(records.values())
        drafts = drafter.draft(lanes, tokens, finished)
        finished = []
        # A step's time falls on its requests by what they verify.
        mean = sum(map(len, drafts)) / len(lanes)
        step = float(np.interp(mean, depths, times)) / batch
        for lane, draft in zip(list(lanes), drafts, strict=True):
            output = lane.item.output
            agreed = 0
            while (
                agreed < len(draft)
                and lane.done + agreed < len(output) - 1
                and draft[agreed] == output[lane.done + agreed]
            ):
                agreed += 1
            record = records[lane.name]
            record["steps"] += 1
            record["drafted"] += len(draft)
            record["accepted"] += agreed
            record["ms"] += step
            lane.sampled = output[lane.done : lane.done + agreed + 1]
            lane.done += agreed + 1
            if lane.done >= len(output):
                lanes.remove(lane)
                free.append(lane.row)
                finished.append(lane.name)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Predicted tok/s, acceptance length, drafted tokens a step and the share of them accepted."""
    total = {
        k: sum(r[k] for r in records) for k in ("tokens", "steps", "drafted", "accepted", "ms")
    }
    return {
        "tok_s": 1000 * total["tokens"] / total["ms"],
        "acceptance_length": total["tokens"] / total["steps"],
        "drafted_a_step": total["drafted"] / total["steps"],
        "accepted_share": total["accepted"] / max(1, total["drafted"]),
    }


def load_items(path: Path) -> list[Item]:
    """The outputs that `generate` wrote."""
    if not path.is_file():
        raise BenchError(f"there are no outputs in {path}; make them with `generate {path}`.")
    return [Item(**entry) for entry in json.loads(path.read_text())]


def generate(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    from benchmarks.lib.models import resolve

    prompts: list[tuple[str, bool, Any]] = []
    templates = [json.loads(line)["id"] for line in (PROMPTS / "repetitive.jsonl").open()]
    for index in range(args.rounds):
        found = make_prompts(
            PROMPTS / "repetitive.jsonl", seed=SEED, cell="offline", round_index=index
        )
        prompts += [("repetitive", templates.index(p.id) % 2 == 1, p) for p in found]
    for path in [PROMPTS / "chat.jsonl", *args.dataset]:
        found = make_prompts(path, seed=SEED, cell="offline", round_index=0)
        prompts += [("chat", i % 2 == 1, p) for i, p in enumerate(found)]
    llm = LLM(
        resolve(args.model),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=16,
        enforce_eager=True,
    )
    outputs = llm.chat(
        [list(p.messages) for _, _, p in prompts],
        SamplingParams(temperature=0, max_tokens=args.max_tokens),
    )
    items = [
        {
            "group": group,
            "id": p.id,
            "held_out": held_out,
            "prompt": list(output.prompt_token_ids),
            "output": list(output.outputs[0].token_ids),
        }
        for (group, held_out, p), output in zip(prompts, outputs, strict=True)
    ]
    args.outputs.write_text(json.dumps(items))


def drafters(batch: int) -> dict[str, Callable[[], Drafter]]:
    return {
        "none": NoDrafts,
        "ngram K=8, 2-4": lambda: StockNgram(8, 2, 4),
        "ngram K=5, 3-5": lambda: StockNgram(5, 3, 5),
        "ngram K=16, 2-8": lambda: StockNgram(16, 2, 8),
        "suffix K=24": lambda: StockSuffix(24),
        "suffix K=32": lambda: StockSuffix(32, 32),
        "specx:ngram": lambda: Ours(batch),
    }


def compare(
    items: Sequence[Item],
    batch: int,
    makers: dict[str, Callable[[], Drafter]],
) -> list[dict[str, Any]]:
    """Rows of a table: proposer, group, held out or not, first seen or seen again."""
    rows = []
    ordered = sorted(items, key=lambda item: (item.group, item.held_out))
    for (group, held_out), some in groupby(ordered, key=lambda item: (item.group, item.held_out)):
        batch_items = list(some)
        for name, make in makers.items():
            drafter = make()
            for turn, seen in enumerate(("first", "again")):
                records = replay(drafter, batch_items, batch, turn)
                rows.append(
                    {"group": group, "held_out": held_out, "batch": batch, "proposer": name,
                     "seen": seen, **summary(records)}
                )  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: predicted tok/s with the acceptance length and drafted tokens a step."""
    lines = [
        "| prompts | batch | proposer | first seen: tok/s (acceptance, drafted) | again |",
        "|---|---|---|---|---|",
    ]
    for first, again in zip(rows[::2], rows[1::2], strict=True):
        cells = [
            f"{r['tok_s']:.1f} ({r['acceptance_length']:.2f}, {r['drafted_a_step']:.2f})"
            for r in (first, again)
        ]
        group = first["group"] + (", held out" if first["held_out"] else "")
        lines.append(f"| {group} | {first['batch']} | {first['proposer']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    from benchmarks.lib.provenance import describe

    items = load_items(args.outputs)
    rows = [row for batch in args.batch for row in compare(items, batch, drafters(batch))]
    print(table(rows))
    if args.out:
        result = {**describe(), "step_ms": STEP_MS, "results": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ngram_offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("generate", help="greedy outputs of the engine, no speculation")
    make.add_argument("outputs", type=Path)
    make.add_argument("--model", default="embedded:smollm2-135m-instruct")
    make.add_argument("--rounds", type=int, default=3, help="variants of each template")
    make.add_argument("--max-tokens", type=int, default=256)
    make.add_argument("--dataset", type=Path, action="append", default=[], help="more chat")
    make.set_defaults(run=generate)
    again = commands.add_parser("replay", help="the comparison, with no engine")
    again.add_argument("outputs", type=Path)
    again.add_argument("--batch", type=int, nargs="+", default=[1], choices=list(STEP_MS))
    again.add_argument("--out", type=Path, metavar="RESULT.json")
    again.set_defaults(run=run)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except BenchError as error:
        print(f"ngram_offline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
