"""What a simulation found, as a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.plan.scenario import Simulation
from vllm_specx.plan.simulate import CONTROLLER, NONE, TABLE, Result, verdict


def to_json(scenario: Simulation, results: Sequence[Result]) -> dict[str, Any]:
    """Everything but the history of steps."""
    return {
        "scenario": scenario.model_dump(mode="json"),
        "predicted": True,
        "verdict": verdict(results),
        "results": [result.summary() for result in results],
    }


def table(scenario: Simulation, results: Sequence[Result]) -> Any:
    """A rich.table.Table, one row a policy."""
    from rich.markup import escape
    from rich.table import Table

    ranges = list(dict.fromkeys(name for result in results for name in result.by_batch))
    ranges.sort(key=lambda name: int(name.split("-")[0]))
    shown = Table(title=f"{escape(scenario.name)}: predicted tokens/s of decode steps")
    shown.add_column("K", no_wrap=True)
    for name in ("tok/s", "vs none", "ms/token", "p95", "accepted"):
        shown.add_column(name, justify="right")
    for name in ranges:
        shown.add_column(f"batch {name}", justify="right")
    none = next(result for result in results if result.policy == NONE)
    best = max(result.tokens_per_second for result in results)
    for result in results:
        rate = result.tokens_per_second
        accepted = f"{result.accepted / result.drafted:.0%}" if result.drafted else "-"
        shown.add_row(
            result.policy,
            f"{rate:.1f}",
            f"{rate / none.tokens_per_second:.2f}x",
            f"{result.token_ms:.1f}",
            f"{result.token_p95_ms:.1f}",
            accepted,
            *(
                f"{result.by_batch[name]:.0f}" if name in result.by_batch else "-"
                for name in ranges
            ),
            style="bold" if rate == best else None,
        )
    return shown


def sentence(scenario: Simulation, results: Sequence[Result]) -> str:
    """The verdict in words."""
    ratio = verdict(results)
    if scenario.arrivals.kind != "levels":
        return (
            f"A token takes {ratio['token_time_over_none']:.2f}x the time it takes without "
            f"speculation, and {ratio['token_time_over_best_static']:.2f}x that of the best fixed K."
        )
    return (
        f"The controller reaches {ratio['over_none']:.2f}x no speculation, "
        f"{ratio['over_best_static']:.2f}x the best fixed K and "
        f"{ratio['over_best_table']:.2f}x the best table by batch size."
    )


def plot(scenario: Simulation, results: Sequence[Result], path: Path) -> None:
    """A picture: tokens/s of each policy, and batch and K over time. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, steps) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=[1, 1.6])
    names = [result.policy for result in results]
    colours = ["#4477aa" if name in (NONE, TABLE) else "#bbbbbb" for name in names]
    colours = ["#228833" if n == CONTROLLER else c for n, c in zip(names, colours, strict=True)]
    bars.barh(names, [result.tokens_per_second for result in results], color=colours)
    bars.invert_yaxis()
    bars.set_xlabel("tokens/s of decode steps (predicted)")
    mine = next(result for result in results if result.policy == CONTROLLER)
    seconds = [entry[0] for entry in mine.history]
    steps.plot(seconds, [entry[1] for entry in mine.history], color="#bbbbbb", label="batch")
    steps.set_ylabel("requests")
    steps.set_xlabel("seconds")
    other = steps.twinx()
    other.plot(seconds, [entry[2] for entry in mine.history], color="#228833", lw=0.8, label="K")
    other.set_ylabel("mean K of the controller")
    figure.suptitle(scenario.name)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}.") from None
    finally:
        pyplot.close(figure)
