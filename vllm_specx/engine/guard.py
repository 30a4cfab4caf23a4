"""A fault of a proposer costs drafts, never the server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(f"vllm.{__name__}")

T = TypeVar("T")
MAX_CONSECUTIVE_FAULTS = 3


class Guard:
    """Runs one step of a proposer; counts its faults and switches it off after three in a row."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults = 0
        self.consecutive = 0
        self.disabled = False

    def run(self, step: Callable[[], T], nothing: T) -> T:
        """The step's drafts, or `nothing`."""
        if self.disabled:
            return nothing
        try:
            drafts = step()
        except Exception:
            self._count()
            return nothing
        self.consecutive = 0
        return drafts

    def _count(self) -> None:
        self.faults += 1
        self.consecutive += 1
        if self.faults == 1:
            logger.exception(
                "vllm_specx: proposer '%s' failed; this step drafts nothing.", self.name
            )
        if self.consecutive >= MAX_CONSECUTIVE_FAULTS:
            self.disabled = True
            logger.error(
                "vllm_specx: proposer '%s' failed %d times in a row and is switched off until the "
                "engine restarts; serving goes on without drafts.",
                self.name,
                self.consecutive,
            )
