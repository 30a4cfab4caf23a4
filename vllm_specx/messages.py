"""What others wrote, in messages: cut short, and not for ever."""

from __future__ import annotations

import itertools
import logging
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

_MOST_WARNINGS = 100
_warnings = itertools.count(1)


def clipped(text: str, most: int = 100) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def shown(value: Any) -> str:
    """The beginning of a value as Python writes it."""
    return clipped(repr(value), 60)


def warn_of(said: str) -> None:
    """Log what a client has wrong, so often that it is seen and no client can fill the log."""
    number = next(_warnings)
    if number <= _MOST_WARNINGS:
        last = "" if number < _MOST_WARNINGS else " Further ones are not logged."
        logger.warning("vllm_specx: ignored: %s%s", said, last)
