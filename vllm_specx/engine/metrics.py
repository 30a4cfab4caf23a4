"""How what the engine counts gets to the server's own /metrics.

    worker:      time and faults of drafting, on vLLM's DraftTokenIds          (metrics_worker.py)
    engine core: Meter counts steps and puts a report on vLLM's SchedulerStats
    API server:  SpecxStatLogger, one of vLLM's stat loggers, takes it off and exports it

SchedulerStats is decoded by its declared fields, none of which is for plugins: a report is a key of
num_kv_fetch_reqs_by_stage, of which vLLM's own loggers ask for the stages that they know. Can go when
SchedulerStats carries what plugins add. A fault here ends the metrics, never the server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_specx.control.controller import Controller
from vllm_specx.engine.metrics_worker import REPORT
from vllm_specx.metrics import tally as tallies
from vllm_specx.metrics.definitions import scenario_of
from vllm_specx.metrics.tally import Tally

logger = logging.getLogger(f"vllm.{__name__}")

KEY = "specx "
"""What a report begins with on SchedulerStats."""
EVERY_SECONDS = 0.2
"""Between reports, while there is work; the step after which there is none reports at once."""


class Meter:
    """Counts for one scheduler. No method raises."""

    def __init__(self, counting: bool = True, asynchronous: bool = False) -> None:
        """asynchronous: drafting is not timed."""
        self._tally: Tally | None = Tally() if counting else None
        self._asynchronous = asynchronous
        self._scenarios: dict[str, str] = {}
        self._step_seconds = 0.0
        self._reported = 0.0
        self._seen: dict[tuple[str, str], float] = {}

    def add(self, request_id: str, pool: str) -> None:
        """A new request. pool: control.policy.Rule.pool."""
        self._scenarios[request_id] = scenario_of(pool)

    def remove(self, request_id: str) -> None:
        """It has ended."""
        self._scenarios.pop(request_id, None)

    def step(
        self,
        ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        kept: Sequence[int],
        seconds: float,
        reason: str,
    ) -> None:
        """A step's output was taken in; see Tally.step."""

        def act(tally: Tally) -> None:
            self._undrafted(tally)
            # With asynchronous scheduling a step may still run of a request that has ended.
            live = [i for i, request in enumerate(ids) if request in self._scenarios]
            if not live:
                return
            d, a, k = ([column[i] for i in live] for column in (drafted, accepted, kept))
            scenarios = [self._scenarios[ids[i]] for i in live]
            tally.step(d, a, k, scenarios, seconds, reason)
            self._step_seconds = seconds

        self._safely(act)

    def learned(
        self, controller: Controller, size: int, tokens: int, seconds: float, timed: bool
    ) -> None:
        """The controller has seen a step of `size` requests. timed: it learned its time, too."""

        def act(tally: Tally) -> None:
            expected, predicted = controller.foreseen
            tally.foreseen(expected, tokens)
            if timed:
                plain = controller.cost.time(size, size) * tokens / size
                tally.timed(predicted, seconds, plain)

        self._safely(act)

    def worker(self, report: Mapping[str, Any] | None) -> None:
        """What came with a step's drafts (metrics_worker.report)."""
        if report is None:
            return

        def act(tally: Tally) -> None:
            if self._step_seconds and not self._asynchronous:
                tally.drafting(report["seconds"], self._step_seconds)
                self._step_seconds = 0.0
            counts = report.get("counts", {})
            tally.trees |= "tree_nodes" in counts
            for name, labels in counts.items():
                for label, total in labels.items():
                    before = self._seen.get((name, label), 0)
                    if total > before:
                        tally.count(name, total - before, label)
                        self._seen[name, label] = total
            if report.get("disabled"):
                tally.gauge("disabled", 1.0, "proposer")

        self._safely(act)

    def controller_failed(self) -> None:
        """K is not chosen any more."""
        self._safely(lambda tally: tally.gauge("disabled", 1.0, "controller"))

    def attach(self, outputs: Mapping[int, Any], controller: Controller | None) -> None:
        """Put a report on the SchedulerStats among a step's outputs, if it is time for one."""

        def act(tally: Tally) -> None:
            for output in outputs.values():
                stats = output.scheduler_stats
                if stats is None:
                    continue
                now = time.monotonic()
                busy = stats.num_running_reqs or stats.num_waiting_reqs
                if tally.empty or (busy and now - self._reported < EVERY_SECONDS):
                    return
                self._reported = now
                if controller is not None:
                    tally.gauge("step_time_error_ratio", controller.cost.error)
                stats.num_kv_fetch_reqs_by_stage[KEY + tallies.dump(tally.report())] = 0
                return

        self._safely(act)

    def _undrafted(self, tally: Tally) -> None:
        """Of the step before no drafts came: none were made."""
        if self._step_seconds and not self._asynchronous:
            tally.drafting(0.0, self._step_seconds)
        self._step_seconds = 0.0

    def _safely(self, act: Callable[[Tally], None]) -> None:
        if self._tally is None:
            return
        try:
            act(self._tally)
        except Exception:
            self._tally = None
            logger.exception(
                "vllm_specx: counting for /metrics failed and is switched off until the engine restarts."
            )


def report_of(draft_token_ids: Any) -> Mapping[str, Any] | None:
    """What the worker has put on DraftTokenIds."""
    report: Mapping[str, Any] | None = getattr(draft_token_ids, REPORT, None)
    return report


def take_report(stats: Any) -> tallies.Report | None:
    """Take our report off a SchedulerStats, so that no other logger sees it."""
    stages: dict[str, int] = stats.num_kv_fetch_reqs_by_stage
    for key in stages:
        if key.startswith(KEY):
            del stages[key]
            return tallies.load(key[len(KEY) :])
    return None
