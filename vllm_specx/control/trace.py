"""One JSON line a step, so that every decision can be explained afterwards."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

MOST_SECONDS = 1.0
"""What is in memory is written at the first record after this time."""


class Trace:
    """Appends records to a file; a file that cannot be written ends the trace, not the engine."""

    def __init__(self, path: str | Path, lines: int = 64) -> None:
        """lines: how many are kept in memory before they are written."""
        self.path = Path(path)
        self._lines = lines
        self._buffer: list[str] = []
        self._file: TextIOWrapper | None = None
        self._flushed = time.monotonic()
        try:
            self.path = self.path.expanduser()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as error:
            self._end(error)

    @property
    def open(self) -> bool:
        """Whether records are still taken."""
        return self._file is not None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        if self._file is None:
            return
        self._buffer.append(json.dumps(record, separators=(",", ":")))
        now = time.monotonic()
        if len(self._buffer) >= self._lines or now - self._flushed > MOST_SECONDS:
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if self._file is None or not self._buffer:
            return
        try:
            self._file.write("\n".join(self._buffer) + "\n")
            self._file.flush()
        except OSError as error:
            self._end(error)
        self._buffer.clear()

    def close(self) -> None:
        """Write what is in memory and end."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end(self, error: Exception) -> None:
        logger.warning(
            "vllm_specx: no controller trace: %s cannot be written: %s", self.path, error
        )
        self._file = None
