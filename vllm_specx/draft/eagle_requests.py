"""What an EAGLE draft knows of each request: entries in pages, and features that wait.

A request that drafts nothing must cost nearly nothing, so its states are copied as they come, and go
through fc and the layer when it drafts again or when many are waiting: in one product, together. While
hardly any request drafts (draft.resting), many waiting are not read: all but the last are forgotten.
fc is not run before that: it would make the copies a third, at the price of a product every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_specx.draft.page_holders import Holder, Holders
from vllm_specx.draft.paged_cache import Sequence
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
class Request(Holder):
    """edge: [hidden], the feature of the entry after those in pages, where an adopted page has another
    next token. kept: the target's states after that, one piece after the other."""

    edge: torch.Tensor | None = None
    kept: list[Piece] = field(default_factory=list)
    waiting: int = 0

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

    def forget_older(self, count: int) -> None:
        """Only the last `count` of what waits is kept, and nothing of what was before it."""
        self.edge = None
        while self.waiting > count:
            oldest = self.kept.pop(0)
            self.waiting -= oldest.count
            if self.waiting < count:
                rest = count - self.waiting
                last = oldest.first + oldest.count - rest
                self.kept.insert(0, Piece(oldest.states, last, rest))
                self.waiting = count

    def compact(self) -> None:
        """Own the waiting rows alone, not the step's tensors that they are part of."""
        if self.kept:
            whole = torch.cat([piece.joined() for piece in self.kept])
            self.kept = [Piece((whole,), 0, self.waiting)]


class Requests(Holders[Request]):
    """All requests. cache: where their entries are."""

    def new(self, age: int, acceptance: float, sequence: Sequence) -> Request:
        return Request(age, acceptance, sequence)

    def follow(
        self, name: str, position: int, tokens: IntArray, key: str | None = ""
    ) -> Request | None:
        """The request, with all it knows ending at `position`, whose feature comes next.

        tokens: those of the request, at least up to the one after `position`. key: with whom it
        shares pages (paged_cache.Sequence). None: the cache is full, and it is without drafts.
        """
        request = self.holder(name, key)
        if request is None:
            return None
        known = request.known
        if position > known:
            request.forget_waiting()
            request.edge = self._cache.adopt(request.sequence, tokens, position)
        elif position < known:
            self._roll_back(request, position)
        return request

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
