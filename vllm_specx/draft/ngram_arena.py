"""Memory for the per-request indexes: one block of power-of-two pieces that grows by need."""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.ngram_kernels import IntArray

SMALLEST = 256


class Arena:
    """Buddy allocation (Knuth, TAOCP 1, 2.5) of token places and their index entries.

    tokens: int32 [size]; prev: int32 [size, levels]; head: int32 [size * levels];
    counts: int32 [size]. A piece of
    `capacity` places from `offset` on owns tokens[offset:offset + capacity] and the same share of
    the others. Growing replaces the arrays, so take them afresh after `allocate`.
    """

    def __init__(self, levels: int, size: int = 1 << 15) -> None:
        self.levels = levels
        self.size = 0
        self.tokens: IntArray = np.empty(0, np.int32)
        self.prev: IntArray = np.empty((0, levels), np.int32)
        self.head: IntArray = np.empty(0, np.int32)
        self.counts: IntArray = np.empty(0, np.int32)
        self._free: dict[int, set[int]] = {}
        self._grow(size)

    @staticmethod
    def capacity_for(length: int) -> int:
        """The piece that holds `length` tokens and an eighth more."""
        return max(SMALLEST, 1 << (length + length // 8).bit_length())

    def allocate(self, capacity: int) -> int:
        """The offset of a free piece; capacity is a power of two, at least SMALLEST."""
        while True:
            piece = capacity
            while piece <= self.size and not self._free.get(piece):
                piece *= 2
            if piece <= self.size:
                break
            self._grow(max(2 * self.size, capacity))
        offset = self._free[piece].pop()
        while piece > capacity:
            piece //= 2
            self._free.setdefault(piece, set()).add(offset + piece)
        return offset

    def release(self, offset: int, capacity: int) -> None:
        """Give a piece back; it merges with its free neighbours."""
        while capacity < self.size:
            buddy = offset ^ capacity
            free = self._free.setdefault(capacity, set())
            if buddy not in free:
                break
            free.remove(buddy)
            offset = min(offset, buddy)
            capacity *= 2
        self._free.setdefault(capacity, set()).add(offset)

    def _grow(self, size: int) -> None:
        old = self.size
        tokens = np.empty(size, np.int32)
        prev = np.empty((size, self.levels), np.int32)
        head = np.empty(size * self.levels, np.int32)
        counts = np.empty(size, np.int32)
        tokens[:old] = self.tokens
        prev[:old] = self.prev
        head[: old * self.levels] = self.head
        counts[:old] = self.counts
        self.tokens, self.prev, self.head, self.counts = tokens, prev, head, counts
        self.size = size
        if old == 0:
            self.release(0, size)
            return
        while old < size:
            self.release(old, old)
            old *= 2
