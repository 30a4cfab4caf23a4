"""The file that `vllm-specx simulate` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_specx import documents
from vllm_specx.config import ConfigError, nearest
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.messages import clipped
from vllm_specx.plan.curves import Curve, MeasuredCurve, RooflineCurve, Transformer
from vllm_specx.plan.gpus import GPUS

Positive = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
Milliseconds = Annotated[float, Field(ge=1e-3, le=1e7)]
MOST_REQUESTS = 100_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Shift(_Strict):
    """From an output token on, another acceptance."""

    after: Tokens
    acceptance: Annotated[list[Share], Field(min_length=1)]


class Work(_Strict):
    """A kind of request."""

    acceptance: Annotated[list[Share], Field(min_length=1)]
    """Of a draft token when those before it were accepted, by depth; the last one goes on."""
    siblings: list[list[Share]] = []
    """Of a draft tree's second, third, ... child of an accepted node, by depth; the last one goes on."""
    drafted: Share = 1.0
    """How often the proposer has a draft at all."""
    draft_length: Positive | None = None
    """Mean length of what it finds (geometric); unset, as long as allowed."""
    prompt_tokens: Tokens = 200
    output_tokens: Tokens = 200
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    label: str | None = None
    """The client's specx_scenario; unset, it does not tell."""
    shift: Shift | None = None

    @model_validator(mode="after")
    def _at_most_one_is_right(self) -> Work:
        depth = max(len(self.acceptance), len(self.siblings))
        for d in range(depth if self.siblings else 0):
            first = self.acceptance[min(d, len(self.acceptance) - 1)]
            others = self.siblings[min(d, len(self.siblings) - 1)]
            if first + sum(others) > 1.0 + 1e-6:
                raise ValueError(
                    f"acceptance and siblings at depth {d + 1} come to {first + sum(others):.2f}; "
                    "only one child of a node can be right"
                )
        return self


class Poisson(_Strict):
    """Requests come by themselves."""

    kind: Literal["poisson"]
    per_second: Annotated[float, Field(ge=1e-6, le=1e6)]
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)]


