"""The memory that requests share: a ring of finished outputs with one n-gram index over it."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from vllm_specx.draft.ngram_kernels import (
    BARRIER,
    DOC_END,
    DOC_FIELDS,
    DOC_MASK,
    DOC_OUTPUT,
    DOC_POOL,
    DOC_USED,
    END,
    HEAD_MASK,
    INDEXED,
    POOL_FIELDS,
    POOL_MASK,
    TAIL,
    IntArray,
    LongArray,
    Shared,
    index_pool,
)

SHORTEST = 4
"""Outputs of fewer tokens are not worth a document."""
_RESCUES = 16
_LAST_POSITION = 2**31 - 2**29


@dataclass(slots=True)
class _Document:
    number: int
    start: int
    length: int
    pool: int
    key: tuple[int, bytes]


@dataclass(slots=True)
class _Name:
    id: int
    users: int = 0


class Pool:
    """Documents of all named pools, at most max_tokens of them, the oldest unused leaving first.

    A document is a barrier, the last tokens of a prompt and the output that followed them; only the
    output is ever drafted. Which pool a document belongs to is part of the index, and checked at
    every candidate. A document whose drafts came true, or that came again, since it was last
    written is written anew when its turn to leave comes (second chance; Corbato, 1968).
    """

    def __init__(self, max_tokens: int, levels: LongArray) -> None:
        self.max_tokens = max_tokens
        self.levels = levels
        places = 1 << (max_tokens - 1).bit_length()
        documents = max(16, places // 32)
        state = np.zeros(POOL_FIELDS, np.int64)
        state[POOL_MASK] = places - 1
        state[HEAD_MASK] = places - 1
        state[DOC_MASK] = documents - 1
        # np.zeros is lazy: memory is taken as the pool fills.
        self.arrays = Shared(
            state=state,
            tokens=np.zeros(places, np.int32),
            document=np.zeros(places, np.int32),
            prev=np.zeros((places, len(levels)), np.int32),
            head=np.zeros((len(levels), places), np.int32),
            documents=np.zeros((documents, DOC_FIELDS), np.int64),
        )
        self._documents: deque[_Document] = deque()
        self._by_key: dict[tuple[int, bytes], _Document] = {}
        self._names: dict[str, _Name] = {}
        self._by_id: dict[int, str] = {}
        self._next_name = 0
        self._next_document = 0
        self._used_tokens = 0
        self._clear()

    def __len__(self) -> int:
        """Documents held."""
        return len(self._documents)

    @property
    def used_tokens(self) -> int:
        """Tokens held, barriers included."""
        return self._used_tokens

    @property
    def names(self) -> int:
        """Pools that hold a document or a live request."""
        return len(self._names)

    def join(self, name: str) -> int:
        """The id of a pool for a request that will `leave` it."""
        entry = self._names.get(name)
        if entry is None:
            entry = self._names[name] = _Name(self._next_name)
            self._by_id[entry.id] = name
            self._next_name += 1
        entry.users += 1
        return entry.id

    def leave(self, pool: int) -> None:
        """Undo one `join`; a pool with neither requests nor documents is forgotten."""
        name = self._by_id[pool]
        entry = self._names[name]
        entry.users -= 1
        if entry.users == 0:
            del self._names[name], self._by_id[pool]

    def add(self, pool: int, tail: IntArray, output: IntArray) -> None:
        """Remember int32 output tokens that followed the int32 tail of a prompt."""
        room = self.max_tokens // 2
        output = output[: max(0, room - len(tail) - 1)]
        if len(output) < SHORTEST:
            return
        content = tail.tobytes() + BARRIER.tobytes() + output.tobytes()
        key = (pool, hashlib.blake2b(content, digest_size=16).digest())
        known = self._by_key.get(key)
        if known is not None:
            self.arrays.documents[known.number & self.arrays.state[DOC_MASK], DOC_USED] = 1
            return
        if self.arrays.state[END] > _LAST_POSITION:
            self._clear()
        length = 1 + len(tail) + len(output)
        self._make_room(length)
        self._by_id[pool]  # a pool that nobody joined is a mistake of the caller
        self._names[self._by_id[pool]].users += 1
        body = np.concatenate([np.array([BARRIER]), tail, output]).astype(np.int32)
        self._write(body, 1 + len(tail), pool, key)

    def index(self, quota: int) -> None:
        """Index up to `quota` tokens that were added and are not yet found."""
        state = self.arrays.state
        if state[INDEXED] < state[END]:
            index_pool(self.arrays, quota, self.levels)

    def _make_room(self, length: int) -> None:
        state, documents = self.arrays.state, self.arrays.documents
        rescues = _RESCUES
        while (
            self._used_tokens + length > self.max_tokens or len(self._documents) >= state[DOC_MASK]
        ):
            oldest = self._documents.popleft()
            fields = documents[oldest.number & state[DOC_MASK]]
            used, output = fields[DOC_USED], int(fields[DOC_OUTPUT]) - oldest.start
            self._used_tokens -= oldest.length
            if used and rescues and len(self._documents) > 1:
                rescues -= 1
                body = self._read(oldest.start, oldest.length)
                self._advance_tail()
                self._write(body, output, oldest.pool, oldest.key)
            else:
                self._by_key.pop(oldest.key, None)
                self._advance_tail()
                self.leave(oldest.pool)

    def _advance_tail(self) -> None:
        state = self.arrays.state
        state[TAIL] = self._documents[0].start if self._documents else state[END]

    def _read(self, start: int, length: int) -> IntArray:
        places = np.arange(start, start + length) & self.arrays.state[POOL_MASK]
        body: IntArray = self.arrays.tokens[places]
        return body

    def _write(self, body: IntArray, output: int, pool: int, key: tuple[int, bytes]) -> None:
        arrays = self.arrays
        state = arrays.state
        start = int(state[END])
        number = self._next_document
        self._next_document += 1
        slot = number & int(state[DOC_MASK])
        places = np.arange(start, start + len(body)) & state[POOL_MASK]
        arrays.tokens[places] = body
        arrays.document[places] = slot
        arrays.documents[slot, DOC_OUTPUT] = start + output
        arrays.documents[slot, DOC_END] = start + len(body)
        arrays.documents[slot, DOC_POOL] = pool
        arrays.documents[slot, DOC_USED] = 0
        document = _Document(number, start, len(body), pool, key)
        self._documents.append(document)
        self._by_key[key] = document
        self._used_tokens += len(body)
        # One place past the end is a barrier too, so that no continuation runs out of the ring.
        state[END] = start + len(body)
        arrays.tokens[state[END] & state[POOL_MASK]] = BARRIER
        if len(self._documents) == 1:
            state[TAIL] = start

    def _clear(self) -> None:
        state = self.arrays.state
        for document in self._documents:
            self.leave(document.pool)
        self._documents.clear()
        self._by_key.clear()
        self._used_tokens = 0
        self.arrays.head[:] = 0
        state[TAIL] = state[END] = state[INDEXED] = 1
