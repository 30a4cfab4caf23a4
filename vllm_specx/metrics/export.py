"""Reports become prometheus_client's metrics, in the process that answers /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_specx.metrics.definitions import BY_NAME, LABELS, METRICS, PREFIX, Metric
from vllm_specx.metrics.tally import Report


class Exporter:
    """Every metric of definitions.py, for the engines of one server.

    Under PROMETHEUS_MULTIPROC_DIR prometheus_client adds up the counters of all API servers.
    """

    def __init__(
        self,
        model_name: str,
        engines: Sequence[int],
        method: str,
        max_k: int,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """max_k: depths that are exported as 0 from the start."""
        unregister(registry)
        self._labels = {engine: (model_name, str(engine), method) for engine in engines}
        self._metrics: dict[str, Any] = {}
        depths = tuple(str(depth) for depth in range(1, max_k + 1))
        for metric in METRICS:
            made = self._metrics[metric.name] = _make(metric, registry)
            values = depths if metric.label == "depth" else metric.values
            for labels in self._labels.values():
                if metric.label is None:
                    made.labels(*labels)
                for value in values:
                    made.labels(*labels, value)

    def apply(self, report: Report, engine: int) -> None:
        """Add what an engine reports. Names that are not known are passed over."""
        labels = self._labels.get(engine)
        if labels is None:
            return
        for name, by_label in report.get("c", {}).items():
            for value, growth in by_label.items():
                if (child := self._child(name, labels, value)) is not None and growth > 0:
                    child.inc(growth)
        for name, by_label in report.get("g", {}).items():
            for value, now in by_label.items():
                if (child := self._child(name, labels, value)) is not None:
                    child.set(now)
        for name, (total, buckets) in report.get("h", {}).items():
            if (child := self._child(name, labels, "")) is not None:
                add_to_histogram(child, total, {int(i): n for i, n in buckets.items()})

    def _child(self, name: str, labels: tuple[str, ...], value: str) -> Any:
        made = self._metrics.get(name)
        if made is None:
            return None
        return made.labels(*labels, value) if BY_NAME[name].label else made.labels(*labels)


def add_to_histogram(histogram: Histogram, total: float, buckets: Mapping[int, int]) -> None:
    """Many observations at once: their sum, and how many are in each bucket.

    As prometheus_client's Histogram.observe, which takes one at a time.
    """
    histogram._sum.inc(total)
    for index, times in buckets.items():
        histogram._buckets[index].inc(times)


def unregister(registry: CollectorRegistry = REGISTRY) -> None:
    """Forget our metrics of an engine that this process had before, as vLLM does with its own."""
    for collector in list(registry._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            registry.unregister(collector)


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    labels = [*LABELS, *([metric.label] if metric.label else [])]
    common: dict[str, Any] = {
        "name": metric.full_name,
        "documentation": metric.help,
        "labelnames": labels,
        "registry": registry,
    }
    if metric.kind == "counter":
        return Counter(**common)
    if metric.kind == "gauge":
        return Gauge(**common, multiprocess_mode="mostrecent")
    return Histogram(**common, buckets=metric.buckets)
