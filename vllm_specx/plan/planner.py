"""A plan: how fast a pairing can be on some GPUs, whether it fits, and how much context it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.plan import gpus
from vllm_specx.plan.curves import Curve, MeasuredCurve, RooflineCurve, Transformer
from vllm_specx.plan.drafts import Draft
from vllm_specx.plan.facts import ModelFacts
from vllm_specx.plan.formula import memory_bound_step
from vllm_specx.plan.memory import Budget, budget
from vllm_specx.plan.pairing import Pairing
from vllm_specx.plan.pairing import pairing as look_at
from vllm_specx.plan.parallel import possible_ranks, refusal
from vllm_specx.plan.speed import Speed, speed

GPU = "A100-80GB"
"""Planned for where nothing names another."""
CONTEXT = 8192
MOST_SHOWN = 8
ACCEPTANCE = {
    "code": 0.80,
    "tool_calling": 0.76,
    "reasoning": 0.61,
    "creative": 0.37,
    "mixed": 0.65,
}
"""By the recipe's scenario: the middle of what is published for it, of no draft in particular."""
UNKNOWN = 0.70
AUTO_DEPTH = 4
"""config.AutoConfig.depth: tokens that the trained draft of specx:auto is asked for."""
LARGE = 70 * 2**30


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said; None: not. gamma: of a draft step over a plain one. step_ms: measured
    milliseconds of the target's step, by K draft tokens of every request, 0 among them."""

    gpu: str | None = None
    acceptance: tuple[float, ...] | None = None
    gamma: float | None = None
    batch: int = 1
    context: int | None = None
    step_ms: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """longest: of a request, by the server's flags. acceptance_from, gamma_from: where these figures come from, in words. floor: seconds that reading
    what a step reads takes at the data sheet's bandwidth. notes: what was assumed."""

    pairing: Pairing
    target: ModelFacts
    draft: Draft
    gpu: str
    count: int
    batch: int
    context: int
    acceptance: tuple[float, ...]
    acceptance_from: str
    gamma_from: str
    floor: float
    speed: Speed
    memory: Budget
    longest: int
    notes: tuple[str, ...]

    @property
    def largest_context(self) -> int:
        """Tokens that each of the requests asked for may have."""
        return min(self.longest, self.memory.largest_context(self.batch))

    @property
    def fits(self) -> bool:
        """Whether the models, and the requests that are asked for, fit."""
        return self.memory.fits(self.batch, self.context)


def plan(pairing: Pairing, asked: Asked, *, download: bool = True) -> Plan:
    """Raises ConfigError: one sentence."""
    target = pairing.target(download=download)
    if (refused := refusal(target, pairing.ranks)) is not None:
        listed = ", ".join(map(str, possible_ranks(target)))
        raise ConfigError(f"{refused}; plan for {listed} GPUs.")
    name, notes = _gpu(pairing, asked.gpu)
    gpu = gpus.GPUS[name]
    large = gpu.memory >= LARGE and not name.startswith("A100")
    draft = pairing.draft(target, large=large, download=download)
    notes += draft.assumed
    acceptance, acceptance_from = _acceptance(pairing, draft, asked)
    limit = pairing.max_model_len(target)
    context = min(CONTEXT, limit) if asked.context is None else asked.context
    if context > limit:
        raise ConfigError(
            f"--context is {context}, but requests have at most {limit} tokens here; choose at most that, "
            "or raise serve.max-model-len in the recipe."
        )
    most = _most(pairing, draft)
    drafting, gamma_from = _drafting(draft, target, pairing, asked, most, asked.batch * context)
    curve = _curve(target, pairing, gpu, asked)
    found = speed(
        acceptance,
        drafting,
        curve,
        batch=asked.batch,
        context=context,
        measured=asked.step_ms is not None,
    )
    read = target.read_bytes / pairing.ranks / pairing.stages
    return Plan(
        pairing=pairing,
        target=target,
        draft=draft,
        gpu=name,
        count=pairing.ranks * pairing.stages,
        batch=asked.batch,
        context=context,
        acceptance=acceptance,
        acceptance_from=acceptance_from,
        gamma_from=gamma_from,
        floor=memory_bound_step(read, gpu.bandwidth) * pairing.stages,
        speed=found,
        memory=budget(target, draft, gpu.memory, pairing.use(large=large)),
        longest=limit,
        notes=(*notes, *_said(pairing, target)),
    )


