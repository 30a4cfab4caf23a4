"""Synthetic proposers and step times for tests of control/."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_specx.control.controller import Controller
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.plan.curves import MeasuredCurve

MEASURED_MS = {
    1: {0: 8.7, 1: 9.3, 2: 9.5, 3: 10.0, 4: 10.3, 6: 11.7, 8: 14.1, 12: 15.3, 16: 16.4, 32: 23.2},
    4: {0: 10.2, 1: 11.6, 2: 13.3, 3: 15.7, 4: 16.6, 6: 19.6, 8: 22.2},
    8: {0: 12.0, 1: 15.2, 2: 18.6, 3: 22.0, 4: 25.5, 6: 33.2, 8: 37.7},
    16: {0: 16.5, 1: 24.0, 2: 33.5, 3: 36.8, 4: 41.8, 6: 56.0, 8: 81.0},
    32: {0: 29.4, 1: 38.7, 2: 49.2, 3: 64.2, 4: 88.4, 6: 110.0, 8: 151.0},
}
"""SmolLM2-135M on 2 cores with AMX, by batch and K."""
SLOW_MS = {1: {0: 30.0, 2: 32.1, 4: 33.0, 8: 45.3, 16: 60.0, 32: 93.0}}
"""The same without AMX, batch 1."""

CURVE = MeasuredCurve(MEASURED_MS, 1500)
Rates = Callable[[int], Any]


def step_seconds(batch: int, drafts: float) -> float:
    """Of the measured machine."""
    return CURVE.decode(batch, drafts, 0, 0)


def expected_tokens(rates: Any, k: int) -> float:
    """Of one request: 1 + sum of products of rates [depth]."""
    return 1.0 + float(np.cumprod(np.asarray(rates)[:k]).sum())


@dataclass
class Run:
    """What a run made; tokens are expected ones, seconds without noise."""

    tokens: float = 0.0
    seconds: float = 0.0
    ks: list[Any] = field(default_factory=list)
    """K of each step, int [B]."""
    probes: list[bool] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    """Tokens of each step, as the controller foresaw them before its choice was verified."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def steady_changes(self) -> list[int]:
        """Steps at which K changed, trials left out."""
        chosen = [
            (i, k.tolist())
            for i, (k, p) in enumerate(zip(self.ks, self.probes, strict=True))
            if not p
        ]
        return [i for (_, a), (i, b) in itertools.pairwise(chosen) if a != b]


def run(
    batch: int,
    rates: Rates,
    steps: int,
    *,
    controller: Controller | None = None,
    fixed: int | None = None,
    seed: int = 0,
    max_k: int = 16,
    noise: float = 0.03,
    outliers: float = 0.01,
    seconds: Callable[[int, float], float] = step_seconds,
    draft_step: float = 0.0,
    count_from: int = 0,
    uniform: bool = False,
    **options: Any,
) -> Run:
    """Drive a controller (or a fixed K) for so many steps of one batch.

    rates: step -> conditional acceptance [batch, max_k] or [max_k].
    """
    random = np.random.default_rng(seed)
    if controller is None and fixed is None:
        options.setdefault("varying", False)
        config = ControllerConfig(per_request="never" if uniform else "auto")
        controller = Controller(config, max_k, **options)
    ids = [f"r{i}" for i in range(batch)]
    done = Run()
    for step in range(steps):
        chance = np.broadcast_to(np.asarray(rates(step), float), (batch, max_k))
        probe = False
        if fixed is not None:
            k = np.full(batch, fixed)
        else:
            assert controller is not None
            decision = controller.decide(ids)
            k, probe = decision.k.astype(np.int64), decision.probe
        hits = np.minimum((random.random(chance.shape) < chance).cumprod(1).sum(1), k)
        deepest = int(k.max())
        true = seconds(batch, float(k.sum())) + draft_step * deepest
        if step >= count_from:
            done.tokens += batch + float(
                (np.cumprod(chance, 1) * (np.arange(max_k) < k[:, None])).sum()
            )
            done.seconds += true
        done.ks.append(k)
        done.probes.append(probe)
        if controller is not None and fixed is None:
            seen = true * float(random.lognormal(0, noise))
            if random.random() < outliers:
                seen *= float(random.uniform(1.5, 8))
            controller.observe(ids, drafted=k, accepted=hits, seconds=seen, draft_steps=deepest)
    return done


def best_static(
    batch: int,
    rates: Any,
    max_k: int = 16,
    seconds: Callable[[int, float], float] = step_seconds,
    draft_step: float = 0.0,
) -> tuple[int, float]:
    """(K, tokens/s) of the best single K; rates: [max_k] or [batch, max_k]."""
    table = np.broadcast_to(np.asarray(rates, float), (batch, max_k))
    found = [
        sum(expected_tokens(row, k) for row in table) / (seconds(batch, batch * k) + draft_step * k)
        for k in range(max_k + 1)
    ]
    return int(np.argmax(found)), float(max(found))


def plain_rate(batch: int, seconds: Callable[[int, float], float] = step_seconds) -> float:
    """Tokens/s without speculation."""
    return batch / seconds(batch, 0.0)
