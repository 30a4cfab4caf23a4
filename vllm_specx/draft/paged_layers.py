"""Decoder layers over a paged cache: committed rows go into the pages, drafted ones after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from vllm_specx.draft.attention import Places, Rows, Window
from vllm_specx.draft.decoder import Attend, DecoderLayer, Rotary, Rotation
from vllm_specx.draft.paged_cache import PAGE, PagedCache, Sequence

Hidden = tuple[torch.Tensor, torch.Tensor]
"""What a layer reads [R, in], and the residual [R, hidden]; or its answer and the residual."""
Enter = Callable[[slice], Hidden]
"""Of a range of the rows that are absorbed, what the first layer reads."""
Between = Callable[[int, torch.Tensor, torch.Tensor], Hidden]
"""(layer, the answer of the one below, its residual) -> what the layer reads."""

_BLOCK = 1024
"""Rows that go through the layers together."""
_FUSED = 96
"""Up to so many rows, all of them get queries although only the last of each request needs one."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """New entries [begin, end) of one request. drafts: its last row is where a draft begins."""

    sequence: Sequence
    begin: int
    end: int
    drafts: bool


@dataclass(slots=True, eq=False)
class Ahead:
    """Where the drafts of B requests are: the last answer of the layers, and its positions int64 [B]."""

    moved: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    window: Window


class PagedLayers:
    """layers: from the bottom to the top, all with the same rotary embedding and cache. between: what
    stands between two layers."""

    def __init__(
        self,
        layers: Many[DecoderLayer],
        rotary: Rotary,
        cache: PagedCache,
        between: Between,
    ) -> None:
        self._layers, self._rotary, self._cache, self._between = layers, rotary, cache, between
        self._top = len(layers) - 1
        self._device = cache.kv.device

    def absorb(self, spans: Many[Span], enter: Enter, depth: int) -> Ahead | None:
        """Write the entries of all spans; their sequences have pages for them.

        enter: of rows of all spans, one after the other. depth: tokens that will be drafted at most.
        Answers the state of the spans that draft, in their order; None: there are none.
        """
        counts = np.array([span.end - span.begin for span in spans], np.int64)
        total = int(counts.sum())
        places = [np.arange(span.begin, span.end, dtype=np.int64) for span in spans]
        slots = [_slots(span.sequence, at) for span, at in zip(spans, places, strict=True)]
        targets = self._moved(np.concatenate(slots))
        positions = self._moved(np.concatenate(places))
        drafting = [j for j, span in enumerate(spans) if span.drafts]
        last = (np.cumsum(counts) - 1)[drafting]
        window = Window(
            self._cache,
            [spans[j].sequence for j in drafting],
            [spans[j].end for j in drafting],
            depth,
        )
        if total <= _FUSED and drafting:
            chosen = None if len(last) == total else self._moved(last)
            rotation = self._rotary(positions)
            x, residual = enter(slice(0, total))
            x, residual = self._below(x, residual, rotation, targets, spans, places, (0, total))
            moved, residual = self._layers[self._top].forward(
                x, residual, rotation, self._first(window, targets, chosen), chosen
            )
            positions = positions if chosen is None else positions.index_select(0, chosen)
            return Ahead(moved, residual, positions, window)
        tops: list[Hidden] = []
        for begin in range(0, total, _BLOCK):
            end = min(begin + _BLOCK, total)
            part = slice(begin, end)
            rotation = self._rotary(positions[part])
            x, residual = enter(part)
            x, residual = self._below(
                x, residual, rotation, targets[part], spans, places, (begin, end)
            )
            kv = self._layers[self._top].keys_values(x, rotation)
            self._cache.kv[self._top].index_copy_(0, targets[part], kv)
            here = self._moved(last[(last >= begin) & (last < end)] - begin)
            tops.append((x.index_select(0, here), residual.index_select(0, here)))
        if not drafting:
            return None
        positions = positions.index_select(0, self._moved(last))
        x, residual = (torch.cat(parts) for parts in zip(*tops, strict=True))
        moved, residual = self._layers[self._top].forward(
            x, residual, self._rotary(positions), self._first(window, None, None)
        )
        return Ahead(moved, residual, positions, window)

    def advance(
        self,
        ahead: Ahead,
        x: torch.Tensor,
        residual: torch.Tensor,
        visible: torch.Tensor | None = None,
    ) -> None:
        """One drafted token a request goes through the layers: what the first one reads of it.

        visible: of a tree, whose W nodes a request go through together, x and residual having W rows of
            each (Window.attend_nodes).
        """
        ahead.positions = ahead.positions + 1
        positions = ahead.positions
        if visible is not None:
            positions = positions.repeat_interleave(visible.shape[1])
        rotation = self._rotary(positions)
        moved = x
        for n, layer in enumerate(self._layers):

            def attend(q: torch.Tensor, kv: torch.Tensor, n: int = n) -> torch.Tensor:
                if visible is not None:
                    return ahead.window.attend_nodes(n, q, kv, visible)
                return ahead.window.attend(n, q, kv)

            if n:
                x, residual = self._between(n, moved, residual)
            moved, residual = layer.forward(x, residual, rotation, attend)
        ahead.moved, ahead.residual = moved, residual

    def keep(self, ahead: Ahead, rows: torch.Tensor) -> None:
        """Only these requests go on; rows int64 [n], ascending. What the last token gave is left out."""
        ahead.moved = ahead.moved[:0]
        ahead.residual = ahead.residual[:0]
        ahead.positions = ahead.positions.index_select(0, rows)
        ahead.window.keep(rows)

    def _below(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        targets: torch.Tensor,
        spans: Many[Span],
        places: Many[Places],
        part: tuple[int, int],
    ) -> Hidden:
        """All layers but the top one, on rows `part` of all."""
        if not self._top:
            return x, residual
        cut = list(_cut(spans, places, *part))
        at = [where for _, where in cut]
        rows = Rows(
            self._cache, [span.sequence for span, _ in cut], [int(w[-1]) + 1 for w in at], at
        )
        for layer in range(self._top):

            def attend(q: torch.Tensor, kv: torch.Tensor, layer: int = layer) -> torch.Tensor:
                self._cache.kv[layer].index_copy_(0, targets, kv)
                return rows.attend(layer, q)

            moved, residual = self._layers[layer].forward(x, residual, rotation, attend)
            x, residual = self._between(layer + 1, moved, residual)
        return x, residual

    def _first(
        self, window: Window, targets: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Attend:
        """Attention of the top layer at the last entries; targets: where keys and values still go."""

        def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            if targets is not None:
                self._cache.kv[self._top].index_copy_(0, targets, kv)
            return window.attend(self._top, q if rows is None else q.index_select(0, rows), None)

        return attend

    def _moved(self, places: Places) -> torch.Tensor:
        return torch.from_numpy(places).to(self._device, non_blocking=True)


def _slots(sequence: Sequence, places: Places) -> Places:
    """Where the entries at `places` are in the slab."""
    pages, base = sequence.pages, sequence.base
    if len(places) <= 8:
        offsets = [int(place) - base for place in places]
        return np.array([pages[o // PAGE] * PAGE + o % PAGE for o in offsets], np.int64)
    offset = places - base
    slots: Places = np.array(pages, np.int64)[offset // PAGE] * PAGE + offset % PAGE
    return slots


def _cut(
    spans: Many[Span], places: Many[Places], begin: int, end: int
) -> Iterator[tuple[Span, Places]]:
    """The spans' places that are rows [begin, end) of all."""
    first = 0
    for span, at in zip(spans, places, strict=True):
        inside = at[max(begin - first, 0) : max(end - first, 0)]
        first += len(at)
        if len(inside):
            yield span, inside
