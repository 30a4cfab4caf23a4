"""What is promised of speculation by workload and by method, beside what the arithmetic says.

The promises are those of a published table for targets of 32B to 72B with a draft step of 5% of the
target's (gamma 0.05). The formula counts verifying as free and every step as full, so it is an upper
bound: a promise above it cannot be kept, one below it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_specx.plan import drafts
from vllm_specx.plan.curves import Curve, RooflineCurve, Transformer
from vllm_specx.plan.drafts import Room
from vllm_specx.plan.facts import ModelFacts, read_facts
from vllm_specx.plan.formula import best_k, speed_up
from vllm_specx.plan.gpus import GPUS

GAMMA = 0.05
Verdict = Literal["agrees", "careful", "optimistic"]
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Promise:
    """acceptance, k, gain: the lowest and the highest that are promised for a workload."""

    workload: str
    acceptance: Range
    k: tuple[int, int]
    gain: Range


WORKLOADS = (
    Promise("code, SQL", (0.75, 0.88), (5, 6), (2.4, 3.1)),
    Promise("tool calling, JSON", (0.70, 0.82), (4, 5), (2.1, 2.6)),
    Promise("long chain of thought", (0.55, 0.68), (3, 4), (1.6, 2.0)),
    Promise("creative, T >= 0.9", (0.30, 0.45), (1, 2), (0.95, 1.2)),
)
BATCHES = (1, 8, 32, 64)
TARGET, RANKS, GPU, CONTEXT = "Qwen/Qwen2.5-72B-Instruct", 4, "A100-80GB", 2048


@dataclass(frozen=True, slots=True)
class Checked:
    """gain: the formula's range over the promised acceptance and K; best: the best K at both ends.
    by_batch: the range where verifying costs what the roofline says."""

    promise: Promise
    gain: Range
    best: tuple[int, int]
    verdict: Verdict
    by_batch: dict[int, tuple[Range, Verdict]]


@dataclass(frozen=True, slots=True)
class Size:
    """A promise of memory, in bytes: between two of them, or at most. actual: by model."""

    method: str
    promised: Range
    actual: dict[str, float]

    def verdict(self, size: float) -> Verdict:
        """Of one model's."""
        return judge(self.promised, (size, size), lower_is_better=True)


def workloads(gamma: float = GAMMA, curve: Curve | None = None) -> list[Checked]:
    """Every workload beside the formula, and beside the roofline of a 72B on four A100."""
    curve = curve or _curve()
    found = []
    for promise in WORKLOADS:
        by_batch = {}
        for batch in BATCHES:
            plain = curve.decode(batch, 0, batch * CONTEXT, 0)
            verify = {
                k: curve.decode(batch, batch * k, batch * CONTEXT, 0) / plain for k in promise.k
            }
            gain = _range(promise, gamma, verify)
            by_batch[batch] = gain, judge(promise.gain, gain)
        gain = _range(promise, gamma, dict.fromkeys(promise.k, 1.0))
        low, high = promise.acceptance
        best = best_k(low, gamma)[0], best_k(high, gamma)[0]
        found.append(Checked(promise, gain, best, judge(promise.gain, gain), by_batch))
    return found


def judge(promised: Range, found: Range, *, lower_is_better: bool = False) -> Verdict:
    """optimistic: no part of what is promised is within reach at its better end; careful: all of it is
    surpassed; else agrees.

    For gains, the promised upper end is compared with the best, the lower end with the worst.
    """
    if lower_is_better:
        if found[0] > promised[1]:
            return "optimistic"
        return "careful" if found[1] < promised[0] else "agrees"
    if promised[1] > found[1] or promised[0] > found[0]:
        return "optimistic"
    return "careful" if promised[1] < found[0] else "agrees"


def sizes() -> list[Size]:
    """What methods take beside the target, in bfloat16, without caches."""
    small, large = "Llama-3.1-8B", "Llama-3.3-70B"
    eight = read_facts("meta-llama/Llama-3.1-8B-Instruct", download=False)
    seventy = read_facts("meta-llama/Llama-3.3-70B-Instruct", download=False)
    room = Room(8, 8192)

    def eagle(name: str, target: ModelFacts, version: int) -> float:
        found = drafts.eagle(name, target, room, own=True, ranks=1, version=version, download=False)
        return found.resident

    heads = {
        named: drafts.medusa("", facts, own=True, ranks=1, k=4).resident
        for named, facts in ((small, eight), (large, seventy))
    }
    return [
        Size(
            "draft model",
            (2e9, 6e9),
            {
                name: read_facts(name, download=False).weight_bytes
                for name in ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
            },
        ),
        Size("Medusa, 4 heads", (0.0, 0.2e9), heads),
        Size(
            "EAGLE without embeddings of its own",
            (0.0, 0.5e9),
            {small: eagle("", eight, 1), large: eagle("", seventy, 1)},
        ),
        Size(
            "EAGLE-3, published",
            (0.0, 0.5e9),
            {small: eagle("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", eight, 3)},
        ),
    ]


def _range(promise: Promise, gamma: float, verify: dict[int, float]) -> Range:
    """At the lowest acceptance and at the highest, with the better of the promised K."""
    low, high = (
        max(speed_up(a, k, gamma, verify[k]) for k in promise.k) for a in promise.acceptance
    )
    return low, high


def _curve() -> Curve:
    facts = read_facts(TARGET, download=False)
    rooms = Transformer(
        parameters=facts.linear_parameters + facts.embedding_parameters,
        weight_bytes=facts.read_bytes,
        kv_bytes=facts.kv_bytes(),
        layers=facts.layers,
    )
    return RooflineCurve(GPUS[GPU], RANKS, rooms)


def needed_gamma(promise: Promise, k: int, acceptance: float, gain: float) -> float:
    """The gamma at which the formula gives `gain`."""
    return (speed_up(acceptance, k, 0.0) / gain - 1.0) / k


def to_json(checked: Sequence[Checked], found: Sequence[Size]) -> dict[str, object]:
    """For machines."""
    return {
        "gamma": GAMMA,
        "workloads": [
            {
                "workload": each.promise.workload,
                "acceptance": each.promise.acceptance,
                "k": each.promise.k,
                "promised": each.promise.gain,
                "formula": each.gain,
                "best_k": each.best,
                "verdict": each.verdict,
                "roofline": {
                    str(batch): {"gain": gain, "verdict": verdict}
                    for batch, (gain, verdict) in each.by_batch.items()
                },
            }
            for each in checked
        ],
        "roofline_of": f"{TARGET}, {RANKS} x {GPU}, contexts of {CONTEXT} tokens",
        "memory": [
            {"method": each.method, "promised_bytes": each.promised, "bytes": each.actual}
            for each in found
        ],
    }
