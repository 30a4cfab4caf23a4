"""How far a stage is and when it ends: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

LOG_EVERY_S = 30.0


class Progress:
    """Use as a context manager; the first update is where the work starts (resumed work counts)."""

    def __init__(self, stage: str, unit: str) -> None:
        self._stage, self._unit = stage, unit
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(unit),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(stage, total=None, note="")
        self._first: tuple[float, int] | None = None
        self._logged = 0.0

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, total: int, note: str = "") -> None:
        """done and total in units; note is shown behind the ETA."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        if self._bar:
            self._bar.update(self._task, completed=min(done, total), total=total, note=note)
        elif now - self._logged >= LOG_EVERY_S or done >= total:
            self._logged = now
            print(self._line(now, done, total, note), file=sys.stderr, flush=True)

    def _line(self, now: float, done: int, total: int, note: str) -> str:
        assert self._first is not None
        began, first = self._first
        text = f"{self._stage}: {done}/{total} {self._unit}"
        if done > first:
            rate = (done - first) / max(now - began, 1e-9)
            text += f", {rate:.0f} {self._unit}/s, ETA {max(total - done, 0) / rate / 60:.0f} min"
        return f"{text} {note}".rstrip()
