"""`vllm-specx top`: a server's speculation, live, in a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_specx.config import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vllm_specx.metrics.live import Figures

_WIDTH = 24
_DEPTHS = 12
_NONE = "no traffic"


def top(
    url: Annotated[str, typer.Argument(help="A server, such as http://127.0.0.1:8000.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, since the server started, and stop.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=60.0, help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Watch a server: acceptance by depth, K, TPOT, bubble, tokens a second."""
    from rich.console import Console

    from vllm_specx.metrics import live

    address = live.metrics_url(url)
    scrape = live.Scrape(live.fetch(address))
    console = Console(width=None if sys.stdout.isatty() else 100)
    if once:
        console.print(frame(live.figures(scrape), "since the server started"))
        return
    _watch(console, address, scrape, interval)


def _watch(console: object, address: str, scrape: object, interval: float) -> None:
    from rich.live import Live

    from vllm_specx.metrics import live

    before, seen = scrape, time.monotonic()
    assert isinstance(before, live.Scrape)
    first = frame(live.figures(before), "since the server started")
    try:
        with Live(first, console=console, screen=sys.stdout.isatty(), auto_refresh=False) as view:  # type: ignore[arg-type]
            while True:
                time.sleep(interval)
                try:
                    now = live.Scrape(live.fetch(address))
                except ConfigError as error:
                    view.update(str(error), refresh=True)
                    continue
                moment = time.monotonic()
                said = f"last {moment - seen:.1f} s; Ctrl-C ends"
                view.update(frame(live.figures(now, before, moment - seen), said), refresh=True)
                before, seen = now, moment
    except KeyboardInterrupt:
        return


def frame(figures: Figures, when: str) -> RenderableType:
    """One look: numbers above, bars below. Plain ASCII and sixteen colours, as any terminal shows."""
    from rich.console import Group
    from rich.table import Table

    head = Table.grid(padding=(0, 3))
    for _ in range(4):
        head.add_column()
    head.add_row(
        *_pair("output tok/s", _number(figures.tokens_per_second, ".1f")),
        *_pair("requests", f"{figures.running} running, {figures.waiting} waiting"),
    )
    head.add_row(
        *_pair("acceptance", _coloured(figures.acceptance, 0.65, 0.5)),
        *_pair("acceptance length", _number(figures.acceptance_length, ".2f")),
    )
    head.add_row(
        *_pair("TPOT", _times(figures.tpot, figures.tpot_p95)),
        *_pair("bubble", _coloured(_less(figures.bubble), 0.75, 0.6, figures.bubble)),
    )
    head.add_row(
        *_pair("step", _milliseconds(figures.step)),
        *_pair("of it drafting", _milliseconds(figures.drafting)),
    )
    head.add_row(
        *_pair("mean K", _number(figures.mean_k, ".2f")),
        *_pair("steps at K=0", _percent(figures.without_drafts)),
    )
    errors = f"{figures.errors}"
    if figures.disabled:
        errors += f", [red]{' and '.join(figures.disabled)} switched off[/red]"
    head.add_row(
        *_pair("predicted speed-up", _number(figures.speed_up, ".2f")),
        *_pair("proposer errors", errors),
    )
    bars = Table.grid(padding=(0, 4))
    bars.add_row(
        _bars("accepted by depth", _depths(figures)),
        _bars("K of a request's step", [(name, value, "") for name, value in figures.lengths]),
    )
    if figures.by_scenario:
        scenarios = [(name, value, "") for name, value in figures.by_scenario]
        bars.add_row(_bars("acceptance by scenario", scenarios), "")
    title = f"[bold]{', '.join(figures.models)}[/bold]  {', '.join(figures.methods)}  ({when})"
    return Group(title, "", head, "", bars)


def _depths(figures: Figures) -> list[tuple[str, float, str]]:
    rows = [(str(depth), share, f"of {count:.0f}") for depth, share, count in figures.by_depth]
    if len(rows) > _DEPTHS:
        return [*rows[: _DEPTHS - 1], ("..", rows[-1][1], f"at {rows[-1][0]}")]
    return rows


def _bars(title: str, rows: list[tuple[str, float, str]]) -> RenderableType:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(width=_WIDTH)
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.show_header = False
    for name, value, note in rows or [("", 0.0, _NONE)]:
        filled = round(_WIDTH * min(max(value, 0.0), 1.0))
        table.add_row(name, f"[cyan]{'#' * filled}[/cyan]", f"{value:.0%}" if rows else "", note)
    return table


def _pair(name: str, value: str) -> tuple[str, str]:
    return f"[dim]{name}[/dim]", value


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{1000 * value:.2f} ms"


def _times(mean: float | None, p95: float | None) -> str:
    if mean is None or p95 is None:
        return _NONE
    return f"{1000 * mean:.2f} ms, p95 {1000 * p95:.1f} ms"


def _less(value: float | None) -> float | None:
    return None if value is None else 1.0 - value


def _coloured(value: float | None, good: float, fair: float, shown: float | None = None) -> str:
    if value is None:
        return _NONE
    colour = "green" if value >= good else "yellow" if value >= fair else "red"
    return f"[{colour}]{value if shown is None else shown:.1%}[/{colour}]"
