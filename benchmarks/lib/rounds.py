"""The loop: configurations take turns, batch by batch, on the same prompts."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from benchmarks.lib.engines import ENGINES, Batch, Engine
from benchmarks.lib.models import resolve
from benchmarks.lib.partial import Partial
from benchmarks.lib.prompts import Prompt, make_prompts
from benchmarks.lib.provenance import describe, load, threads
from benchmarks.lib.scenario import WARMUP, Group, Scenario, prompt_file
from benchmarks.lib.traces import new_lines, summary

FIRST, AGAIN = "first seen", "seen again"
WARMUP_ROUND = 2**20
"""No round has this number, so its variants are never shown again."""


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Fleet:
    """All configurations of a scenario, loaded; at most one of them runs."""

    def __init__(self, scenario: Scenario, logs: Path) -> None:
        self.scenario = scenario
        self.logs = logs
        self.engines: list[Engine] = []
        self.start_seconds: dict[str, dict[str, float]] = {}

    def start(self) -> None:
        """Load and warm up one engine after the other."""
        model = resolve(self.scenario.model)
        for configuration in self.scenario.configurations:
            log = self.logs / f"{configuration.name.replace('/', '_')}.log"
            engine = ENGINES[self.scenario.mode](self.scenario, configuration, model, log)
            self.engines.append(engine)
            loaded = engine.start()
            began = time.monotonic()
            self._warm_up(engine)
            warmed = time.monotonic() - began
            self.start_seconds[configuration.name] = {
                "load": round(loaded, 1),
                "warm_up": round(warmed, 1),
            }
            say(f"{configuration.name}: loaded in {loaded:.0f} s, warmed up in {warmed:.0f} s")

    def _warm_up(self, engine: Engine) -> None:
        """Compile and touch what is lazy, on texts that no scenario uses, at every batch size."""
        for batch_size in self.scenario.batch_sizes:
            prompts = make_prompts(
                WARMUP, seed=0, cell="warm-up", round_index=WARMUP_ROUND, multiple_of=batch_size
            )
            for start in range(0, len(prompts), batch_size):
                engine.generate(prompts[start : start + batch_size], self.scenario.sampling)

    def close(self) -> None:
        for engine in self.engines:
            engine.group.thaw()
        for engine in self.engines:
            engine.close()
        self.engines = []


def interleave(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    batch_size: int,
    first: int,
    run: Callable[[Engine, Sequence[Prompt]], Batch],
) -> dict[str, list[Batch]]:
    """A B C on the first batch of prompts, B C A on the second, and so on."""
    batches: dict[str, list[Batch]] = {engine.name: [] for engine in engines}
    for turn, start in enumerate(range(0, len(prompts), batch_size)):
        shift = (first + turn) % len(engines)
        for engine in [*engines[shift:], *engines[:shift]]:
            batches[engine.name].append(run(engine, prompts[start : start + batch_size]))
    return batches


def record(batches: Sequence[Batch], baseline: Sequence[Batch] | None) -> list[dict[str, Any]]:
    """What is kept of each batch; with a baseline, whether each answer has its token ids."""
    records = []
    for number, batch in enumerate(batches):
        kept: dict[str, Any] = {
            "seconds": batch.seconds,
            "tokens": [len(answer.token_ids) for answer in batch.answers],
            "ttft": [answer.ttft for answer in batch.answers],
            "tpot": [answer.tpot for answer in batch.answers],
            "cpu_seconds": batch.cpu_seconds,
            "counters": asdict(batch.counters),
        }
        if gaps := [gap for answer in batch.answers for gap in answer.itl]:
            kept["itl"] = [round(gap, 5) for gap in gaps]
        if baseline is not None:
            pairs = list(zip(batch.answers, baseline[number].answers, strict=True))
            kept["equal"] = [mine.token_ids == other.token_ids for mine, other in pairs]
            kept["agreement"] = [
                round(agreement(mine.token_ids, other.token_ids), 4) for mine, other in pairs
            ]
        records.append(kept)
    return records


def agreement(mine: Sequence[int], other: Sequence[int]) -> float:
    """The share of tokens that two answers have in common, in the same order: 0 to 1."""
    return SequenceMatcher(None, mine, other, autojunk=False).ratio()


def run_cell(
    scenario: Scenario, engines: Sequence[Engine], round_index: int, group: Group, batch_size: int
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """One (round, group, batch size): its record, and the texts for people to look at."""
    levels, cell_size = group.levels, batch_size
    if levels is not None:
        batch_size = len(levels)
    prompts = make_prompts(
        prompt_file(group),
        seed=scenario.seed,
        cell=f"{group.name}/{batch_size}",
        round_index=round_index,
        count=group.count if levels is None else len(levels),
        multiple_of=batch_size,
        batch_sizes=scenario.batch_sizes if levels is None else (),
        tasks=group.tasks,
    )
    if levels is not None:
        random.Random(f"{scenario.seed}/{round_index}").shuffle(prompts)
    load_before = load()
    phases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    texts: dict[str, Any] = {}
    for phase in (FIRST, AGAIN) if group.seen_again else (FIRST,):
        batches = interleave(
            engines,
            prompts,
            batch_size,
            round_index,
            lambda engine, some: engine.generate(
                some, [scenario.sampling_of(group, prompt.task) for prompt in some], levels
            ),
        )
        greedy = scenario.sampling_of(group).temperature == 0.0
        compared = scenario.compare_tokens and greedy
        baseline = batches.get(scenario.baseline) if compared else None
        phases[phase] = {name: record(mine, baseline) for name, mine in batches.items()}
        texts[phase] = {
            name: [answer.text for batch in mine for answer in batch.answers]
            for name, mine in batches.items()
        }
    cell = {
        "round": round_index,
        "group": group.name,
        "batch_size": cell_size,
        "prompts": len(prompts),
        "load": {"before": load_before, "after": load()},
        "phases": phases,
        "peak_rss_mib": {each.name: round(each.group.peak_rss_mib(), 1) for each in engines},
    }
    if scenario.trace:
        cell["steps"] = {
            each.name: summary(new_lines(each.trace), timeline=levels is not None)
            for each in engines
            if each.trace is not None
        }
    asked = [prompt.messages[-1]["content"] for prompt in prompts]
    return cell, {"round": round_index, "group": group.name, "asked": asked, "answers": texts}


def run_rounds(
    scenario: Scenario,
    partial: Partial,
    logs: Path,
    keep_texts: Callable[[Mapping[str, Any]], None],
) -> None:
    """Run the cells that `partial` does not have yet; each is written as soon as it is done."""
    pending = [
        (round_index, batch_size, group)
        for round_index in range(scenario.rounds)
        for batch_size in scenario.batch_sizes
        for group in scenario.groups
        if not (group.profile and batch_size != scenario.batch_sizes[0])  # it has its own sizes
        if not partial.has(round_index, group.name, batch_size)
    ]
    if not pending:
        return
    session = {"session": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **describe(), "load_before": load()}
    fleet = Fleet(scenario, logs)
    began, done, previous = time.monotonic(), 0, pending[0][0]
    try:
        fleet.start()
        for engine in fleet.engines:
            new_lines(engine.trace)  # the warm-up, and what an earlier run left
        session["start_seconds"] = fleet.start_seconds
        session["threads"] = {engine.name: threads(engine.env) for engine in fleet.engines}
        partial.add_session(session)
        began = time.monotonic()
        for round_index, batch_size, group in pending:
            if round_index != previous and scenario.restart_each_round:
                fleet.close()
                fleet.start()
            previous = round_index
            cell, texts = run_cell(scenario, fleet.engines, round_index, group, batch_size)
            partial.add_cell(cell)
            keep_texts(texts)
            done += 1
            each = (time.monotonic() - began) / done
            say(
                f"round {round_index + 1}/{scenario.rounds}, batch {batch_size}, {group.name}: "
                f"{speeds(cell)}; about {each * (len(pending) - done) / 60:.0f} min left"
            )
    finally:
        with suppress(KeyboardInterrupt):
            fleet.close()


def speeds(cell: Mapping[str, Any]) -> str:
    """Tokens per second of each configuration, first seen / seen again."""
    parts = []
    for name in next(iter(cell["phases"].values())):
        each = [
            sum(sum(turn["tokens"]) for turn in phase[name])
            / sum(turn["seconds"] for turn in phase[name])
            for phase in cell["phases"].values()
        ]
        parts.append(f"{name} {' / '.join(f'{value:.0f}' for value in each)}")
    return ", ".join(parts)
