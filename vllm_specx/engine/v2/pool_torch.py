"""The memory that requests share on Model Runner V2, in PyTorch: what pool_kernels.py must compute.

A ring of tokens holds documents: a barrier, the last tokens of a prompt, the output that followed them,
a barrier. Places are counted from the start and never again; place & (size - 1) is where one lies, and
what is older than the ring is long is forgotten, whole documents or the beginning of one. For each window
length there is one table of hashed windows, whose entry is the latest place that followed such a window.
An entry is believed only after tokens and owner were compared, so a collision costs a draft and shows
nobody another owner's text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from vllm_specx.engine.v2.ngram_torch import MASK, MULTIPLIER

BARRIER = -1
"""Between documents; no token."""
SHORTEST = 4
"""Outputs of fewer tokens are not worth a document (as draft/ngram_pool.py)."""
NOBODY = 0
"""The owner of what is not shared."""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """P, a power of two, tokens; W window lengths; about 12 + 8 W bytes a token.

    tokens: int32 [P]; owners: int64 [P], of each token; end: int64 [1], places written; grown: int64 [1],
    places that the document which is being written takes; table: int64 [W, P].
    """

    tokens: torch.Tensor
    owners: torch.Tensor
    end: torch.Tensor
    grown: torch.Tensor
    table: torch.Tensor

    @classmethod
    def empty(cls, max_tokens: int, windows: int, device: torch.device) -> DevicePool:
        """Of at most max_tokens tokens, a power of two of them."""
        size = 1 << (max_tokens.bit_length() - 1)
        with torch.device(device):
            return cls(
                torch.full((size,), BARRIER, dtype=torch.int32),
                torch.zeros(size, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(windows, size, dtype=torch.int64),
            )

    @property
    def bytes(self) -> int:
        """Of device memory."""
        return self.tokens.nbytes + self.owners.nbytes + self.table.nbytes


def owner_of(pool: str | None) -> int:
    """The int64 that stands for a pool's name; None shares nothing. Of 2**64, so that names of others
    cannot be met on purpose."""
    if pool is None:
        return NOBODY
    digest = hashlib.blake2b(pool.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def slot_of(window: list[int], owner: int, size: int) -> int:
    """Of the table, by a multiplicative hash of 32 bits that begins with the owner's."""
    hashed = owner & MASK
    for token in window:
        hashed = ((hashed ^ (token & MASK)) * MULTIPLIER) & MASK
        hashed ^= hashed >> 15
    return hashed & (size - 1)


def document(length: int, prompt: int, tail: int, size: int) -> tuple[int, int, int]:
    """Of a request of `length` tokens, `prompt` of them given: (its first token that is kept, how many of
    the prompt, how many of the output); the last is 0 where it is not worth keeping."""
    before = min(prompt, tail)
    output = min(length - prompt, size // 2 - before - 1)
    return prompt - before, before, output if output >= SHORTEST else 0


def append(
    pool: DevicePool,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    row: int,
    owner: int,
    sizes: list[int],
    tail: int,
) -> None:
    """Remember the output of a request that has ended.

    tokens: int32 [R, L]; lengths, prompts: int32 [R], tokens of each row, and how many were given; row:
    the request's; owner: of what it said; sizes: the window lengths; tail: tokens of the prompt that
    are kept at most.
    """
    size = len(pool.tokens)
    first, before, output = document(int(lengths[row]), int(prompts[row]), tail, size)
    if not output:
        return
    said = tokens[row, first : first + before + output].tolist()
    end = int(pool.end)
    for offset, token in enumerate([BARRIER, *said, BARRIER]):
        pool.tokens[(end + offset) & (size - 1)] = token
        pool.owners[(end + offset) & (size - 1)] = owner
    for level, n in enumerate(sizes):
        for at in range(max(before, n), before + output):
            slot = slot_of(said[at - n : at], owner, size)
            pool.table[level, slot] = max(int(pool.table[level, slot]), end + 1 + at)
    pool.end.add_(1 + before + output)


def look_up(
    pool: DevicePool,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    owners: torch.Tensor,
    sizes: list[int],
    longest: int,
    matched: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
) -> None:
    """Draft what followed a longer match than a request has found in its own text.

    tokens: int32 [R, L]; lengths: int32 [R]; rows: int64 [B]; owners: int64 [R]; matched: int32 [B], the
    lengths of the matches found so far, updated; drafts: int64 [B, K], overwritten as far as the text
    after a longer match goes, and -1 beyond. Others as in append().
    """
    size, end = len(pool.tokens), int(pool.end)
    oldest = max(end - size + 1, 0)

    def token_at(place: int) -> int:
        return int(pool.tokens[place & (size - 1)])

    for i, row in enumerate(rows.tolist()):
        owner = int(owners[row])
        if owner == NOBODY:
            continue
        length, best = int(lengths[row]), (int(matched[i]), 0)
        text = tokens[row].tolist()
        for level, n in enumerate(sizes):
            if length < n:
                continue
            place = int(pool.table[level, slot_of(text[length - n : length], owner, size)])
            if not oldest + n <= place < end or int(pool.owners[place & (size - 1)]) != owner:
                continue
            match = 0
            while (
                match < min(longest, place - oldest, length)
                and token_at(place - 1 - match) == text[length - 1 - match]
            ):
                match += 1
            if match >= n and match > best[0]:
                best = (match, place)
        if not best[1]:
            continue
        matched[i] = best[0]
        drafts[i] = -1
        for k in range(drafts.shape[1]):
            place = best[1] + k
            if place >= end or token_at(place) == BARRIER:
                break
            if 0 <= token_at(place) < vocab_size:
                drafts[i, k] = token_at(place)
