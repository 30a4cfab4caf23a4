"""Draft tokens that are drawn at random, and exactly what they were drawn from (arXiv 2211.17192).

Any distribution q is lossless that is handed on to the verifier as it was sampled from. Here q is what the
draft says at the request's temperature, top_k and top_p, of its CANDIDATES likeliest tokens: the rest of a
vocabulary of 100,000 has little of the probability, and without it a q takes 64 numbers instead of 100,000.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CANDIDATES = 64
_EXPLORED = 1 / 32
"""How often a draft has one token more than it deserves, so that what it would have been worth is seen."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the B requests of a step sample.

    drawn: bool [B], whose drafts are drawn at random; the others' are the likeliest tokens.
    temperatures: float32 [B], above 0 where drawn. top_k: int64 [B]; 0 is all. top_p: float32 [B].
    """

    drawn: npt.NDArray[np.bool_]
    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What the n tokens of a chain were drawn from.

    tokens: int64 [n]. ids: int64 [n, C], each id once in a row. probabilities: float32 [n, C], those of ids;
        other ids have none. All on the draft's device.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    probabilities: torch.Tensor


def uniforms(seed: int, request: str, position: int, count: int) -> npt.NDArray[np.float64]:
    """float64 [count] in [0, 1): the same for the same arguments on every rank, and independent of
    vLLM's own random numbers."""
    numbers: list[bytes] = []
    for block in range(-(-count // 8)):
        name = f"{seed}\0{position}\0{block}\0{request}".encode("utf-8", "surrogatepass")
        numbers.append(hashlib.blake2b(name, digest_size=64).digest())
    whole = np.frombuffer(b"".join(numbers), np.uint64)[:count]
    return (whole >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def candidates(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] -> ids int64 [n, C] and their q float32 [n, C], the likeliest first.

    temperature, top_p: float32 [n, 1]; top_k: int64 [n, 1], from 1. First top_k, then top_p, as vLLM.
    """
    values, ids = logits.float().topk(min(CANDIDATES, logits.shape[-1]))
    ranks = torch.arange(values.shape[-1], device=values.device)
    q = torch.softmax((values / temperature).masked_fill_(ranks >= top_k, -torch.inf), -1)
    q = q.masked_fill_(q.cumsum(-1) - q >= top_p, 0.0)
    return ids, q / q.sum(-1, keepdim=True)


def drawn_from(q: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: a place of each row of q [n, C], by uniform float64 [n, 1] in [0, 1)."""
    below = q.cumsum(-1, dtype=torch.float64)
    chosen = torch.searchsorted(below, uniform * below[:, -1:], right=True)
    return chosen.clamp_(max=q.shape[-1] - 1)


class Draws:
    """The tokens of one step's chains, drawn or likeliest.

    rows: of the B requests that draft. requests, positions: their ids and committed tokens. depth: of the
        longest chain.
    """

    def __init__(
        self,
        rows: SamplingRows,
        requests: list[str],
        positions: list[int],
        depth: int,
        seed: int,
        device: torch.device,
    ) -> None:
        size = len(requests)
        self.drawn = rows.drawn
        numbers = np.zeros((size, depth + 1))
        for i in np.flatnonzero(rows.drawn).tolist():
            numbers[i] = uniforms(seed, requests[i], positions[i], depth + 1)
        self.explored = rows.drawn & (numbers[:, depth] < _EXPLORED)
        all_ids = np.iinfo(np.int64).max
        places: dict[str, npt.NDArray[Any]] = {
            "numbers": numbers,
            "temperature": rows.temperatures[:, None],
            "top_k": np.where(rows.top_k > 0, rows.top_k, all_ids)[:, None],
            "top_p": rows.top_p[:, None],
        }
        self._of = {name: _moved(each, device) for name, each in places.items()}
        self._device = device
        self._depth = depth
        self._going = np.arange(size)
        self._sources: dict[str, torch.Tensor] = {}

    def keep(self, rows: torch.Tensor) -> None:
        """Only these of the requests go on; int64 [n], on the CPU."""
        self._going = self._going[rows.numpy()]

    def choose(self, logits: torch.Tensor, d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens at depth d (from 0) of the n requests that go on, logits [n, V]: int64 [n], and float32
        [n], the probability of the likeliest one. It does not depend on the token that was drawn, so
        drafts may end by it."""
        mask = self.drawn[self._going]
        if mask.all():
            return self._drawn(logits, self._going, d)
        if not mask.any():
            probability, token = torch.softmax(logits, -1, dtype=torch.float32).max(-1)
            return token, probability
        drawn, likeliest = np.flatnonzero(mask), np.flatnonzero(~mask)
        places = _moved(likeliest, self._device)
        top, which = torch.softmax(logits.index_select(0, places), -1, dtype=torch.float32).max(-1)
        token = torch.empty(len(mask), dtype=torch.int64, device=self._device)
        probability = torch.empty(len(mask), dtype=torch.float32, device=self._device)
        token[places], probability[places] = which, top
        places = _moved(drawn, self._device)
        mine = self._drawn(logits.index_select(0, places), self._going[drawn], d)
        token[places], probability[places] = mine
        return token, probability

    def _drawn(
        self, logits: torch.Tensor, rows: npt.NDArray[np.intp], d: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = _moved(rows, self._device)
        of = {name: each.index_select(0, at) for name, each in self._of.items()}
        ids, q = candidates(logits, of["temperature"], of["top_k"], of["top_p"])
        token = ids.gather(1, drawn_from(q, of["numbers"][:, d : d + 1]))[:, 0]
        for name, each in (("ids", ids), ("probabilities", q), ("tokens", token)):
            if name not in self._sources:
                shape = (len(self.drawn), self._depth, *each.shape[1:])
                self._sources[name] = torch.zeros(shape, dtype=each.dtype, device=self._device)
            self._sources[name][at, d] = each
        return token, q[:, 0]

    def source(self, row: int, length: int) -> Source:
        """What the first tokens of a chain were drawn from."""
        return Source(**{name: each[row, :length] for name, each in self._sources.items()})


def _moved(places: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(places)).to(device, non_blocking=True)
