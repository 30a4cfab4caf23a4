"""The time of a step: measured on a machine, or from the roofline of one that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_specx.plan.gpus import Gpu

FloatArray = npt.NDArray[np.float64]


class Curve(Protocol):
    """Seconds of what a server does."""

    def decode(
        self,
        requests: int,
        drafts: float,
        context: float,
        draft_steps: float,
        draft_width: float = 1.0,
    ) -> float:
        """A step that verifies `drafts` tokens in all, `context` tokens of KV cache being read.

        draft_width: tokens of a request that go through the draft in one of its steps.
        """
        ...

    def prefill(self, tokens: int) -> float:
        """What the prompt tokens of a step add to it."""
        ...


class MeasuredCurve:
    """Milliseconds by batch and K, every request drafting K; between them it is interpolated."""

    def __init__(
        self,
        table: Mapping[int, Mapping[int, float]],
        prefill_tokens_per_second: float,
        draft_step_ms: float = 0.0,
    ) -> None:
        self._batches = sorted(table)
        self._rows = {
            batch: (
                np.array(sorted(row), np.float64),
                np.array([row[k] for k in sorted(row)], np.float64) / 1000,
            )
            for batch, row in table.items()
        }
        self._prefill = prefill_tokens_per_second
        self._draft_step = draft_step_ms / 1000

    def decode(
        self,
        requests: int,
        drafts: float,
        context: float,
        draft_steps: float,
        draft_width: float = 1.0,
    ) -> float:
        """See Curve; neither the context nor the draft's width counts."""
        k = drafts / requests
        batches = self._batches
        upper = next((i for i, b in enumerate(batches) if b >= requests), len(batches) - 1)
        high = batches[upper]
        low = batches[max(upper - 1, 0)]
        seconds = self._at(high, k)
        if high != low and high != requests:
            seconds += (requests - high) / (high - low) * (seconds - self._at(low, k))
        return seconds + self._draft_step * draft_steps

    def prefill(self, tokens: int) -> float:
        """See Curve."""
        return tokens / self._prefill

    def _at(self, batch: int, k: float) -> float:
        ks, seconds = self._rows[batch]
        if k <= ks[-1] or len(ks) < 2:
            return float(np.interp(k, ks, seconds))
        slope = (seconds[-1] - seconds[-2]) / (ks[-1] - ks[-2])
        return float(seconds[-1] + max(slope, 0.0) * (k - ks[-1]))


@dataclass(frozen=True, slots=True)
class Transformer:
    """A dense decoder. kv_bytes: of one token of context; layers: for the all-reduces."""

    parameters: float
    weight_bytes: float
    kv_bytes: float
    layers: int


@dataclass(frozen=True, slots=True)
class RooflineCurve:
    """A model on GPUs with tensor parallelism: the slower of reading and computing, and overheads.

    bandwidth_share, compute_share: what of the data sheet is reached. overhead: seconds of a step
    for everything that is not the model. all_reduce: seconds of one, two a layer.
    draft: the draft model, on the same GPUs; None: drafting costs nothing.
    """

    gpu: Gpu
    gpus: int
    model: Transformer
    draft: Transformer | None = None
    bandwidth_share: float = 0.75
    compute_share: float = 0.6
    overhead: float = 0.002
    all_reduce: float = 12e-6

    def decode(
        self,
        requests: int,
        drafts: float,
        context: float,
        draft_steps: float,
        draft_width: float = 1.0,
    ) -> float:
        """See Curve."""
        seconds = self.overhead + self._forward(self.model, requests + drafts, context)
        if self.draft is not None and draft_steps:
            seconds += draft_steps * self._forward(self.draft, requests * draft_width, context)
        return seconds

    def prefill(self, tokens: int) -> float:
        """See Curve: compute-bound."""
        rate = self.gpu.flops * self.compute_share * self.gpus
        return 2 * self.model.parameters * tokens / rate

    def _forward(self, model: Transformer, tokens: float, context: float) -> float:
        gpu, gpus = self.gpu, self.gpus
        read = model.weight_bytes + model.kv_bytes * context
        reading = read / (gpu.bandwidth * self.bandwidth_share * gpus)
        computing = 2 * model.parameters * tokens / (gpu.flops * self.compute_share * gpus)
        talking = 2 * model.layers * self.all_reduce if gpus > 1 else 0.0
        return max(reading, computing) + talking
