"""Attention of draft layers over paged contexts."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vllm_specx.draft.paged_cache import PAGE, PagedCache, Sequence

Places = npt.NDArray[np.int64]

_WASTE = 4096
"""Entries of padding that cost about as much as one more group."""
_SCRATCH = 256 << 20
"""Bytes that gathered contexts may take for a whole draft; beyond, they are gathered each time."""
_MASK = 10_000_000
"""The most elements of a mask."""
_FEW = 16
"""Up to so many new rows, requests share a padded batch."""


def attend(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q [b, heads, r, head_dim], kv [b, length, 2 * kv_heads, head_dim], mask [b, 1, r, length] to be
    added -> [b, heads, r, head_dim]."""
    keys, values = kv.transpose(1, 2).chunk(2, 1)
    if q.shape[2] > 1:
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=keys.shape[1] != q.shape[1]
        )
    # Heads that share keys become rows of one head: on CPUs PyTorch takes several times as long for single
    # rows in bfloat16 (14 times at 32 heads on 8).
    rows = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
    alone = rows.shape[2] == 1 and q.device.type == "cpu" and q.dtype != torch.float32
    answer = functional.scaled_dot_product_attention(
        rows.expand(-1, -1, 2, -1) if alone else rows, keys, values, attn_mask=mask
    )
    return answer[:, :, : rows.shape[2]].reshape(q.shape)


