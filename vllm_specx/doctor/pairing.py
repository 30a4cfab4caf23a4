"""Whether a recipe's target, draft and flags go together, without loading or downloading anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_specx import recipes
from vllm_specx.config import ConfigError
from vllm_specx.doctor import checkpoints, tokenizers
from vllm_specx.doctor.finding import Finding
from vllm_specx.plan.drafts import NONE, Draft
from vllm_specx.plan.facts import ModelFacts
from vllm_specx.plan.pairing import Pairing, pairing
from vllm_specx.plan.parallel import possible_ranks, refusal, undivided
from vllm_specx.recipes.schema import Recipe

LARGE_DRAFT = 0.3
"""Of what a plain step reads: above it a draft step costs more than it usually brings."""


@dataclass(frozen=True, slots=True)
class _Looked:
    """target, model: the sizes of the target and of a draft model; None: unknown."""

    pairing: Pairing
    target: ModelFacts | None
    model: ModelFacts | None


def check(recipe: Recipe, folders: Sequence[Path] = ()) -> list[Finding]:
    """Everything that can be said of the pairing from what is here; files that are not here, or models
    whose sizes are not known, are said to be unchecked. folders: what the recipe's relative paths may be
    relative to, before the folder of recipes. An error among the findings: it cannot work.
    """
    seen = pairing(recipe, (*folders, recipes.folder()))
    found: list[Finding] = []
    target = _facts(seen, found, of_target=True)
    model = (
        _facts(seen, found, of_target=False) if seen.kind == "model" and seen.draft_name else None
    )
    looked = _Looked(seen, target, model)
    if target is not None:
        found += _ranks(target, seen.ranks, "tensor-parallel-size", seen.recipe.model or "")
        found += _length(looked, target)
        found += _quantization(looked, target)
    if seen.kind in ("model", "eagle", "medusa"):
        found += checkpoints.check(seen, target)
        found += _draft_context(looked)
    if seen.kind == "model" and target is not None and model is not None:
        found += _draft_model(looked, target, model)
    if seen.kind == "eagle" and seen.own and seen.stages > 1:
        found.append(
            Finding(
                "error",
                "pipeline",
                f"an EAGLE draft needs all of the target in one stage, and pipeline-parallel-size is "
                f"{seen.stages}",
                "use tensor parallelism instead",
            )
        )
    if seen.kind == "other":
        found.append(
            Finding(
                "unchecked", "method", f"method '{seen.method}', which vLLM judges when it starts"
            )
        )
    return found


def _facts(seen: Pairing, found: list[Finding], *, of_target: bool) -> ModelFacts | None:
    topic = "target" if of_target else "draft"
    try:
        facts = seen.target(download=False) if of_target else seen.draft_facts(download=False)
    except ConfigError as error:
        what, _, fix = str(error).rstrip(".").rpartition("; ")
        found.append(Finding("unchecked", topic, what or fix, fix if what else ""))
        return None
    found.append(
        Finding(
            "ok",
            topic,
            f"{facts.name}: {facts.parameters / 1e9:.2f} billion parameters in {facts.layers} layers, "
            f"{facts.heads} attention heads, {facts.kv_heads} key-value heads, {facts.vocab} rows of "
            "vocabulary",
        )
    )
    return facts


def _ranks(facts: ModelFacts, ranks: int, flag: str, name: str) -> list[Finding]:
    if (refused := refusal(facts, ranks, name)) is not None:
        listed = ", ".join(map(str, possible_ranks(facts)))
        return [Finding("error", "tensor parallelism", refused, f"set {flag} to one of {listed}")]
    group = None if facts.quantization is None else facts.quantization.group
    if group and facts.intermediate // ranks % group:
        return [
            Finding(
                "error",
                "tensor parallelism",
                f"the quantized MLP of {name} is shared by {ranks} ranks in parts of "
                f"{facts.intermediate // ranks}, which its groups of {group} do not divide",
                f"use fewer ranks for {flag}, or a checkpoint that is padded for it",
            )
        ]
    if ranks == 1:
        return []
    return [Finding("ok", "tensor parallelism", f"{name} divides by {ranks} ranks")]


def _length(looked: _Looked, target: ModelFacts) -> list[Finding]:
    seen = looked.pairing
    asked = seen.integer("max-model-len")
    scaled = {"hf-overrides", "rope-scaling"} & seen.recipe.serve.keys()
    allowed = str(seen.recipe.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "")) == "1"
    if asked is None or asked <= target.max_positions or scaled or allowed:
        return []
    return [
        Finding(
            "error",
            "context",
            f"max-model-len is {asked}, and {target.name} is made for {target.max_positions} tokens",
            "lower it, or set hf-overrides with the rotary scaling that the model's card gives",
        )
    ]


def _quantization(looked: _Looked, target: ModelFacts) -> list[Finding]:
    if target.quantization is None:
        return []
    method = target.quantization.method
    if looked.pairing.kind in ("medusa", "eagle") and looked.pairing.own:
        return [
            Finding(
                "note",
                "quantization",
                f"the target is quantized ({method}): the draft needs its lm_head and embeddings as plain "
                "matrices, which most checkpoints leave unquantized, and guesses less well if it was "
                "trained on the unquantized model",
            )
        ]
    return [Finding("ok", "quantization", f"the target is quantized ({method}), the draft is not")]


def _draft_context(looked: _Looked) -> list[Finding]:
    seen, target = looked.pairing, looked.target
    if target is None or (seen.kind == "model" and looked.model is None):
        return []
    try:
        draft: Draft = seen.draft(target, download=False)
    except ConfigError:
        return []
    longest, wanted = draft.max_positions, seen.max_model_len(target)
    if longest is None or draft.assumed or draft.kind == NONE.kind:
        return []
    if longest >= wanted:
        return [Finding("ok", "draft context", f"the draft reads as much as the server ({wanted})")]
    name = seen.draft_name
    if seen.kind == "model" or not seen.own:
        return [
            Finding(
                "warning",
                "draft context",
                f"{name} reads {longest} tokens, and max-model-len is {wanted}: longer requests are served "
                "without drafts",
                f"set max-model-len to {longest}, or take it as it is",
            )
        ]
    return [
        Finding(
            "warning",
            "draft context",
            f"{name} was made for texts of {longest} tokens, and max-model-len is {wanted}: beyond that it "
            "guesses less well, and drafts get shorter",
            "take it as it is, or train a draft for longer texts",
        )
    ]


def _draft_model(looked: _Looked, target: ModelFacts, model: ModelFacts) -> list[Finding]:
    seen = looked.pairing
    found = tokenizers.compare(target, model, seen.folders)
    found += _padding(seen, target, model)
    if model.parameters >= target.parameters:
        found.append(
            Finding(
                "error",
                "draft",
                f"the draft {model.name} has {model.parameters / 1e9:.2f} billion parameters, no fewer than "
                f"the target's {target.parameters / 1e9:.2f}",
                "use a smaller model of the target's family, of 1% to 5% of its size",
            )
        )
    else:
        found += _cost(seen, target, model)
    if seen.own:
        if undivided(model, seen.ranks):
            found.append(
                Finding(
                    "note",
                    "draft ranks",
                    f"the draft's {model.heads} attention heads and {model.kv_heads} key-value heads do not "
                    f"divide by {seen.ranks} ranks, and need not: it is whole on every rank",
                )
            )
        if model.quantization is not None:
            found.append(
                Finding(
                    "error",
                    "draft",
                    f"{model.name} is quantized ({model.quantization.method}), which specx:draft_model does "
                    "not read",
                    "use its original weights",
                )
            )
        return found
    if seen.draft_ranks != seen.ranks:
        found.append(
            Finding(
                "error",
                "draft ranks",
                f"draft_tensor_parallel_size is {seen.draft_ranks} and tensor-parallel-size {seen.ranks}, and "
                "vLLM's draft_model needs them equal",
                "leave draft_tensor_parallel_size out, or use specx:draft_model, which is whole on every rank",
            )
        )
        return found
    return found + [
        Finding(
            f.severity, "draft ranks", f.what, "use specx:draft_model, or other ranks: " + f.fix
        )
        if f.severity == "error"
        else f
        for f in _ranks(model, seen.draft_ranks, "tensor-parallel-size", f"the draft {model.name}")
    ]


def _padding(seen: Pairing, target: ModelFacts, model: ModelFacts) -> list[Finding]:
    if target.vocab == model.vocab:
        return [Finding("ok", "vocabulary", f"both have {target.vocab} rows of vocabulary")]
    rows = f"the target has {target.vocab} rows of vocabulary and the draft {model.vocab}, padding included"
    if seen.own:
        return [
            Finding(
                "note",
                "vocabulary",
                f"{rows}: specx:draft_model compares the tokens and drafts those that are the same, where "
                "vLLM's draft_model would refuse",
            )
        ]
    if not seen.with_specx:
        return [
            Finding(
                "error",
                "vocabulary",
                f"{rows}, and vLLM's draft_model needs as many",
                "write method specx:draft_model, or put 'specx: {}' beside the method if the draft has fewer",
            )
        ]
    if model.vocab > target.vocab:
        return [
            Finding(
                "error",
                "vocabulary",
                f"{rows}, and beside specx vLLM's draft_model needs as many or fewer",
                "write method specx:draft_model",
            )
        ]
    return [
        Finding(
            "note",
            "vocabulary",
            f"{rows}: beside specx vLLM's draft_model takes it, if the tokens are the same, and drafts greedily",
        )
    ]


def _cost(seen: Pairing, target: ModelFacts, model: ModelFacts) -> list[Finding]:
    draft = seen.draft(target, download=False)
    share = draft.step / (target.read_bytes / seen.ranks / seen.stages)
    if share <= LARGE_DRAFT:
        return []
    whole = "whole on every rank, it reads" if seen.own and seen.ranks > 1 else "it reads"
    stock = (
        ", or vLLM's draft_model, which shares it among the ranks"
        if seen.own and seen.ranks > 1 and target.vocab == model.vocab
        else ""
    )
    return [
        Finding(
            "warning",
            "draft",
            f"{model.name} is a dear draft: {whole} {share:.0%} of what a plain step reads on a GPU",
            f"use a smaller one{stock}",
        )
    ]
