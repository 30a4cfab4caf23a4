"""By how many tensor-parallel ranks a model can be shared, as vLLM asks for it."""

from __future__ import annotations

from vllm_specx.plan.facts import ModelFacts

RANKS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Tensor-parallel sizes that are proposed."""


def undivided(facts: ModelFacts, ranks: int) -> list[str]:
    """What does not divide by so many ranks (vllm/config/model.py, model_executor/models/llama.py);
    key-value heads fewer than ranks are copied."""
    wrong = []
    if facts.heads % ranks:
        wrong.append(f"its {facts.heads} attention heads")
    if facts.kv_heads % ranks and ranks % facts.kv_heads:
        wrong.append(f"its {facts.kv_heads} key-value heads")
    if facts.intermediate % ranks:
        wrong.append(f"its MLP of {facts.intermediate}")
    return wrong


def possible_ranks(facts: ModelFacts) -> list[int]:
    """Those of RANKS that the model divides by."""
    return [ranks for ranks in RANKS if not undivided(facts, ranks)]


def refusal(facts: ModelFacts, ranks: int, name: str = "") -> str | None:
    """Why so many ranks cannot share the model, without a fix; None: they can."""
    wrong = undivided(facts, ranks)
    if not wrong:
        return None
    return (
        f"{name or facts.name} cannot be shared by {ranks} ranks, by which {' and '.join(wrong)} do not "
        "divide"
    )
