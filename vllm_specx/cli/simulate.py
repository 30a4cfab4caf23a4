"""`vllm-specx simulate`: plan K for a machine and a workload without either."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vllm_specx.config import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario file, as in benchmarks/simulate/.")],
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw a picture there.")
    ] = None,
) -> None:
    """Predict what no speculation, each fixed K, a table by batch size, and our controller reach."""
    from rich.console import Console

    from vllm_specx.plan import report
    from vllm_specx.plan import scenario as scenarios
    from vllm_specx.plan import simulate as simulation

    chosen = scenarios.load(scenario)
    if plot is not None and (plot.suffix not in PICTURES or plot.is_dir()):
        raise ConfigError(
            f"--plot is '{plot}'; it must name a file that ends in {', '.join(PICTURES)}."
        )
    for path in (json_out, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder '{path.parent}' to write {path.name} into.")
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib.")
    console = Console(stderr=True)
    with console.status("") as status:
        results = simulation.simulate(chosen, lambda name: status.update(f"{name} ..."))
    Console(width=None if sys.stdout.isatty() else 140).print(report.table(chosen, results))
    print(report.sentence(chosen, results))
    if json_out is not None:
        try:
            json_out.write_text(json.dumps(report.to_json(chosen, results), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"{json_out} cannot be written: {error.strerror}.") from None
    if plot is not None:
        report.plot(chosen, results, plot)
