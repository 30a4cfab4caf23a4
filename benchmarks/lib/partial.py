"""Partial results: one JSON line a finished cell, so that a run that was cut off continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.errors import BenchError


class Partial:
    """A file of records. The first line names the scenario it belongs to.

    A cell is (round, group, batch size) with every configuration and phase; it is written whole, so
    what a killed run leaves is only complete cells, and perhaps one torn last line, which is cut.
    """

    def __init__(self, path: Path, fingerprint: str, *, restart: bool = False) -> None:
        self.path = path
        self.cells: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []
        if restart:
            path.unlink(missing_ok=True)
        if path.exists() and path.stat().st_size:
            self._read(fingerprint)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"fingerprint": fingerprint})

    def _read(self, fingerprint: str) -> None:
        whole, _, torn = self.path.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines or lines[0].get("fingerprint") != fingerprint:
            raise BenchError(
                f"{self.path} holds results of another scenario or selection; add --restart to "
                "throw them away, or choose another --out."
            )
        if torn:
            self.path.write_text(whole + "\n")
        for line in lines[1:]:
            (self.sessions if "session" in line else self.cells).append(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def has(self, round_index: int, group: str, batch_size: int) -> bool:
        wanted = (round_index, group, batch_size)
        return any((c["round"], c["group"], c["batch_size"]) == wanted for c in self.cells)

    def add_cell(self, cell: dict[str, Any]) -> None:
        self._append(cell)
        self.cells.append(cell)

    def add_session(self, session: dict[str, Any]) -> None:
        """What one start of the harness was run with (machine, versions, start times)."""
        self._append(session)
        self.sessions.append(session)
