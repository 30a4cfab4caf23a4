"""Whether a draft's checkpoint can be read and fits the target, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vllm_specx import documents
from vllm_specx.doctor.finding import Finding, Severity
from vllm_specx.draft.checkpoint_files import CheckpointError, TargetShape, kind_of_checkpoint
from vllm_specx.draft.checkpoints import load_heads
from vllm_specx.draft.draft_model_checkpoint import MODEL_TYPES, load_draft_model
from vllm_specx.draft.eagle_checkpoints import load_eagle
from vllm_specx.messages import clipped
from vllm_specx.models import embedded
from vllm_specx.plan.facts import ModelFacts, committed, is_hub_name, local_file
from vllm_specx.plan.pairing import Pairing

TOPIC = "checkpoint"


def check(pairing: Pairing, target: ModelFacts | None) -> list[Finding]:
    """Of the draft that the recipe names."""
    name = pairing.draft_name
    if not name:
        return [
            Finding(
                "error",
                TOPIC,
                f"method '{pairing.method}' needs a draft, and none is named",
                "add 'speculation.model', a folder or a hub name",
            )
        ]
    path = _path(name, pairing.folders)
    if path is None:
        return [_elsewhere(pairing, name, target)]
    if pairing.kind == "model":
        return _read(pairing, name, lambda: _draft_model(path, name))
    if target is None:
        return [Finding("unchecked", TOPIC, f"whether {name} fits a target of unknown sizes")]
    shape = TargetShape(
        target.hidden,
        target.vocab,
        torch.float32 if target.element == 4 else torch.bfloat16,
        num_layers=target.layers,
    )
    return _read(pairing, name, lambda: _heads(pairing, path, name, shape))


def _draft_model(path: Path, name: str) -> Finding:
    weights = load_draft_model(path, torch.bfloat16, values=False)
    return Finding(
        "ok",
        TOPIC,
        f"{name}: {len(weights.layers)} layers, names and shapes of all weights are right",
    )


def _heads(pairing: Pairing, path: Path, name: str, shape: TargetShape) -> Finding:
    kind = kind_of_checkpoint(path) if pairing.auto else pairing.kind
    if kind == "medusa":
        heads = load_heads(path, shape)
        return Finding("ok", TOPIC, f"{name}: {heads.depth} heads that fit the target")
    layers = pairing.key("aux_layers")
    weights = load_eagle(path, shape, aux_layers=tuple(layers) if layers else None)
    return Finding("ok", TOPIC, f"{name}: an EAGLE-{weights.version} draft that fits the target")


def _read(pairing: Pairing, name: str, read: Callable[[], Finding]) -> list[Finding]:
    try:
        return [read()]
    except CheckpointError as error:
        what, _, fix = str(error).rstrip(".").rpartition("; ")
        what, fix = (what, fix) if what else (fix, "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        what = f"{name} cannot be read ({clipped(str(error))})"
        fix = "its config.json may be damaged, copy it again"
    # vLLM's own methods may read what ours refuse.
    severity: Severity = "error" if pairing.own else "warning"
    return [Finding(severity, TOPIC, what, fix)]


def _elsewhere(pairing: Pairing, name: str, target: ModelFacts | None) -> Finding:
    """Of a draft whose weights are not here."""
    if not is_hub_name(name):
        return Finding(
            "error",
            TOPIC,
            f"there is no draft '{name}'",
            "correct 'speculation.model', a path relative to the recipe or a hub name, or train the draft "
            "first",
        )
    entry = committed().get(name, {})
    eagle = entry.get("eagle")
    if eagle is not None and target is not None:
        wanted = eagle.get("target_hidden_size") or entry["config"]["hidden_size"]
        if wanted != target.hidden or entry["config"]["vocab_size"] != target.vocab:
            return Finding(
                "error",
                TOPIC,
                f"{name} was made for a target with hidden size {wanted} and "
                f"{entry['config']['vocab_size']} tokens, and {target.name} has {target.hidden} and "
                f"{target.vocab}",
                "use a draft that was trained for this target",
            )
    kind = entry.get("config", {}).get("model_type")
    if pairing.own and pairing.kind == "model" and kind is not None and kind not in MODEL_TYPES:
        return Finding(
            "error",
            TOPIC,
            f"{name} is a model of type {kind}, and specx:draft_model reads {', '.join(MODEL_TYPES)}",
            "use a draft of one of these types, or vLLM's draft_model",
        )
    sized = " (its sizes fit, by the committed facts)" if entry else ""
    return Finding(
        "unchecked",
        TOPIC,
        f"the weights of {name}, which are not here{sized}",
        "they are read, and refused if they do not fit, when the server starts",
    )


def _path(name: str, folders: Sequence[Path]) -> Path | None:
    if embedded.is_embedded(name):
        file = local_file(name, "config.json")
        return None if file is None else file.parent
    found = documents.first_there(name, (*folders, Path.cwd()))
    if found is not None:
        return found
    cached = local_file(name, "config.json", folders)
    if cached is None or not any(cached.parent.glob("*.safetensors")):
        return None
    return cached.parent
