"""Whether a draft model has the target's tokenizer: vocabulary, merges, special tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specx.doctor.finding import Finding
from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.vocabularies import draftable, read_vocabulary
from vllm_specx.messages import shown
from vllm_specx.plan.facts import ModelFacts, local_file

TOPIC = "tokenizer"


@dataclass(frozen=True, slots=True)
class _Files:
    """folder: where the tokenizer is. data: its tokenizer.json."""

    folder: Path
    data: dict[str, Any]

    @property
    def merges(self) -> list[str]:
        """In order; a pair is written as a list or, in older files, with a space."""
        model = self.data.get("model")
        merges = model.get("merges") if isinstance(model, dict) else None
        return [" ".join(m) if isinstance(m, list) else str(m) for m in merges or []]

    @property
    def special(self) -> dict[int, str]:
        """Added tokens by id."""
        added = self.data.get("added_tokens")
        return {
            token["id"]: token["content"]
            for token in added or []
            if isinstance(token, dict) and "id" in token and "content" in token
        }

    @property
    def template(self) -> str | None:
        """The chat template; None: there is none."""
        file = self.folder / "chat_template.jinja"
        try:
            return file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            pass  # most have it in tokenizer_config.json
        settings = _mapping(self.folder / "tokenizer_config.json")
        template = settings.get("chat_template")
        return template if isinstance(template, str) else None


def compare(target: ModelFacts, draft: ModelFacts, folders: Sequence[Path] = ()) -> list[Finding]:
    """By their tokenizer.json where both are here, else by models.yaml."""
    files = [_files(facts.name, folders) for facts in (target, draft)]
    missing = [f.name for f, found in zip((target, draft), files, strict=True) if found is None]
    if missing or files[0] is None or files[1] is None:
        return [_by_name(target, draft, missing)]
    return _by_files(target, draft, files[0], files[1])


def _by_name(target: ModelFacts, draft: ModelFacts, missing: list[str]) -> Finding:
    if target.tokenizer and draft.tokenizer:
        if target.tokenizer != draft.tokenizer:
            return Finding(
                "error",
                TOPIC,
                f"{draft.name} has the tokenizer of {draft.tokenizer}, and {target.name} that of "
                f"{target.tokenizer}",
                "use a draft of the target's family, or specx:ngram",
            )
        other = (
            ", with other names of some special tokens, which are not drafted"
            if target.special != draft.special
            else ""
        )
        return Finding(
            "ok",
            TOPIC,
            f"target and draft have the vocabulary of {target.tokenizer}{other} (by the committed facts: "
            f"the tokenizer of {' and '.join(missing)} is not here)",
        )
    return Finding(
        "unchecked",
        TOPIC,
        f"whether target and draft have the same tokens: the tokenizer.json of {' and '.join(missing)} is "
        "not here",
        "download the models, or name folders; vLLM compares when it starts",
    )


def _by_files(target: ModelFacts, draft: ModelFacts, ours: _Files, theirs: _Files) -> list[Finding]:
    vocabularies = read_vocabulary(ours.folder), read_vocabulary(theirs.folder)
    try:
        ids = draftable(
            *vocabularies, rows=(target.vocab, draft.vocab), names=(target.name, draft.name)
        )
    except CheckpointError as error:
        what, _, fix = str(error).rstrip(".").rpartition("; ")
        return [Finding("error", TOPIC, what, fix)]
    found = [
        Finding(
            "ok", TOPIC, f"the {ids.size - len(ids.never)} tokens below id {ids.size} are the same"
        )
    ]
    if ids.never:
        names = ", ".join(
            shown(ours.special.get(i) or theirs.special.get(i)) for i in ids.never[:3]
        )
        found.append(
            Finding(
                "note",
                "special tokens",
                f"{len(ids.never)} added tokens are not the same, such as {names}: they are never drafted",
            )
        )
    if ours.merges != theirs.merges:
        found.append(
            Finding(
                "warning",
                "merges",
                "the merges of the two tokenizers differ, so the draft was trained on other cuts of the "
                "same text and will guess less well",
                "use a draft with the target's tokenizer.json",
            )
        )
    if ours.template != theirs.template:
        found.append(
            Finding(
                "note",
                "chat template",
                "the chat templates differ: the draft reads what the target's makes of a conversation, "
                "which may cost acceptance, not correctness",
            )
        )
    return found


def _files(model: str, folders: Sequence[Path]) -> _Files | None:
    file = local_file(model, "tokenizer.json", folders)
    if file is None:
        return None
    data = _mapping(file)
    return _Files(file.parent, data) if data else None


def _mapping(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
