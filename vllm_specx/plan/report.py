"""What a simulation found, as a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.plan.scenario import Simulation
from vllm_specx.plan.simulate import CONTROLLER, NODES, NONE, TABLE, Result, verdict


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
    said = (
        f"The controller reaches {ratio['over_none']:.2f}x no speculation, "
        f"{ratio['over_best_static']:.2f}x the best fixed K and "
        f"{ratio['over_best_table']:.2f}x the best table by batch size."
    )
    if "nodes_over_none" in ratio:
        said += (
            f" With trees, as many nodes as pay, it is {ratio['nodes_over_none']:.2f}x no speculation and "
            f"{ratio['nodes_over_best_tree']:.2f}x the best fixed tree."
        )
    return said


def plot(scenario: Simulation, results: Sequence[Result], path: Path) -> None:
    """A picture: tokens/s of each policy, and batch and K over time. Raises ConfigError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, steps) = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=[1, 1.6])
    names = [result.policy for result in results]
    colours = ["#4477aa" if name in (NONE, TABLE) else "#bbbbbb" for name in names]
    mine = (CONTROLLER, NODES)
    colours = ["#228833" if n in mine else c for n, c in zip(names, colours, strict=True)]
    bars.barh(names, [result.tokens_per_second for result in results], color=colours)
    bars.invert_yaxis()
    bars.set_xlabel("tokens/s of decode steps (predicted)")
    if scenario.tree is None:
        _plot_history(steps, next(r for r in results if r.policy == CONTROLLER))
    else:
        _plot_by_batch(steps, results)
    figure.suptitle(scenario.name)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}.") from None
    finally:
        pyplot.close(figure)


def _plot_history(axes: Any, mine: Result) -> None:
    """Batch and K of each step."""
    seconds = [entry[0] for entry in mine.history]
    axes.plot(seconds, [entry[1] for entry in mine.history], color="#bbbbbb", label="batch")
    axes.set_ylabel("requests")
    axes.set_xlabel("seconds")
    other = axes.twinx()
    other.plot(seconds, [entry[2] for entry in mine.history], color="#228833", lw=0.8, label="K")
    other.set_ylabel("mean K of the controller")


def _plot_by_batch(axes: Any, results: Sequence[Result]) -> None:
    """Speed-up over no speculation by batch size: chains, trees of each size, and what pays."""
    by_name = {result.policy: result.by_batch for result in results}
    ranges = sorted(by_name[NONE], key=lambda name: int(name.split("-")[0]))
    labels = {CONTROLLER: "chains, K chosen", NODES: "chain or tree, nodes chosen"}
    names = [n for n in by_name if n in labels or n.startswith("tree ")]
    for i, name in enumerate(names):
        shown = [r for r in ranges if r in by_name[name]]
        axes.plot(
            shown,
            [by_name[name][r] / by_name[NONE][r] for r in shown],
            marker="o",
            ms=3,
            lw=2 if name in labels else 1,
            color={CONTROLLER: "#4477aa", NODES: "#228833"}.get(
                name, f"{0.45 + 0.1 * (i % 4):.2f}"
            ),
            label=labels.get(name, f"{name} nodes, always"),
        )
    axes.axhline(1.0, color="#bbbbbb", lw=0.8)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("predicted speed-up over no speculation")
    axes.legend(fontsize=8)
