"""The n-gram index of Model Runner V2 in PyTorch: what ngram_kernels.py must compute, said plainly.

For each request slot and each of a few window lengths n there is a table of hashed windows. Its entry is
the largest place p, n <= p < length, such that tokens[p - n : p] has that hash: where the most recent
text after such a window begins. 0: none. An entry is believed only after its tokens were compared, so a
collision, or a token that a request took back, costs a draft and never makes a wrong match.

Memory is what it is from the start: 4 bytes * slots * windows for each request that may run.
"""

from __future__ import annotations

import torch

MULTIPLIER = 0x5BD1E995
MASK = 0xFFFFFFFF
MOST_SLOTS = 1 << 14
WINDOWS = (1, 2, 4, 8, 16)
"""Window lengths, as far as min_match and max_match let them."""


def windows(min_match: int, max_match: int) -> list[int]:
    """Ascending; the first is min_match."""
    return [min_match, *(n for n in WINDOWS if min_match < n <= max_match)]


def slots_for(max_model_len: int) -> int:
    """Of a table: a power of two, all places of a request, up to MOST_SLOTS."""
    return min(1 << max(max_model_len - 1, 15).bit_length(), MOST_SLOTS)


def slot_of(window: torch.Tensor, slots: int) -> torch.Tensor:
    """int64 [...]: the slot of each window, int [..., n], by a multiplicative hash of 32 bits."""
    hashed = torch.zeros(window.shape[:-1], dtype=torch.int64, device=window.device)
    for j in range(window.shape[-1]):
        hashed = ((hashed ^ (window[..., j].long() & MASK)) * MULTIPLIER) & MASK
        hashed = hashed ^ (hashed >> 15)
    return hashed & (slots - 1)


def insert(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    indexed: torch.Tensor,
    table: torch.Tensor,
    sizes: list[int],
) -> None:
    """Index what each request has said since it was indexed last, its last token excepted.

    tokens: int32 [R, L]; lengths: int32 [R]; rows: int64 [B], distinct; indexed: int32 [R], places up to
    which a row is in the table (updated); table: int32 [R, windows, slots]; sizes: the window lengths.
    """
    for row in rows.tolist():
        last = int(lengths[row]) - 1
        for level, n in enumerate(sizes):
            for place in range(max(int(indexed[row]) + 1, n), last + 1):
                slot = slot_of(tokens[row, place - n : place], table.shape[2])
                table[row, level, slot] = torch.maximum(
                    table[row, level, slot], torch.tensor(place, dtype=torch.int32)
                )
        indexed[row] = max(last, 0)


def look_up(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    sizes: list[int],
    longest: int,
    drafts: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Draft what followed the longest match of each request's end, the most recent of equals.

    longest: matches count as this long at most. drafts: int64 [B, K], overwritten where there is a match:
    slot k holds the k-th token after it, where the text ends the match begins again (it has then become
    periodic); ids outside the vocabulary are left as they were. Others as in insert(). Returns int32 [B],
    the length of each match, 0 without.
    """
    matched = torch.zeros(len(rows), dtype=torch.int32)
    for i, row in enumerate(rows.tolist()):
        length, best = int(lengths[row]), (0, 0)
        text = tokens[row]
        for level, n in enumerate(sizes):
            if length < n:
                continue
            place = int(table[row, level, slot_of(text[length - n : length], table.shape[2])])
            if not n <= place < length:
                continue
            match = 0
            while (
                match < min(longest, place) and text[place - 1 - match] == text[length - 1 - match]
            ):
                match += 1
            if match >= n:
                best = max(best, (match, place))
        matched[i] = best[0]
        if best[0]:
            for k in range(drafts.shape[1]):
                token = int(text[best[1] + k % (length - best[1])])
                if 0 <= token < vocab_size:
                    drafts[i, k] = token
    return matched
