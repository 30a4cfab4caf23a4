"""vLLM's speculative counters, read from Prometheus text, and what follows from their growth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started, or their growth over a while.

    drafts: verified drafts, one a request a step that drafted.
    steps: engine steps, prefill steps included.
    accepted_by_depth: accepted_by_depth[i] drafts had their token i accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_cache_hits: int = 0
    accepted_by_depth: tuple[int, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Counters:
        """Read /metrics text, summed over engines; counters that are not there are 0."""
        totals: dict[str, float] = dict.fromkeys(_COUNTERS.values(), 0.0)
        by_depth: dict[int, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if name := _COUNTERS.get(sample.name):
                    totals[name] += sample.value
                elif sample.name == _PER_POSITION:
                    depth = int(sample.labels["position"])
                    by_depth[depth] = by_depth.get(depth, 0.0) + sample.value
        depths = max(by_depth, default=-1) + 1
        return cls(
            **{name: int(value) for name, value in totals.items()},
            accepted_by_depth=tuple(int(by_depth.get(i, 0)) for i in range(depths)),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counters:
        return cls(**{**data, "accepted_by_depth": tuple(data["accepted_by_depth"])})

    def _combine(self, other: Counters, sign: int) -> Counters:
        depths = max(len(self.accepted_by_depth), len(other.accepted_by_depth))

        def depth(counters: Counters, i: int) -> int:
            values = counters.accepted_by_depth
            return values[i] if i < len(values) else 0

        return Counters(
            **{
                name: getattr(self, name) + sign * getattr(other, name)
                for name in _COUNTERS.values()
            },
            accepted_by_depth=tuple(depth(self, i) + sign * depth(other, i) for i in range(depths)),
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return self._combine(earlier, -1)

    def __add__(self, other: Counters) -> Counters:
        return self._combine(other, 1)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a drafting step commits, the bonus token included; None without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """The share of drafts whose token at depth 1, 2, ... was accepted; zeros at the end cut."""
        if not self.drafts:
            return []
        rates = [accepted / self.drafts for accepted in self.accepted_by_depth]
        while rates and rates[-1] == 0.0:
            rates.pop()
        return rates

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None