class Window:
    """The contexts of a batch, gathered from their pages once, and what is drafted after them.

    sequences: B, written up to `ends` before the first attend(). depth: how many drafted entries
        may follow, of all paths; they live here and never reach the pages.
    Requests of similar length form a group, so that little is padding.
    """

    def __init__(
        self, cache: PagedCache, sequences: Many[Sequence], ends: Many[int], depth: int
    ) -> None:
        self._cache = cache
        self._batch = len(sequences)
        self._depth = depth
        bases = np.array([s.base for s in sequences], np.int64)
        lengths = np.array(ends, np.int64) - bases
        entry = cache.kv[0, 0].nbytes
        groups = group(lengths, _SCRATCH // (4 * entry))
        self._groups = [
            _Group(cache, [sequences[i] for i in members], lengths[members], members, depth)
            for members in groups
        ]
        size = sum(g.entries for g in self._groups) * cache.layers
        self._hold = size * entry <= _SCRATCH
        # Drafted entries of each layer: [B, n, 2 * kv_heads, head_dim], n of one depth together.
        self._tails: list[list[torch.Tensor]] = [[] for _ in range(cache.layers)]
        self._whole = self._in_order()

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor | None) -> torch.Tensor:
        """One query a request: q [B, heads, head_dim] -> [B, heads * head_dim].

        kv: [B, 2 * kv_heads, head_dim] of the drafted token, to be seen from now on; None at first,
            when the query is that of the last entry in the pages.
        """
        tails = self._tails[layer]
        if kv is not None:
            tails.append(kv[:, None])
        whole = self._whole
        out = q if whole else torch.empty_like(q)
        for g in self._groups:
            query = q if whole else q.index_select(0, g.rows)
            answer = attend(query[:, :, None], *self._context(g, layer, tails))[:, :, 0]
            if whole:
                out = answer
            else:
                out.index_copy_(0, g.rows, answer)
        return out.reshape(self._batch, -1)

    def attend_nodes(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """W nodes of a tree a request: q [B * W, heads, head_dim] -> [B * W, heads * head_dim].

        kv: [B * W, 2 * kv_heads, head_dim] of these nodes. visible: bool [B, W, T], which of the T drafted
            entries so far, these W the last of them, each node sees: itself and those above it.
        """
        size, width, _ = visible.shape
        tails = self._tails[layer]
        tails.append(kv.reshape(size, width, *kv.shape[1:]))
        q = q.reshape(size, width, *q.shape[1:]).transpose(1, 2)
        whole = self._whole
        out = q if whole else torch.empty_like(q)
        for g in self._groups:
            query, seen = (
                (q, visible)
                if whole
                else (q.index_select(0, g.rows), visible.index_select(0, g.rows))
            )
            context, mask = self._context(g, layer, tails)
            answer = attend(query, context, _with_nodes(mask, seen, g.width, q.dtype))
            if whole:
                out = answer
            else:
                out.index_copy_(0, g.rows, answer)
        return out.transpose(1, 2).reshape(size * width, -1)

    def _context(
        self, g: _Group, layer: int, tails: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kv = g.kept.get(layer)
        fresh = tails[-1:]
        if kv is None:
            kv = g.gather(layer)
            fresh = tails
            if self._hold:
                g.kept[layer] = kv
        end = g.width + sum(tail.shape[1] for tail in tails)
        column = end - sum(tail.shape[1] for tail in fresh)
        for tail in fresh:
            kv[:, column : column + tail.shape[1]] = (
                tail if self._whole else tail.index_select(0, g.rows)
            )
            column += tail.shape[1]
        mask = None if g.mask is None else g.mask[..., :end]
        return kv[:, :end], mask

    def keep(self, rows: torch.Tensor) -> None:
        """Only these requests go on; rows int64 [n], ascending."""
        chosen = rows.cpu().numpy()
        place = np.full(self._batch, -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        for g in self._groups:
            g.keep(place)
        self._groups = [g for g in self._groups if len(g.members)]
        self._batch = len(chosen)
        self._tails = [[t.index_select(0, rows) for t in tails] for tails in self._tails]
        self._whole = self._in_order()

    def _in_order(self) -> bool:
        """Whether one group is the batch as it stands."""
        return len(self._groups) == 1 and bool(
            (self._groups[0].members == np.arange(self._batch)).all()
        )


def _with_nodes(
    mask: torch.Tensor | None, visible: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """[b, 1, W, width + T] to be added. mask: [b, 1, 1, width + T] of the contexts; visible [b, W, T]."""
    size, nodes, drafted = visible.shape
    full = torch.zeros(size, 1, nodes, width + drafted, dtype=dtype, device=visible.device)
    if mask is not None:
        full += mask
    full[:, 0, :, width:].masked_fill_(~visible, -torch.inf)
    return full


class _Group:
    """Requests whose contexts are padded to one width. high: their lengths. members: their places in the
    batch."""

    def __init__(
        self,
        cache: PagedCache,
        sequences: list[Sequence],
        high: Places,
        members: Places,
        depth: int,
    ) -> None:
        self._cache = cache
        self.members = members
        low = np.array([s.start - s.base for s in sequences], np.int64)
        self.width = int(high.max())
        table = _table(sequences, -(-(self.width + depth) // PAGE))
        self._columns = table.shape[1] * PAGE
        device = cache.kv.device
        self._table = torch.from_numpy(table).to(device, non_blocking=True)
        self.rows = torch.from_numpy(members).to(device, non_blocking=True)
        self.mask: torch.Tensor | None = None
        if low.any() or (high != self.width).any():
            column = np.arange(self.width + depth)
            hidden = (column < low[:, None]) | ((column >= high[:, None]) & (column < self.width))
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
            self.mask = torch.from_numpy(mask).to(device, non_blocking=True)
            self.mask = self.mask.to(cache.kv.dtype)[:, None, None]
        self.kept: dict[int, torch.Tensor] = {}

    @property
    def entries(self) -> int:
        """Gathered, padding included."""
        return len(self.members) * int(self._columns)

    def gather(self, layer: int) -> torch.Tensor:
        """[b, columns, 2 * kv_heads, head_dim]."""
        return _gathered(self._cache, layer, self._table)

    def keep(self, place: Places) -> None:
        """place: [batch], where each request of the batch goes, -1 for those that end."""
        stay = place[self.members] >= 0
        self.members = place[self.members[stay]]
        if not stay.all():
            local = torch.from_numpy(np.flatnonzero(stay)).to(self._table.device)
            self._table = self._table.index_select(0, local)
            if self.mask is not None:
                self.mask = self.mask.index_select(0, local)
            self.kept = {n: kv.index_select(0, local) for n, kv in self.kept.items()}
        self.rows = torch.from_numpy(self.members).to(self._table.device)


def group(lengths: Places, most: int) -> list[Places]:
    """Places of requests by length, such that padding to the longest wastes little, and with at
    most `most` entries a group, or one request."""
    if not len(lengths):
        return []
    longest = int(lengths.max())
    if int((longest - lengths).sum()) <= _WASTE and longest * len(lengths) <= most:
        return [np.arange(len(lengths), dtype=np.int64)]
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    waste, width = 0, 0
    for i in order.tolist():
        length = int(lengths[i])
        full = bool(groups) and (len(groups[-1]) + 1) * width > most
        if not groups or full or waste + width - length > _WASTE:
            groups.append([])
            waste, width = 0, length
        waste += width - length
        groups[-1].append(i)
    return [np.array(members, np.int64) for members in groups]


class Rows:
    """Any number of queries a request, each over the entries up to its own: made once for all layers.

    sequences, ends: of the requests, and where the written entries of each will end. positions: each
    request's rows, ascending, one request's after the other's.
    """

    def __init__(
        self,
        cache: PagedCache,
        sequences: Many[Sequence],
        ends: Many[int],
        positions: Many[Places],
    ) -> None:
        self._cache = cache
        counts = np.array([len(p) for p in positions], np.int64)
        firsts = np.cumsum(counts) - counts
        lengths = np.array([end - s.base for s, end in zip(sequences, ends, strict=True)], np.int64)
        few = np.flatnonzero(counts <= _FEW)
        batches = [few[members] for members in group(lengths[few], _MASK // _FEW)]
        batches += [np.array([i], np.int64) for i in np.flatnonzero(counts > _FEW)]
        self._batches = [
            _Batch(
                cache,
                [sequences[i] for i in members],
                int(lengths[members].max()),
                firsts[members],
                [positions[i] for i in members],
            )
            for members in batches
        ]
        self._hold = sum(batch.mask_size for batch in self._batches) <= 2 * _MASK

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [R, heads, head_dim], the requests' rows one after the other -> [R, heads * head_dim]."""
        out = torch.empty_like(q)
        for batch in self._batches:
            batch.attend(layer, q, out, self._hold)
        return out.flatten(1)


class _Batch:
    """Requests whose rows and contexts are padded to one shape. firsts: their first rows."""

    def __init__(
        self,
        cache: PagedCache,
        sequences: list[Sequence],
        width: int,
        firsts: Places,
        positions: list[Places],
    ) -> None:
        self._cache = cache
        self._device = cache.kv.device
        self._width = width
        self._firsts, self._positions = firsts, positions
        self._counts = np.array([len(p) for p in positions], np.int64)
        self._base = np.array([s.base for s in sequences], np.int64)[:, None]
        self._low = np.array([s.start for s in sequences], np.int64)[:, None] - self._base
        self._table = torch.from_numpy(_table(sequences, -(-width // PAGE))).to(self._device)
        most = int(self._counts.max())
        step = max(1, _MASK // (len(positions) * width))
        self._parts = [(begin, min(step, most - begin)) for begin in range(0, most, step)]
        self.mask_size = len(positions) * width * most
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, hold: bool) -> None:
        kv = _gathered(self._cache, layer, self._table)[:, : self._width]
        for begin, size in self._parts:
            made = self._kept.get(begin)
            if made is None:
                made = self._made(begin, size, q.dtype)
                if hold:
                    self._kept[begin] = made
            rows, mask = made
            flat = rows.flatten()
            query = q.index_select(0, flat).view(*rows.shape, *q.shape[1:]).transpose(1, 2)
            answer = attend(query, kv, mask[:, None]).transpose(1, 2)
            out[flat] = answer.flatten(0, 1)

    def _made(self, begin: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [b, size] of all, and their mask [b, size, width] to be added."""
        # A request with fewer rows repeats its last one.
        local = np.minimum(begin + np.arange(size), self._counts[:, None] - 1)
        at = np.stack([p[mine] for p, mine in zip(self._positions, local, strict=True)])
        column = torch.arange(self._width, device=self._device)
        last = torch.from_numpy(at - self._base).to(self._device)[..., None]
        low = torch.from_numpy(self._low).to(self._device)[..., None]
        hidden = (column > last) | (column < low)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(hidden, -torch.inf)
        return torch.from_numpy(self._firsts[:, None] + local).to(self._device), mask


def _table(sequences: Many[Sequence], pages: int) -> Places:
    """[b, pages]; beyond its end a request repeats its first page, never another's."""
    table = np.empty((len(sequences), pages), np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        own = sequence.pages[:pages]
        row[: len(own)] = own
        row[len(own) :] = own[0]
    return table


def _gathered(cache: PagedCache, layer: int, table: torch.Tensor) -> torch.Tensor:
    slab = cache.kv[layer].view(cache.pages, -1)
    shape = (len(table), table.shape[1] * PAGE, *cache.kv.shape[2:])
    return slab.index_select(0, table.flatten()).view(shape)