def on_gpus(pairing: Pairing, count: int | None) -> Pairing:
    """The pairing on so many GPUs: with the recipe's flags for them, if it has any, else with as many
    tensor-parallel ranks."""
    if count is None or count == pairing.ranks * pairing.stages:
        return pairing
    recipe = pairing.recipe
    if count in recipe.gpus:
        changed = recipe.on_gpus(count)
    else:
        changed = recipe.with_flags({"tensor-parallel-size": count, "pipeline-parallel-size": 1})
    return look_at(changed, pairing.folders)


def _gpu(pairing: Pairing, said: str | None) -> tuple[str, tuple[str, ...]]:
    if said is not None:
        return gpus.find(said), ()
    hardware = pairing.recipe.hardware
    for text in (*hardware.planned_for, *hardware.tested_on):
        if (named := gpus.mentioned(text)) is not None:
            return named, ()
    return GPU, (f"no GPU is named, so it is planned for {GPU}; --gpu names another",)


def _acceptance(pairing: Pairing, draft: Draft, asked: Asked) -> tuple[tuple[float, ...], str]:
    if asked.acceptance is not None:
        return asked.acceptance, "as asked"
    if draft.acceptance:
        return draft.acceptance, "by depth, as the draft's checkpoint says of its training"
    scenario = pairing.recipe.scenario
    if scenario in ACCEPTANCE:
        return (ACCEPTANCE[scenario],), f"assumed, usual for {scenario}; --alpha says another"
    return (UNKNOWN,), "assumed; --alpha says another"


def _most(pairing: Pairing, draft: Draft) -> int:
    if pairing.kind == "none":
        return 0
    if pairing.auto:
        depth = pairing.key("depth")
        return depth if isinstance(depth, int) else AUTO_DEPTH
    limit = MOST_SHOWN if pairing.k is None else max(MOST_SHOWN, min(pairing.k, 16))
    return limit if draft.most is None else min(limit, draft.most)


def _drafting(
    draft: Draft, target: ModelFacts, pairing: Pairing, asked: Asked, most: int, tokens: int
) -> tuple[list[float], str]:
    """Of K = 0, 1, ... draft tokens, over a plain step. tokens: of context, over all requests."""
    if asked.gamma is not None:
        return [k * asked.gamma for k in range(most + 1)], "as asked"
    if draft.kind in ("none", "ngram", "other"):
        return [0.0] * (most + 1), "drafts cost no forward"
    context = tokens * target.kv_bytes(pairing.ranks, pairing.use().kv_element)
    plain = (target.read_bytes / pairing.ranks + context) / pairing.stages
    own = tokens * (draft.kv + draft.kv_shared)
    said = (
        "estimated by the bytes that a draft step and a plain step read on one GPU, K/V with them"
    )
    return [(draft.read_bytes(k) + k * own) / plain for k in range(most + 1)], said


def _curve(target: ModelFacts, pairing: Pairing, gpu: gpus.Gpu, asked: Asked) -> Curve:
    if asked.step_ms is not None:
        return MeasuredCurve({asked.batch: dict(asked.step_ms)}, 1.0)
    kv = target.kv_bytes(pairing.ranks, pairing.use().kv_element or target.element)
    rooms = Transformer(
        parameters=target.linear_parameters + target.embedding_parameters,
        weight_bytes=target.read_bytes,
        kv_bytes=kv * pairing.ranks,
        layers=target.layers,
    )
    return RooflineCurve(gpu, pairing.ranks, rooms)


