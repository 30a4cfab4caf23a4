"""Whose entries are in a draft's cache, and who gives way when it is full."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_specx.draft.paged_cache import PagedCache, Sequence


@dataclass(slots=True, eq=False)
class Holder:
    """A request. sequence: its entries in pages. acceptance: tokens accepted a draft, recently. lost: its
    pages were needed elsewhere."""

    age: int
    acceptance: float
    sequence: Sequence = field(default_factory=Sequence)
    lost: bool = False

    def forget_waiting(self) -> None:
        """Whatever is not in pages yet is of no use."""


H = TypeVar("H", bound=Holder)


class Holders(ABC, Generic[H]):
    """All requests. cache: where their entries are."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._requests: dict[str, H] = {}
        self._usual = 1.0
        self._seen = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[H]:
        return iter(self._requests.values())

    @abstractmethod
    def new(self, age: int, acceptance: float, sequence: Sequence) -> H:
        """A request that is seen for the first time."""

    def holder(self, name: str, key: str | None = "") -> H | None:
        """The request. key: with whom it shares pages (paged_cache.Sequence). None: it has lost its pages
        and the cache is still full, so it is without drafts."""
        request = self._requests.get(name)
        if request is None:
            request = self.new(self._seen, self._usual, Sequence(key=key))
            self._requests[name] = request
            self._seen += 1
        if request.lost:
            if self._cache.available < max(1, self._cache.pages // 8):
                return None
            request.lost = False
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

    def make_room(self, request: H, end: int) -> bool:
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

    def _lose(self, request: H) -> None:
        self._cache.free(request.sequence)
        request.forget_waiting()
        request.lost = True
