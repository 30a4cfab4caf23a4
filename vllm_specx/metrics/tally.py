"""What a scheduler has counted since it last reported; travels as one line of JSON.

A report is {"c": {name: {label: growth}}, "h": {name: [sum, {bucket: growth}]}, "g": {name:
{label: value}}}. Growth, so that each report can go to whichever API server is at hand.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specx.metrics.definitions import BY_NAME

_LENGTHS = BY_NAME["draft_length"].buckets
_SECONDS = BY_NAME["step_time_seconds"].buckets
Report = dict[str, Any]


class Tally:
    """Counts of one scheduler. Nothing here is slow: a step of B requests costs B small additions."""

    def __init__(self) -> None:
        self._gauges: dict[str, dict[str, float]] = {}
        self._last_k = -1
        self.trees = False
        """Whether drafts may be trees: then a draft's length is not its depth, and nothing is counted by depth."""
        self._forget()

    def _forget(self) -> None:
        self._lengths: dict[int, int] = {}
        self._hits: dict[int, int] = {}
        self._rejected: dict[int, int] = {}
        self._scenarios: dict[str, list[int]] = {}
        self._counts: dict[str, dict[str, float]] = {}
        self._times: dict[str, tuple[list[float], dict[int, int]]] = {}
        self.empty = True

    # Steps

    def step(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        kept: Sequence[int],
        scenarios: Sequence[str],
        seconds: float,
        reason: str,
    ) -> None:
        """A step in which B >= 1 requests decoded; each sequence has B entries.

        drafted, accepted: draft tokens that were verified, and the accepted ones in a row. kept: tokens
        added to the output. scenarios: labels. seconds: of the step. reason: of its K.
        """
        self.empty = False
        lengths, hits, rejected = self._lengths, self._hits, self._rejected
        for length, hit, stay, scenario in zip(drafted, accepted, kept, scenarios, strict=True):
            lengths[length] = lengths.get(length, 0) + 1
            if length:
                hits[hit] = hits.get(hit, 0) + 1
                if hit < length:
                    rejected[hit + 1] = rejected.get(hit + 1, 0) + 1
            row = self._scenarios.get(scenario)
            if row is None:
                row = self._scenarios[scenario] = [0, 0, 0, 0, 0]
            row[0] += length > 0
            row[1] += length
            row[2] += hit
            row[3] += stay
            row[4] += 1
            if stay > 0:
                self._observe("time_per_output_token_seconds", seconds / stay, stay)
        k = max(drafted)
        self.count("decode_steps", 1, "yes" if k else "no")
        if k != self._last_k:
            if self._last_k >= 0:
                self.count("k_changes", 1, reason)
            self._last_k = k
        self._observe("step_time_seconds", seconds)

    def drafting(self, seconds: float, step_seconds: float) -> None:
        """How long the drafts after a step took, which is a part of the step's time."""
        within = min(seconds, step_seconds)
        self._observe("draft_time_seconds", seconds)
        self._observe("verify_time_seconds", step_seconds - within)
        self.count("bubble_seconds", within)
        self.count("bubble_base_seconds", step_seconds)

    def foreseen(self, expected: float, tokens: int) -> None:
        """A step's tokens, as the controller expected them and as they came."""
        self.count("predicted_tokens", expected)
        self.count("foreseen_tokens", tokens)

    def timed(self, predicted: float, seconds: float, plain: float) -> None:
        """A step of decoding alone: its predicted and its actual time, and what its tokens would have
        taken without speculation."""
        if not all(0.0 <= value < math.inf for value in (predicted, seconds, plain)):
            return
        self.count("predicted_step_seconds", predicted)
        self.count("foreseen_step_seconds", seconds)
        self.count("plain_seconds", plain)

    # Single values

    def count(self, name: str, growth: float, label: str = "") -> None:
        """A counter has grown."""
        self.empty = False
        labels = self._counts.get(name)
        if labels is None:
            labels = self._counts[name] = {}
        labels[label] = labels.get(label, 0) + growth

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """A gauge has this value now."""
        self.empty = False
        self._gauges.setdefault(name, {})[label] = value

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        entry = self._times.get(name)
        if entry is None:
            entry = self._times[name] = ([0.0], {})
        entry[0][0] += value * times
        bucket = bisect_left(_SECONDS, value)
        entry[1][bucket] = entry[1].get(bucket, 0) + times

    # Reports

    def report(self) -> Report:
        """Everything since the last report, which is forgotten."""
        counts: dict[str, Mapping[str, float]] = dict(self._counts)
        names = ("drafts", "draft_tokens", "accepted_tokens", "decode_tokens", "request_steps")
        for place, name in enumerate(names):
            counts[name] = {s: row[place] for s, row in self._scenarios.items() if row[place]}
        if not self.trees:
            counts.update(self._by_depth())
        histograms: dict[str, list[Any]] = {
            name: [total[0], buckets] for name, (total, buckets) in self._times.items()
        }
        if self._lengths:
            buckets: dict[int, int] = {}
            for length, times in self._lengths.items():
                bucket = bisect_left(_LENGTHS, length)
                buckets[bucket] = buckets.get(bucket, 0) + times
            total = sum(length * times for length, times in self._lengths.items())
            histograms["draft_length"] = [total, buckets]
        report: Report = {"c": counts, "h": histograms, "g": self._gauges}
        self._gauges = {}
        self._forget()
        return report

    def _by_depth(self) -> dict[str, dict[str, float]]:
        drafted = _at_least(self._lengths)
        accepted = _at_least(self._hits)
        judged = {depth: accepted.get(depth, 0) + self._rejected.get(depth, 0) for depth in drafted}
        return {
            f"{name}_by_depth": {str(depth): count for depth, count in found.items() if count}
            for name, found in (
                ("draft_tokens", drafted),
                ("judged_tokens", judged),
                ("accepted_tokens", accepted),
            )
        }


def _at_least(counts: Mapping[int, int]) -> dict[int, int]:
    """How many values are at least 1, 2, ... up to the largest."""
    found: dict[int, int] = {}
    running = 0
    for depth in range(max(counts, default=0), 0, -1):
        running += counts.get(depth, 0)
        found[depth] = running
    return found


def dump(report: Report) -> str:
    """A report as one line."""
    return json.dumps(report, separators=(",", ":"))


def load(text: str) -> Report:
    """The report of a line."""
    report: Report = json.loads(text)
    return report
