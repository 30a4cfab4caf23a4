"""What the worker tells of drafting: its time, the proposer's faults, and counts of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

REPORT = "specx_report"
"""The attribute of vLLM's DraftTokenIds."""
COUNTS = "specx_counts"
"""An attribute of the runner's drafter: totals by metric name (definitions.py) and label, such as
{"tree_fallbacks": {"batch": 3}}. What is there is exported."""
_SECONDS = "_specx_draft_seconds"


def timed(propose: Callable[..., Any]) -> Callable[..., Any]:
    """propose_draft_token_ids with its time kept on the runner. Host time: of drafts that stay on the
    device it is the time of launching them."""

    def around(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return propose(original, runner, *args, **kwargs)
        finally:
            setattr(runner, _SECONDS, time.perf_counter() - started)

    return around


def told(take: Callable[..., Any]) -> Callable[..., Any]:
    """take_draft_token_ids with a report on what it gives."""

    def around(original: Callable[..., Any], runner: Any) -> Any:
        taken = take(original, runner)
        if taken is not None:
            with suppress(Exception):  # metrics cost no drafts
                setattr(taken, REPORT, report(runner))
        return taken

    return around


def report(runner: Any) -> dict[str, Any]:
    """seconds: of the drafts since the last report. counts: totals. disabled: by the guard."""
    made: dict[str, Any] = {"seconds": getattr(runner, _SECONDS, 0.0)}
    setattr(runner, _SECONDS, 0.0)
    drafter = getattr(runner, "drafter", None)
    counts: dict[str, dict[str, int]] = dict(getattr(drafter, COUNTS, None) or {})
    guard = getattr(drafter, "guard", None)
    if guard is not None and guard.faults:
        counts["proposer_errors"] = {"": guard.faults}
        made["disabled"] = guard.disabled
    if counts:
        made["counts"] = counts
    return made
