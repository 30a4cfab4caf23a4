"""A draft's keys and values in pages: who owns which, what can be shared, what is freed first.

Only entries of committed tokens are ever stored, so what is stored of a request never has to be taken
back when a draft is rejected. A full page is registered under the hash of all tokens up to its end,
and is shared by any request of the same key that begins with them. An EAGLE draft's entry at position i
is made of the target's feature at i and of token i + 1, so a page's last entry was made with its first
owner's next token, and it is registered under that too; a draft model's is made of the tokens up to i.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_specx.draft.tree import IntArray

PAGE = 16
"""Entries in a page."""
_SEED = b"vllm_specx draft pages"


@dataclass(slots=True, eq=False)
class Sequence:
    """The entries [start, end) of one request. pages[j] holds those from (first_page + j) * PAGE.

    digests[p]: the hash of the key and of the tokens up to the end of page p, as far as computed.
    key: pages are shared among sequences of the same one; None shares nothing.
    """

    start: int = 0
    end: int = 0
    first_page: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    key: str | None = ""

    @property
    def base(self) -> int:
        """The position of the first page's first entry."""
        return self.first_page * PAGE


class PagedCache:
    """Pages of one slab: kv [layers, pages * PAGE, 2 * kv_heads, head_dim], keys above values.

    tokens: how many entries fit, rounded up to whole pages; never grows.
    feature: size of the feature that each registered page keeps of its last entry.
    looks_ahead: whether an entry depends on the token after its own.

    The caller makes sure that there is room (`available`), and frees what it no longer needs. Every
    choice depends on the calls alone, so all tensor-parallel ranks make the same ones.
    """

    def __init__(
        self,
        *,
        tokens: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        feature: int,
        dtype: torch.dtype,
        device: torch.device,
        looks_ahead: bool = True,
    ) -> None:
        self._looks_ahead = looks_ahead
        self.pages = max(1, -(-tokens // PAGE))
        self.layers = layers
        self.kv = _zeros((layers, self.pages * PAGE, 2 * kv_heads, head_dim), dtype, device)
        self.edges = _zeros((self.pages, feature), dtype, device)
        self._device = device
        self._paged = self.kv.view(layers, self.pages, -1)
        self._free = list(range(self.pages - 1, -1, -1))
        self._users = [0] * self.pages
        self._registered: dict[bytes, dict[int, int]] = {}
        self._name: dict[int, tuple[bytes, int]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Of the whole slab."""
        return self.kv.nbytes + self.edges.nbytes

    @property
    def available(self) -> int:
        """Pages that are free or that only the register still holds."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.pages - self.available

    def missing(self, sequence: Sequence, end: int) -> int:
        """Pages that must be allocated before entries up to `end` can be written."""
        return max(0, -(-end // PAGE) - sequence.first_page - len(sequence.pages))

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give the sequence pages up to `end`; needs `missing` available ones."""
        new = [self._take() for _ in range(self.missing(sequence, end))]
        if new:
            # Entries that are masked out are still multiplied by zero: they must be finite.
            self._paged.index_fill_(1, self._indices(new), 0)
            sequence.pages.extend(new)

    def free(self, sequence: Sequence) -> None:
        """Give all pages back; registered ones stay findable, the sequence's last one goes first."""
        self._release(sequence.pages)
        sequence.pages = []
        sequence.start = sequence.end = sequence.first_page = 0
        sequence.digests = []

    def clear(self) -> None:
        """Forget all pages, whoever holds them: no sequence of before may be used again."""
        self._free = list(range(self.pages - 1, -1, -1))
        self._users = [0] * self.pages
        self._registered.clear()
        self._name.clear()
        self._unused.clear()

    def restart(self, sequence: Sequence, position: int) -> None:
        """Begin again at `position`, nothing before it being known."""
        self.free(sequence)
        sequence.start = sequence.end = position
        sequence.first_page = position // PAGE

    def truncate(self, sequence: Sequence, end: int) -> None:
        """Forget the entries from `end` on. A page that others may read is not written again: if
        `end` lies inside of one, this needs a page or forgets the whole sequence."""
        if end <= sequence.start:
            self.restart(sequence, end)
            return
        sequence.end = min(end, sequence.end)
        keep = -(-sequence.end // PAGE) - sequence.first_page
        self._release(sequence.pages[keep:])
        del sequence.pages[keep:]
        del sequence.digests[sequence.end // PAGE :]
        if sequence.end % PAGE and not self._own(sequence, keep - 1):
            self.restart(sequence, end)

    def adopt(self, sequence: Sequence, tokens: IntArray, end: int) -> torch.Tensor | None:
        """Share registered pages that hold the entries before `end`, as many as there are in a row.

        sequence: an empty one. tokens: [end + 1 or more], those of the request.
        Afterwards sequence.end is `end`, or `end` - 1 if the last entry must be made again with
        this request's next token: then the answer is the feature [feature] to make it of. With
        nothing found, the sequence is as restart(end) leaves it.
        """
        self.restart(sequence, end)
        if sequence.key is None or end % PAGE or end < PAGE:
            return None
        digests = self._digests(sequence, tokens, end // PAGE)
        following = int(tokens[end])
        last = self._registered.get(digests[-1])
        if last is None:
            return None
        exact = following in last
        found = [last[following] if exact else next(iter(last.values()))]
        for p in range(len(digests) - 2, -1, -1):
            page = self._registered.get(digests[p], {}).get(int(tokens[(p + 1) * PAGE]))
            if page is None:
                break
            found.append(page)
        found.reverse()
        for page in found:
            self._hold(page)
        sequence.pages = found
        sequence.first_page = end // PAGE - len(found)
        sequence.start = sequence.base
        sequence.end = end
        if exact:
            return None
        edge = self.edges[found[-1]].clone()
        if not self._own(sequence, len(found) - 1):
            self.restart(sequence, end)
            return None
        sequence.end = end - 1
        del sequence.digests[-1:]
        return edge

    def adopt_prefix(self, sequence: Sequence, tokens: IntArray, end: int) -> None:
        """Where entries do not look ahead: share the registered pages that follow the sequence's own
        entries, as many as there are in a row before `end`.

        sequence: one that starts at 0; pages that it has beyond its end are given back for them.
        """
        if sequence.key is None or sequence.end % PAGE:
            return
        for p in range(sequence.end // PAGE, end // PAGE):
            same = self._registered.get(self._digests(sequence, tokens, p + 1)[p])
            if same is None:
                return
            (page,) = same.values()
            self._hold(page)
            if p < len(sequence.pages):
                self._release([sequence.pages[p]])
                sequence.pages[p] = page
            else:
                sequence.pages.append(page)
            sequence.end = (p + 1) * PAGE

    def register(
        self, sequence: Sequence, tokens: IntArray, end: int
    ) -> tuple[list[int], list[int]]:
        """Entries up to `end` are written: make the pages that they filled findable.

        tokens: [end or more], one more where entries look ahead. Returns the pages registered now and the positions of their last
        entries, whose features the caller stores in `edges`.
        """
        pages: list[int] = []
        positions: list[int] = []
        begin = max(sequence.end // PAGE, -(-sequence.start // PAGE))
        sequence.end = end
        if sequence.key is None or end // PAGE <= begin:
            return pages, positions
        # Above the first layer, an entry depends on all entries before it.
        if sequence.start and self.layers > 1:
            return pages, positions
        digests = self._digests(sequence, tokens, end // PAGE)
        for p in range(begin, end // PAGE):
            place = p - sequence.first_page
            page = sequence.pages[place]
            following = int(tokens[(p + 1) * PAGE]) if self._looks_ahead else 0
            same = self._registered.setdefault(digests[p], {})
            if (other := same.get(following)) is not None:
                if other != page:
                    self._hold(other)
                    self._release([page])
                    sequence.pages[place] = other
                continue
            same[following] = page
            self._name[page] = (digests[p], following)
            pages.append(page)
            positions.append((p + 1) * PAGE - 1)
        return pages, positions

    def _own(self, sequence: Sequence, place: int) -> bool:
        """Make a page of the sequence one that only it can see, by a copy if need be."""
        page = sequence.pages[place]
        if page not in self._name:
            return True
        if not self.available:
            return False
        copy = self._take()
        self._paged[:, copy] = self._paged[:, page]
        sequence.pages[place] = copy
        self._release([page])
        return True

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            digest, following = self._name.pop(page)
            same = self._registered[digest]
            del same[following]
            if not same:
                del self._registered[digest]
        self._users[page] = 1
        return page

    def _hold(self, page: int) -> None:
        self._unused.pop(page, None)
        self._users[page] += 1

    def _release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._name:
                self._unused[page] = None
            else:
                self._free.append(page)

    def _digests(self, sequence: Sequence, tokens: IntArray, pages: int) -> list[bytes]:
        known, key = sequence.digests, sequence.key or ""
        for p in range(len(known), pages):
            parent = known[-1] if known else _SEED + key.encode("utf-8", "surrogatepass")
            text = np.ascontiguousarray(tokens[p * PAGE : (p + 1) * PAGE], np.int64).tobytes()
            known.append(hashlib.blake2b(parent + text, digest_size=16).digest())
        return known

    def _indices(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self._device, non_blocking=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU, memory is only committed where it is written."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = torch.empty((), dtype=dtype).element_size()
    plain = np.zeros(int(np.prod(shape)) * size, np.uint8)
    return torch.from_numpy(plain).view(dtype).view(shape)