def _said(pairing: Pairing, target: ModelFacts) -> tuple[str, ...]:
    notes = []
    if "Not verified" in target.source:
        notes.append(f"the sizes of {target.name} are not verified")
    if pairing.auto:
        notes.append("specx:auto is planned as its trained draft alone; n-grams come on top")
    if pairing.kind == "ngram":
        notes.append(
            "n-grams draft only where text repeats: the speed-up is that of steps with a draft"
        )
    if pairing.kind == "other":
        notes.append(
            f"what method '{pairing.method}' costs is not known here: its drafts count as free"
        )
    if pairing.stages > 1:
        notes.append("pipeline stages run one after the other for a single stream")
    if target.quantization is not None and target.quantization.bytes_a_weight == 2.0:
        notes.append(
            f"quantization '{target.quantization.method}' is not known: two bytes a weight"
        )
    return tuple(notes)


def parse_steps(text: str) -> dict[int, float]:
    """`0:28.9,4:34.1` as milliseconds by K. Raises ConfigError."""
    steps: dict[int, float] = {}
    for part in text.split(","):
        k, colon, ms = part.partition(":")
        try:
            steps[int(k)] = float(ms)
        except ValueError:
            colon = ""
        if not colon or int(k) < 0 or not 0 < steps[int(k)] < 1e7:
            raise ConfigError(
                f"--step-ms has '{part.strip()}'; it must be K:milliseconds, as in 0:28.9,4:34.1."
            )
    if 0 not in steps:
        raise ConfigError("--step-ms needs the time of a step without drafts, as in 0:28.9,4:34.1.")
    return steps


def to_json(made: Plan) -> dict[str, Any]:
    """For machines: bytes, seconds and tokens a second."""
    memory = made.memory
    return {
        "recipe": made.pairing.recipe.name,
        "target": _of_model(made.target),
        "draft": {
            "kind": made.draft.kind,
            "name": made.draft.name,
            "bytes_a_gpu": made.draft.resident,
            "cache_bytes_a_gpu": made.draft.cache,
        },
        "gpu": made.gpu,
        "gpus": made.count,
        "batch": made.batch,
        "context": made.context,
        "predicted": True,
        "acceptance": list(made.acceptance),
        "acceptance_from": made.acceptance_from,
        "gamma": made.speed.gamma,
        "gamma_from": made.gamma_from,
        "floor_seconds": made.floor,
        "floor_tokens_per_second": 1 / made.floor,
        "shown": made.speed.shown,
        "plain_step_seconds": made.speed.plain,
        "by_k": [
            {
                "k": row.k,
                "tokens_a_step": row.tokens,
                "verify": row.verify,
                "draft": row.draft,
                "speed_up": row.speed_up,
                "tokens_per_second_a_request": row.rate,
                "break_even_acceptance": row.break_even,
            }
            for row in made.speed.rows
        ],
        "best_k": made.speed.best.k,
        "memory_a_gpu": {
            "capacity": memory.capacity,
            "usable": memory.usable,
            "target": memory.target,
            "draft": memory.draft,
            "draft_cache": memory.draft_cache,
            "activations": memory.activations,
            "runtime": memory.runtime,
            "kv_asked": memory.kv_bytes(made.batch, made.context),
            "kv_room": memory.kv_room,
            "kv_tokens": memory.kv_tokens,
        },
        "fits": made.fits,
        "largest_batch": memory.largest_batch(made.context),
        "largest_context": made.largest_context,
        "notes": list(made.notes),
    }


def _of_model(facts: ModelFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_a_token": facts.kv_bytes(),
        "quantization": None if facts.quantization is None else facts.quantization.method,
        "source": facts.source,
    }


def curves(made: Plan, ks: Sequence[int], alphas: Sequence[float]) -> dict[int, list[float]]:
    """Speed-up by K over acceptance, at this plan's costs; for a plot."""
    from vllm_specx.plan.formula import speed_up

    found = {}
    for k in ks:
        row = made.speed.at(k)
        found[k] = [speed_up(a, k, row.draft / k, row.verify) for a in alphas]
    return found
