"""`vllm-specx doctor`: what is wrong with this machine, or with a pairing, and how to mend it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from vllm_specx import recipes
from vllm_specx.config import ConfigError
from vllm_specx.doctor.finding import ORDER, Finding

_COLOURS = {
    "error": "red",
    "warning": "yellow",
    "unchecked": "magenta",
    "note": "cyan",
    "ok": "green",
}


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or its name in recipes/.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Take the recipe's flags for so many GPUs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine and, with a recipe, at its pairing; exit status 1 if it cannot work."""
    from vllm_specx.doctor import check, errors, machine
    from vllm_specx.plan.pairing import pairing

    groups: dict[str, list[Finding]] = {}
    if recipe is not None:
        path = recipes.find(recipe)
        chosen = recipes.load(path)
        if gpus is not None:
            try:
                chosen = chosen.on_gpus(gpus)
            except ValueError as error:
                raise ConfigError(f"{error}.") from None
        if model := os.environ.get("MODEL"):
            chosen = chosen.model_copy(update={"model": model})
        folders = (path.absolute().parent,)
        groups["this machine"] = [*machine.check(), *machine.hooks()]
        groups[chosen.name] = check(chosen, folders)
        try:
            seen = pairing(chosen, folders)
            groups[chosen.name] += machine.room(seen, seen.target(download=False))
        except ConfigError:
            pass  # that its sizes are unknown is among the findings
    else:
        groups["this machine"] = [*machine.check(), *machine.hooks()]
    found = [finding for each in groups.values() for finding in each]
    wrong = errors(found)
    if as_json:
        listed = {name: [finding.to_json() for finding in each] for name, each in groups.items()}
        print(json.dumps({"works": not wrong, "findings": listed}, indent=1))
    else:
        _print(groups)
    if wrong:
        raise typer.Exit(1)


def _print(groups: Mapping[str, Sequence[Finding]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140)
    for name, findings in groups.items():
        shown = Table(title=name, title_justify="left", box=None, pad_edge=False, show_header=False)
        shown.add_column(no_wrap=True)
        shown.add_column(no_wrap=True)
        shown.add_column()
        for finding in sorted(findings, key=lambda each: ORDER.index(each.severity)):
            said = Text(finding.severity, style=_COLOURS[finding.severity])
            shown.add_row(said, Text(finding.topic), Text(finding.sentence))
        console.print(shown)
        console.print()
    wrong = sum(f.severity == "error" for each in groups.values() for f in each)
    doubts = sum(f.severity == "warning" for each in groups.values() for f in each)
    open_ = sum(f.severity == "unchecked" for each in groups.values() for f in each)
    verdict = "It cannot work" if wrong else "Nothing speaks against it"
    console.print(
        f"{verdict}: {wrong} errors, {doubts} warnings, {open_} things that could not be checked.",
        highlight=False,
    )
