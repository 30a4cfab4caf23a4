"""Which tokens a draft model may draft for a target: those that mean the same to both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.messages import clipped, shown

logger = logging.getLogger(f"vllm.{__name__}")
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
"""One of them is in the folder of any tokenizer."""


@dataclass(frozen=True)
class Vocabulary:
    """tokens: by id; ids of padding are not among them. added: ids of tokens that are not part of the
    tokenizer's model, such as those of a chat template."""

    tokens: Mapping[int, str]
    added: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        """The last id with a token, plus one: the vocabulary without its padding."""
        return max(self.tokens, default=-1) + 1


@dataclass(frozen=True)
class Draftable:
    """The ids below `size`, but for those in `never`."""

    size: int
    never: tuple[int, ...] = ()


def read_vocabulary(model: str | Path, revision: str | None = None) -> Vocabulary | None:
    """Of the tokenizer in a folder or of a hub name; None: there is none that can be read."""
    file = Path(model) / "tokenizer.json"
    if Path(model).is_dir() and not any((Path(model) / name).is_file() for name in _FILES):
        return None  # transformers would make an empty one
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            ids, added = fast.get_vocab(True), fast.get_added_tokens_decoder()
        else:
            from transformers import AutoTokenizer

            slow = AutoTokenizer.from_pretrained(str(model), revision=revision)
            ids, added = slow.get_vocab(), slow.added_tokens_decoder
    except Exception as error:
        # Whatever their parsers raise: there is no tokenizer to compare with.
        logger.info("vllm_specx: no tokenizer of %s: %s", model, clipped(str(error)))
        return None
    return Vocabulary({index: token for token, index in ids.items()}, frozenset(added))


def draftable(
    target: Vocabulary | None,
    draft: Vocabulary | None,
    *,
    rows: tuple[int, int],
    names: tuple[str, str],
) -> Draftable:
    """What may be drafted. rows: tokens of the target's and of the draft's lm_head, padding included;
    names: of both, for messages.

    Padded vocabularies of one tokenizer go together (Qwen2.5 has 151936 and 152064 rows of 151665
    tokens): ids at or above the smaller one without its padding are never drafted. Nor are added tokens
    that one of them does not have or has otherwise, as variants of a model have other ones. Raises
    CheckpointError if any other token differs: one sentence that says which does first.
    """
    size = min(rows)
    if target is None or draft is None:
        logger.warning(
            "vllm_specx: %s has no tokenizer that can be read, so nothing says whether the draft has the "
            "target's vocabulary; it is taken to be the same up to id %d.",
            names[0] if target is None else names[1],
            size - 1,
        )
        return Draftable(size)
    size = min(size, target.size, draft.size)
    differ = [i for i in range(size) if target.tokens.get(i) != draft.tokens.get(i)]
    added = target.added | draft.added
    both = target.tokens.keys() & draft.tokens.keys()
    if other := [i for i in differ if i in both and i not in added]:
        i = other[0]
        raise CheckpointError(
            f"{names[1]} has another vocabulary than the target: token {i}, the first of {len(other)} "
            f"that differ, is {shown(target.tokens[i])} in the target and {shown(draft.tokens[i])} in the "
            "draft; use a draft of the target's family, or specx:ngram."
        )
    return Draftable(size, tuple(differ))
