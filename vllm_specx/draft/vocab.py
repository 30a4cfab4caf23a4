"""A reduced draft vocabulary: the tokens that a draft may name, and how checkpoints write them down.

Multiplying by lm_head is most of what a draft step costs, and rare tokens are hardly ever accepted.
Two layouts are in use: vLLM's Medusa `token_map` (int64 [N], the target's ids, with
`truncated_vocab_size` = N in the configuration), and EAGLE-3's `d2t` (int64 [N], target id minus
draft id) with `t2d` (bool [V], whether the target's token is in the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.config import ConfigError

Counts = npt.NDArray[np.int64]


class VocabError(ConfigError):
    """A map that is not one; the message is one sentence."""


@dataclass(frozen=True)
class DraftVocab:
    """The draft's tokens, the most frequent first, so that any prefix is a draft vocabulary too.

    token_ids: int64 [N], distinct ids of the target.
    target_size: V, rows of the target's lm_head.
    """

    token_ids: torch.Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        if ids.dim() != 1 or ids.dtype != torch.int64 or not 1 <= len(ids) <= self.target_size:
            raise VocabError(
                f"the draft vocabulary must be 1 to {self.target_size} int64 ids, not "
                f"{ids.dtype} of shape {list(ids.shape)}."
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.target_size:
            raise VocabError(
                f"the draft vocabulary has the id {int(ids.max())}, and the target only "
                f"{self.target_size} tokens; the checkpoint was made for another target."
            )
        if len(torch.unique(ids)) != len(ids):
            raise VocabError("the draft vocabulary has the same id more than once.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def most_frequent(cls, counts: Counts, size: int) -> DraftVocab:
        """The `size` most frequent tokens; counts: int64 [V]. Equal counts by id."""
        if not 1 <= size <= len(counts):
            raise VocabError(
                f"a draft vocabulary of {size} tokens cannot be taken from {len(counts)}."
            )
        order = np.argsort(-counts, kind="stable")[:size]
        return cls(torch.from_numpy(order.astype(np.int64)), len(counts))

    @classmethod
    def from_d2t(cls, d2t: torch.Tensor, target_size: int) -> DraftVocab:
        """From EAGLE-3's offsets, int64 [N]."""
        return cls(d2t.to(torch.int64) + torch.arange(len(d2t)), target_size)

    def truncated(self, size: int) -> DraftVocab:
        """The first `size` tokens of it."""
        if not 1 <= size <= len(self):
            raise VocabError(
                f"vocab is {size}, but the checkpoint's draft vocabulary has {len(self)} tokens; "
                "choose at most that many."
            )
        return DraftVocab(self.token_ids[:size], self.target_size)

    def sorted(self) -> DraftVocab:
        """The same tokens by id, as EAGLE-3 checkpoints have them."""
        return DraftVocab(self.token_ids.sort().values, self.target_size)

    def token_map(self) -> dict[str, torch.Tensor]:
        """vLLM's Medusa layout."""
        return {"token_map": self.token_ids}

    def d2t(self) -> dict[str, torch.Tensor]:
        """EAGLE-3's layout."""
        t2d = torch.zeros(self.target_size, dtype=torch.bool)
        t2d[self.token_ids] = True
        return {"d2t": self.token_ids - torch.arange(len(self)), "t2d": t2d}

    def coverage(self, tokens: npt.NDArray[np.integer]) -> float:
        """Share of `tokens` (target ids) that the draft can name."""
        if not len(tokens):
            return 0.0
        known = np.zeros(self.target_size, bool)
        known[self.token_ids.numpy()] = True
        return float(known[tokens].mean())


def count_tokens(texts: Iterable[npt.NDArray[np.integer]], target_size: int) -> Counts:
    """How often each token occurs: int64 [V]."""
    counts = np.zeros(target_size, np.int64)
    for tokens in texts:
        counts += np.bincount(tokens, minlength=target_size)[:target_size]
    return counts
