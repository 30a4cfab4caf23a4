"""`vllm-specx plan`: which K, how fast, will it fit, before there is a machine."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vllm_specx import recipes
from vllm_specx.config import ConfigError
from vllm_specx.messages import clipped

PICTURES = (".png", ".svg", ".pdf")


def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or its name in recipes/.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Such as A100-80G, H100, L40S, RTX-4090.")] = None,
    count: Annotated[int | None, typer.Option(help="How many: tensor-parallel ranks.")] = None,
    alpha: Annotated[
        str | None, typer.Option(help="Acceptance, of all tokens or by depth: 0.7, or 0.8,0.7,0.6.")
    ] = None,
    gamma: Annotated[
        float | None,
        typer.Option(help="A draft step's time over the target's."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    context: Annotated[
        str | None, typer.Option(help="Tokens of each: 8k, 32768; default 8k.")
    ] = None,
    step_ms: Annotated[
        str | None,
        typer.Option(help="Measured steps of the target at this batch, by K: 0:28.9,4:34.1."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw speed-up over acceptance there.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="What is promised by workload, beside the formula.")
    ] = False,
) -> None:
    """Predict the speed of a recipe by K, and where the memory of its GPUs goes."""
    from vllm_specx.plan import claims, planner, show

    if table:
        checked, found = claims.workloads(), claims.sizes()
        if as_json:
            print(json.dumps(claims.to_json(checked, found), indent=1))
            return
        _print(show.promises(checked), show.PROMISES_READ, show.promised_sizes(found))
        return
    if recipe is None:
        raise ConfigError(
            "name a recipe, as in vllm-specx plan qwen2.5-72b-draft-0.5b, or --table."
        )
    _check("--batch", batch, 1, 100_000)
    _check("--count", count, 1, 1024)
    _check("--gamma", gamma, 0, 100)
    asked = planner.Asked(
        gpu=gpu,
        acceptance=None if alpha is None else acceptances(alpha),
        gamma=gamma,
        batch=batch,
        context=None if context is None else tokens(context),
        step_ms=None if step_ms is None else planner.parse_steps(step_ms),
    )
    _check_plot(plot)
    from vllm_specx.plan.pairing import pairing

    path = recipes.find(recipe)
    chosen = recipes.load(path)
    if model := os.environ.get("MODEL"):
        chosen = chosen.model_copy(update={"model": model})
    seen = planner.on_gpus(pairing(chosen, (path.absolute().parent,)), count)
    made = planner.plan(seen, asked)
    if as_json:
        print(json.dumps(planner.to_json(made), indent=1))
    else:
        speeds = [show.speed_table(made)] if len(made.speed.rows) > 1 else []
        _print(*show.headline(made), *speeds, show.memory_table(made), *show.verdict(made))
    if plot is not None:
        if len(made.speed.rows) < 2:
            raise ConfigError(
                f"there is nothing to plot: recipe '{chosen.name}' does not speculate."
            )
        show.plot(made, plot)


def acceptances(text: str) -> tuple[float, ...]:
    """`0.7`, or `0.8,0.7` by depth. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= each <= 1 for each in found):
        raise ConfigError(
            f"--alpha is '{clipped(text)}'; it must be a number from 0 to 1, or one for each depth, as in "
            "0.8,0.7."
        )
    return found


def tokens(text: str) -> int:
    """`8192`, `8k` (of 1024 tokens). Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text.strip())
    count = 0 if match is None else int(match[1]) * (1024 if match[2] else 1)
    if count < 1:
        raise ConfigError(f"--context is '{clipped(text)}'; it must be tokens, as in 8192 or 8k.")
    return count


def _check(option: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{option} is {value}; it must be from {low} to {high}.")


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in PICTURES or plot.is_dir():
        raise ConfigError(
            f"--plot is '{plot}'; it must name a file that ends in {', '.join(PICTURES)}."
        )
    if not plot.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder '{plot.parent}' to write {plot.name} into.")
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib.")


def _print(*parts: object) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False)
        else:
            console.print(part)
