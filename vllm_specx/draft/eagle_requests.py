"""What an EAGLE draft knows of each request: entries in pages, and features that wait.

A request that drafts nothing must cost nearly nothing, so its states are copied as they come, and go
through fc and the layer when it drafts again or when many are waiting: in one product, together.
fc is not run before that: it would make the copies a third, at the price of a product every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vllm_specx.draft.paged_cache import PagedCache, Sequence
from vllm_specx.draft.tree import IntArray

States = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, first + count) of some states."""

    states: States
    first: int
    count: int

    def joined(self) -> torch.Tensor:
        """[count, sum of sizes]."""
        parts = [state[self.first : self.first + self.count] for state in self.states]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(slots=True, eq=False)
class Request:
    """sequence: the entries in pages. edge: [hidden], the feature of the entry after them, where an
    adopted page has another next token. kept: the target's states after that, one piece after the
    other. acceptance: tokens accepted a draft, recently. lost: its pages were needed elsewhere."""

    age: int
    acceptance: float
    sequence: Sequence = field(default_factory=Sequence)
    edge: torch.Tensor | None = None
    kept: list[Piece] = field(default_factory=list)
    waiting: int = 0
    lost: bool = False

    @property
    def known(self) -> int:
        """The position after the last one whose feature is known."""
        return self.sequence.end + (self.edge is not None) + self.waiting

    def keep(self, piece: Piece) -> None:
        """One more piece, which is the request's own (a copy of what the target gave)."""
        self.kept.append(piece)
        self.waiting += piece.count

    def forget_waiting(self) -> None:
        """Nothing waits: it is in pages now, or of no use."""
        self.edge, self.waiting = None, 0
        self.kept = []

    def compact(self) -> None:
        """Own the waiting rows alone, not the step's tensors that they are part of."""
        if self.kept:
            whole = torch.cat([piece.joined() for piece in self.kept])
            self.kept = [Piece((whole,), 0, self.waiting)]


class Requests:
    """All requests, and who gives way when the cache is full. cache: where their entries are."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._requests: dict[str, Request] = {}
        self._usual = 1.0
        self._seen = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def follow(
        self, name: str, position: int, tokens: IntArray, key: str | None = ""
    ) -> Request | None:
        """The request, with all it knows ending at `position`, whose feature comes next.

        tokens: those of the request, at least up to the one after `position`. key: with whom it
        shares pages (paged_cache.Sequence). None: the cache is full, and it is without drafts.
        """
        request = self._requests.get(name)
        if request is None:
            request = Request(self._seen, self._usual, Sequence(key=key))
            self._requests[name] = request
            self._seen += 1
        if request.lost:
            if self._cache.available < max(1, self._cache.pages // 8):
                return None
            request.lost = False
        known = request.known
        if position > known:
            request.forget_waiting()
            request.edge = self._cache.adopt(request.sequence, tokens, position)
        elif position < known:
            self._roll_back(request, position)
        return request

    def judge(self, name: str, right: int) -> None:
        """A draft of the request had `right` tokens right."""
        self._usual += 0.01 * (right - self._usual)
        if (request := self._requests.get(name)) is not None:
            request.acceptance += 0.1 * (right - request.acceptance)

    def drop(self, name: str) -> None:
        """The request has ended."""
        if (request := self._requests.pop(name, None)) is not None:
            self._cache.free(request.sequence)

    def clear(self) -> None:
        """Nothing is known of any request, nor is anything in the cache."""
        self._requests.clear()
        self._cache.clear()

    def make_room(self, request: Request, end: int) -> bool:
        """Give the request pages up to `end`; False if it has lost what it had.

        Where even the pages that only wait to be found again are not enough, the request with the
        lowest acceptance gives way, the youngest first among equals.
        """
        missing = self._cache.missing(request.sequence, end)
        if missing + len(request.sequence.pages) > self._cache.pages:
            self._lose(request)
        while not request.lost and self._cache.available < missing:
            holders = [r for r in self if r.sequence.pages or r is request]
            self._lose(min(holders, key=lambda r: (r.acceptance, -r.age)))
        if request.lost:
            return False
        self._cache.extend(request.sequence, end)
        return True

    def _lose(self, request: Request) -> None:
        self._cache.free(request.sequence)
        request.forget_waiting()
        request.lost = True

    def _roll_back(self, request: Request, position: int) -> None:
        waiting = position - request.sequence.end - (request.edge is not None)
        if waiting >= 0:
            while request.waiting > waiting:
                last = request.kept.pop()
                request.waiting -= last.count
                if request.waiting < waiting:
                    request.keep(Piece(last.states, last.first, waiting - request.waiting))
            return
        request.forget_waiting()
        if position < request.sequence.end:
            self._cache.truncate(request.sequence, position)
