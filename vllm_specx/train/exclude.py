"""Conversations that are left out of training, as they share a passage with the prompts of a test."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_specx.train.dataset import Corpus
from vllm_specx.train.errors import TrainError
from vllm_specx.train.prompts import from_files


@dataclass(frozen=True)
class Excluded:
    """conversations: numbers in the corpus; files: whose prompts these are, name by content's digest."""

    conversations: frozenset[int] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)

    def require_same(self, noted: Mapping[str, str], state: Path) -> None:
        """Raise TrainError if a run began with other files: what it has trained on would be tested.

        noted: its `files`; state: where they are noted.
        """
        missing = {digest: name for digest, name in noted.items() if digest not in self.files}
        added = {digest: name for digest, name in self.files.items() if digest not in noted}
        if not missing and not added:
            return
        name = next(iter({**missing, **added}.values()))
        what = "is missing now" if missing else "was not among them"
        if name in missing.values() and name in added.values():
            what = "has changed since"
        raise TrainError(
            f"{state} is of a run with other files to --exclude ({name} {what}); give the same ones or "
            "use another --out."
        )


def excluded(corpus: Corpus, files: Sequence[Path], target: str) -> Excluded:
    """What shares a passage with the prompts in `files`, JSONL as prompts.from_files reads it.

    target: whose tokenizer it is. Raises TrainError if a file cannot be read.
    """
    if not files:
        return Excluded()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = []
    for prompt in from_files(files):
        texts += [text for _, text in prompt.messages] + (
            [prompt.follow_up] if prompt.follow_up else []
        )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    named = {hashlib.sha256(path.read_bytes()).hexdigest()[:16]: path.name for path in files}
    return Excluded(frozenset(corpus.containing(ids)), named)