class Levels(_Strict):
    """So many requests at a time, the next one coming when one ends."""

    kind: Literal["levels"]
    levels: Annotated[list[tuple[Tokens, Tokens]], Field(min_length=1)]
    """[concurrent requests, how many of them in all] one after the other."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Levels:
        total = sum(count for _, count in self.levels)
        if total > MOST_REQUESTS:
            raise ValueError(f"{total} requests are too many; at most {MOST_REQUESTS}")
        return self


class Recorded(_Strict):
    """Requests of a recording."""

    kind: Literal["trace"]
    requests: Annotated[
        list[tuple[Annotated[float, Field(ge=0.0)], str, Tokens, Tokens]],
        Field(min_length=1, max_length=MOST_REQUESTS),
    ]
    """[arrival in seconds, kind of work, prompt tokens, output tokens]"""


class Measured(_Strict):
    """Step times that were measured."""

    kind: Literal["measured"]
    ms: dict[Annotated[int, Field(ge=1)], dict[Annotated[int, Field(ge=0)], Milliseconds]]
    """Milliseconds by batch, then by K."""
    prefill_tokens_per_second: Annotated[float, Field(ge=0.1, le=1e9)] = 1500.0
    draft_step_ms: Annotated[float, Field(ge=0.0)] = 0.0

    @model_validator(mode="after")
    def _plain_steps(self) -> Measured:
        if not self.ms or any(0 not in row for row in self.ms.values()):
            raise ValueError("every batch needs the time of a step without drafts (K = 0)")
        return self


class Model(_Strict):
    """A dense decoder, as its configuration says."""

    parameters: Positive
    bytes_per_parameter: Positive = 2.0
    layers: Annotated[int, Field(ge=1)]
    kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)] = 128
    kv_bytes_per_element: Positive = 2.0

    def transformer(self) -> Transformer:
        """For the roofline."""
        kv = 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes_per_element
        weights = self.parameters * self.bytes_per_parameter
        return Transformer(self.parameters, weights, kv, self.layers)


class Roofline(_Strict):
    """Step times from the figures of a GPU and a model: a prediction."""

    kind: Literal["roofline"]
    gpu: str
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    model: Model
    draft: Model | None = None
    bandwidth_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75
    compute_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    overhead_ms: Annotated[float, Field(ge=0.0)] = 2.0
    all_reduce_us: Annotated[float, Field(ge=0.0)] = 12.0

    @model_validator(mode="after")
    def _it_fits(self) -> Roofline:
        if self.gpu not in GPUS:
            raise ValueError(
                f"there are no figures of '{self.gpu}'; known: {', '.join(sorted(GPUS))}"
            )
        weights = self.model.transformer().weight_bytes
        weights += self.draft.transformer().weight_bytes if self.draft else 0.0
        if weights > GPUS[self.gpu].memory * self.gpus:
            raise ValueError(
                f"weights of {weights / 1e9:.0f} GB do not fit in {self.gpus} x {self.gpu}; "
                "raise gpus or lower bytes_per_parameter"
            )
        return self


class Noise(_Strict):
    """Of the step times that the controller sees."""

    spread: Annotated[float, Field(ge=0.0, le=0.5)] = 0.03
    outliers: Share = 0.005
    outlier_factor: Annotated[float, Field(ge=1.0)] = 5.0


class Trees(_Strict):
    """Draft trees to compare with chains."""

    nodes: Annotated[
        list[Annotated[int, Field(ge=1, le=128)]], Field(min_length=1, max_length=16)
    ] = [8, 16, 32, 64]
    """Fixed sizes of trees; the largest is the most that are chosen from, too."""
    branching: Annotated[int, Field(ge=2, le=16)] = 8
    depth: Annotated[int, Field(ge=1, le=32)] = 6
    overhead: Annotated[float, Field(ge=0.0, le=2.0)] = 0.1
    """What a step with trees takes more than one with chains of as many tokens, as a share."""


class Simulation(_Strict):
    """A whole scenario file."""

    name: str
    seed: Annotated[int, Field(ge=0)] = 0
    max_k: Annotated[int, Field(ge=1, le=128)] = 16
    static_k: Annotated[list[Annotated[int, Field(ge=1, le=128)]], Field(min_length=1)] = [
        1, 2, 3, 4, 5, 6, 8, 12, 16,
    ]  # fmt: skip
    """The fixed K to compare with; those above max_k are left out."""
    max_requests: Annotated[int, Field(ge=1, le=1024)] = 32
    work: Annotated[dict[str, Work], Field(min_length=1)]
    tree: Trees | None = None
    """Unset, chains only."""
    mix: dict[str, Positive] = {}
    """Share of each kind of work; unset, all alike."""
    arrivals: Annotated[Poisson | Levels | Recorded, Field(discriminator="kind")]
    cost: Annotated[Measured | Roofline, Field(discriminator="kind")]
    noise: Noise = Noise()
    controller: ControllerConfig = ControllerConfig()

    @model_validator(mode="after")
    def _some_fixed_k(self) -> Simulation:
        if min(self.static_k) > self.max_k:
            raise ValueError(f"no K of static_k is within max_k, which is {self.max_k}")
        return self

    @model_validator(mode="after")
    def _trees_of_full_drafts(self) -> Simulation:
        if self.tree is None:
            return self
        for name, work in self.work.items():
            if work.drafted < 1.0 or work.draft_length is not None or work.shift is not None:
                raise ValueError(
                    f"work '{name}' has drafted, draft_length or shift, which trees do not know; "
                    "leave them out, or tree"
                )
        return self

    @model_validator(mode="after")
    def _names_are_known(self) -> Simulation:
        used = list(self.mix)
        if isinstance(self.arrivals, Recorded):
            used += [request[1] for request in self.arrivals.requests]
        for name in used:
            if name not in self.work:
                raise ValueError(
                    f"there is no work named '{name}'; {nearest(name, list(self.work))}"
                )
        return self

    @property
    def varying(self) -> bool:
        """Whether drafts may be shorter than allowed."""
        return any(w.drafted < 1.0 or w.draft_length is not None for w in self.work.values())

    @property
    def least_draft_steps(self) -> int:
        """Draft steps that run even at K=0: vLLM runs a draft model's first forward in every step, so
        that its KV cache keeps up."""
        return 0 if self.varying else 1

    @property
    def draft_share(self) -> float:
        """Draft step over plain step at batch 1, as the engine would guess it."""
        curve = self.curve()
        plain = curve.decode(1, 0, 0, 0)
        return (curve.decode(1, 0, 0, 1) - plain) / plain

    def curve(self) -> Curve:
        """The step times."""
        cost = self.cost
        if isinstance(cost, Measured):
            return MeasuredCurve(cost.ms, cost.prefill_tokens_per_second, cost.draft_step_ms)
        return RooflineCurve(
            GPUS[cost.gpu],
            cost.gpus,
            cost.model.transformer(),
            cost.draft.transformer() if cost.draft else None,
            cost.bandwidth_share,
            cost.compute_share,
            cost.overhead_ms / 1000,
            cost.all_reduce_us * 1e-6,
        )


def load(path: Path) -> Simulation:
    """Read and validate a scenario. Raises ConfigError, one sentence that names file, key and fix."""
    if documents.file_at(str(path)) is None:
        raise ConfigError(
            f"there is no scenario file '{clipped(str(path))}'; benchmarks/simulate/ has some."
        )
    return documents.load(path, "scenario", Simulation, _keys())


def _keys() -> list[str]:
    models = (
        Simulation,
        Trees,
        Work,
        Shift,
        Poisson,
        Levels,
        Recorded,
        Measured,
        Model,
        Roofline,
        Noise,
    )
    return sorted({name for model in models for name in model.model_fields})
