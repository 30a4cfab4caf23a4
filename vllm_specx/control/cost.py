"""The time of a decode step, learned while serving.

T(B, N, D) for B requests, N = B + verified draft tokens, and D draft steps of the proposer. A
parametric part (fixed + per request + per token + per draft step) is fitted by recursive least
squares and carries over to sizes that were never seen; draft steps that the worker times are taken out
first (draft_time.py). A table over B and the draft tokens N - B, on grids that are fine where both are
small, holds what was measured beside it: padding, staircases, caches, and what the first draft token of a
batch costs. One level follows the machine as a whole.
Steps that were slow for another reason (compilation, garbage collection, page faults) are met by
medians, clipped innovations and Huber weights.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specx.control.draft_time import DraftTime

FloatArray = npt.NDArray[np.float64]

_RING = 5
_FIRST = 12  # steps that are looked at together before any is believed
_REACH = (0.5, 0.3)  # of a measurement, in log(B) and log(1 + N - B)
_TRUST = 3.0  # measurements worth as much as what is expected of a cell
_CLIP = 3.0  # innovations beyond this many scales are clipped
_ERRORS = 128
_SURE = 8.0  # measurements after which a table's value needs no caution
_STALE = 0.5 ** (1 / 400)  # what a measurement is worth after one more step elsewhere


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Seconds; only the proportions matter after the first steps.

    fixed: of a step. request: of one more request. token: of one more token in the forward.
    draft_step: of one draft step of the proposer. ragged: factor of steps whose requests differ in
    their number of tokens (piecewise instead of full CUDA graphs).
    """

    fixed: float = 0.008
    request: float = 0.0001
    token: float = 0.0004
    draft_step: float = 0.0
    ragged: float = 1.0

    @classmethod
    def from_model(
        cls, weight_bytes: float, on_gpu: bool, draft_share: float = 0.0, ragged: float = 1.0
    ) -> CostPrior:
        """A prior for a model. weight_bytes: read in each step; draft_share: draft step / target step.

        Bandwidth and balance (FLOP a byte) are those of a common machine of the kind: 25 GB/s and
        40 on a CPU, 2 TB/s and 150 on a GPU; a token costs 1 / balance of the fixed part.
        """
        bandwidth, balance, overhead = (2e12, 150.0, 0.003) if on_gpu else (25e9, 40.0, 0.001)
        reading = weight_bytes / bandwidth
        return cls(
            fixed=reading + overhead,
            request=0.003 * reading + 2e-5,
            token=reading / balance + 2e-5,
            draft_step=draft_share * (reading + overhead),
            ragged=ragged,
        )


class CostModel:
    """Step times in seconds, from `observe`d pure-decode steps."""

    def __init__(self, max_requests: int, max_tokens: int, prior: CostPrior | None = None) -> None:
        """max_tokens: the largest N, max_requests * (1 + max K)."""
        self.prior = prior or CostPrior()
        self.observations = 0
        self._requests = _grid(8, 1.19, max_requests)
        self._drafts = np.concatenate([[0.0], _grid(16, 1.12, max(max_tokens, 2))])
        self._request_edges: list[float] = ((self._requests[1:] + self._requests[:-1]) / 2).tolist()
        self._draft_edges: list[float] = ((self._drafts[1:] + self._drafts[:-1]) / 2).tolist()
        self._request_list: list[float] = self._requests.tolist()
        self._draft_list: list[float] = self._drafts.tolist()
        self._near = _kernel(self._requests, _REACH[0]), _kernel(1.0 + self._drafts, _REACH[1])
        self._base = np.array([self.prior.fixed, self.prior.request, self.prior.token])
        self._errors = np.zeros(_ERRORS)
        self._timed = DraftTime(self._requests)
        self._first: list[tuple[int, int, float, float, bool]] = []
        self._scale = 1.0
        self._forget()

    def times(
        self,
        requests: int,
        totals: npt.ArrayLike,
        draft_steps: npt.ArrayLike = 0,
        ragged: npt.ArrayLike = False,
    ) -> FloatArray:
        """float64, the shape of totals: seconds of steps with `requests` requests and totals tokens.

        totals: N = requests + verified draft tokens; fractions are interpolated. draft_steps and
        ragged (whether the requests differ in their number of tokens) broadcast against it.
        """
        drafts = np.asarray(totals, np.float64) - requests
        seconds: FloatArray = np.interp(drafts, self._drafts, self._row(requests))
        factor: FloatArray = np.where(ragged, self._now * math.exp(self._ragged), self._now)
        seconds = seconds * factor
        if (draft_step := self.draft_step(requests)) > 0.0:
            seconds = seconds + draft_step * np.asarray(draft_steps, np.float64)
        return seconds

    def time(
        self, requests: int, total: float, draft_steps: float = 0, ragged: bool = False
    ) -> float:
        """Seconds of one step; see `times`."""
        knots = self._draft_list
        drafts = total - requests
        row = self._lists.get(requests)
        if row is None:
            row = self._lists[requests] = self._row(requests).tolist()
        upper = min(max(bisect_left(knots, drafts), 1), len(knots) - 1)
        low, high = knots[upper - 1], knots[upper]
        share = min(max((drafts - low) / (high - low), 0.0), 1.0)
        seconds = row[upper - 1] + share * (row[upper] - row[upper - 1])
        seconds *= self._now * math.exp(self._ragged) if ragged else self._now
        return seconds + self.draft_step(requests) * draft_steps if draft_steps else seconds

    def cautious(self, requests: int, drafts: int) -> FloatArray:
        """float64 [drafts + 1]: seconds of steps that verify 0, 1, ... draft tokens in all.

        Where few steps of a size, or few without drafts, were measured, a draft token costs at least
        what the parametric part says: an unlucky measurement must not make it look free, because then
        every step has drafts and nothing shows the mistake.
        """
        extra = np.arange(drafts + 1.0)
        seconds = self.times(requests, requests + extra)
        row = bisect_left(self._request_edges, requests)
        counts = self._trusted(row)[np.searchsorted(self._draft_edges, extra)]
        unsure = 1.0 - np.minimum(np.minimum(counts, counts[0]), _SURE) / _SURE
        least = seconds[0] + unsure * self._parts[2] * self._now * extra
        cautious: FloatArray = np.maximum(seconds, least)
        return cautious

    def visits(self, requests: int, total: float) -> float:
        """How often a step of about this size was measured, the less the longer ago."""
        row = bisect_left(self._request_edges, requests)
        return float(self._trusted(row)[bisect_left(self._draft_edges, total - requests)])

    def _trusted(self, rows: int | slice = slice(None)) -> FloatArray:
        """The table's counts, less what has not been seen for long: a value that was measured while
        something else slowed the machine must not stay because it keeps steps from being like that."""
        age = self.observations - self._seen_at[rows]
        trusted: FloatArray = self._count[rows] * _STALE**age
        return trusted

    def draft_step(self, requests: int) -> float:
        """Seconds of one draft step for so many requests."""
        timed = self._timed.at(requests)
        return self._draft_step * self._now if timed is None else timed

    @property
    def ragged(self) -> float:
        """Factor of ragged steps over uniform ones."""
        return math.exp(self._ragged)

    @property
    def error(self) -> float:
        """Median relative error of the last 128 predictions, each made before its measurement."""
        seen = min(self.observations, _ERRORS)
        return float(np.median(self._errors[:seen])) if seen else 0.0

    def observe(
        self,
        requests: int,
        total: int,
        seconds: float,
        draft_steps: float = 0,
        ragged: bool = False,
        draft_seconds: float | None = None,
    ) -> None:
        """Take in one pure-decode step. Values that are no time are ignored. draft_seconds: what its draft
        steps took of it, if that was timed."""
        if not (0.0 < seconds < math.inf and 0 < requests <= total):
            return
        predicted = self.time(requests, total, draft_steps, ragged)
        self._errors[self.observations % _ERRORS] = abs(predicted / seconds - 1.0)
        self.observations += 1
        if draft_seconds is not None and draft_steps and 0.0 < draft_seconds < seconds:
            row = bisect_left(self._request_edges, requests)
            self._timed.learn(row, draft_seconds / draft_steps)
            seconds, draft_steps = seconds - draft_seconds, 0
            predicted = self.time(requests, total, 0, ragged)
        step = (requests, total, seconds, draft_steps, ragged)
        if self.observations > _FIRST:
            count = self._learn(*step, math.log(seconds / predicted))
            self._since_fit += 1
            if self._since_fit >= self._pause(count):
                self._fit()
            return
        self._first.append(step)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The first steps decide the scale together; those far from it are left out."""
        prior = self.prior
        ratios = [
            seconds
            / (prior.fixed + prior.request * b + prior.token * n + prior.draft_step * draft_steps)
            for b, n, seconds, draft_steps, _ in self._first
        ]
        self._scale = sorted(ratios)[(len(ratios) - 1) // 2]
        self._forget()
        for step, ratio in zip(self._first, ratios, strict=True):
            if 0.3 < ratio / self._scale < 3.0:
                b, n, seconds, draft_steps, ragged = step
                self._learn(*step, math.log(seconds / self.time(b, n, draft_steps, ragged)))
                self._fit()

    def _forget(self) -> None:
        cells = (len(self._requests), len(self._drafts))
        self._rings: dict[tuple[int, int], list[float]] = {}
        self._count: FloatArray = np.zeros(cells)
        self._value: FloatArray = np.zeros(cells)  # log seconds at the knot, level removed
        self._seen_at: FloatArray = np.zeros(cells)
        self._normal: FloatArray = np.zeros((4, 4))
        self._moment: FloatArray = np.zeros(4)
        self._new: list[tuple[float, float, float, float, float]] = []
        self._since_fit = 0
        self._level = 0.0  # log of how much slower the machine is than the table says
        self._now = 1.0
        self._ragged = math.log(self.prior.ragged)
        self._noise = 0.05
        self._modes = [0, 0]
        self._fit()

    def _learn(
        self,
        requests: int,
        total: int,
        seconds: float,
        draft_steps: float,
        ragged: bool,
        innovation: float,
    ) -> int:
        """Learn one step, given log(seconds / predicted); returns how often its size had been seen."""
        limit = _CLIP * self._noise
        clipped = max(-limit, min(limit, innovation))
        row = bisect_left(self._request_edges, requests)
        column = bisect_left(self._draft_edges, total - requests)
        ring = self._rings.setdefault((row, column), [])
        count = int(self._trusted(row)[column] + 0.5)
        if count < 0.3 * self._count[row, column]:
            count = 0
        self._count[row, column], self._seen_at[row, column] = count, self.observations
        del ring[: max(len(ring) - count, 0)]
        self._noise += 0.05 * (min(abs(innovation), 4 * self._noise) * 1.25 - self._noise)
        self._noise = min(max(self._noise, 0.01), 0.15)
        self._level += 0.05 * count / (count + 5.0) * clipped
        self._now = math.exp(self._level)
        self._modes[ragged] += 1
        if ragged and self._modes[False] > 3:
            self._ragged += 0.1 / (1 + 0.02 * self._modes[True]) * clipped
            self._ragged = max(self._ragged, 0.0)
        self._learn_parts(requests, total, seconds, draft_steps, ragged, innovation)
        drafting = self.draft_step(requests) * draft_steps
        at_knot = self._plain(
            self._request_list[row], self._request_list[row] + self._draft_list[column]
        )
        ratio = at_knot / self._plain(requests, total)
        own = (seconds - min(drafting, 0.7 * seconds)) / (self.ragged if ragged else 1.0)
        if count < 3:
            limit = max(limit, 0.2 if self.observations > _FIRST else 1.0)
            own *= math.exp(max(-limit, min(limit, innovation)) - innovation)
        self._learn_cell(row, column, ring, math.log(max(own, 1e-9) * ratio) - self._level)
        return count

    def _pause(self, count: int) -> int:
        """Steps between fits: few while there is much to learn."""
        if self.observations > 64:
            return 32 if self.observations > 512 else 16
        return 1 if count < 3 else 4

    def _learn_cell(self, row: int, column: int, ring: list[float], value: float) -> None:
        count = int(self._count[row, column])
        if count < _RING:
            ring.append(value)
        else:
            ring[count % _RING] = value
        robust = sorted(ring)[(len(ring) - 1) // 2]
        if count >= _RING:
            old = float(self._value[row, column])
            robust = old + max(1.0 / count, 0.01) * (robust - old)
        self._value[row, column] = robust
        self._count[row, column] = count + 1

    def _learn_parts(
        self,
        requests: int,
        total: int,
        seconds: float,
        draft_steps: float,
        ragged: bool,
        innovation: float,
    ) -> None:
        weight = min(1.0, 2.0 * self._noise / max(abs(innovation), 1e-9))
        if weight < 0.1:
            return
        unit = self._scale * self._now * (self.ragged if ragged else 1.0) / seconds
        prior = self.prior
        self._new.append(
            (
                weight,
                unit * prior.fixed,
                unit * prior.request * requests,
                unit * prior.token * total,
                unit * prior.draft_step * draft_steps,
            )
        )

    def _plain(self, requests: float, total: float) -> float:
        a, b, c = self._parts
        return a + b * requests + c * total

    def _fit(self) -> None:
        """Solve for the parametric part and redraw the table."""
        self._since_fit = 0
        if self._new:
            rows = np.array(self._new)
            self._new.clear()
            weight, parts = rows[:, 0], rows[:, 1:]
            keep = 0.998 ** len(rows)
            self._normal = keep * self._normal + parts.T @ (weight[:, None] * parts)
            self._moment = keep * self._moment + weight @ parts
        pull = np.array([1.0, 1.0, 0.3, 0.3])
        weights = np.linalg.solve(self._normal + np.diag(pull), self._moment + pull)
        low = weights < 0.02
        if low.any():
            free = ~low
            weights = np.where(low, 0.02, weights)
            rest = self._moment - self._normal[:, low] @ weights[low] + pull
            weights[free] = np.linalg.solve(
                (self._normal + np.diag(pull))[np.ix_(free, free)], rest[free]
            )
            weights = np.maximum(weights, 0.01)
        self._parts: tuple[float, float, float] = tuple(
            (self._base * weights[:3] * self._scale).tolist()
        )
        self._draft_step = float(self._scale * self.prior.draft_step * weights[3]) * math.exp(
            self._level
        )
        plain = np.log(
            self._parts[0]
            + self._parts[1] * self._requests[:, None]
            + self._parts[2] * (self._requests[:, None] + self._drafts)
        )
        weight = np.minimum(self._trusted(), 20.0)
        off = np.where(self._count > 0, self._value - plain, 0.0)
        by_requests, by_drafts = self._near
        around = by_requests @ (weight * off) @ by_drafts
        around /= by_requests @ weight @ by_drafts + 1.0
        off = (weight * off + _TRUST * around) / (weight + _TRUST)
        table = np.exp(plain + off)
        rising = np.maximum.accumulate(table, axis=1)
        falling = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        self._table: FloatArray = 0.5 * (rising + falling)
        self._rows: dict[int, FloatArray] = {}
        self._lists: dict[int, list[float]] = {}

    def _row(self, requests: int) -> FloatArray:
        row = self._rows.get(requests)
        if row is None:
            knots = self._requests
            upper = min(max(int(knots.searchsorted(requests)), 1), len(knots) - 1)
            low, high = knots[upper - 1], knots[upper]
            share = min(max((requests - low) / (high - low), 0.0), 1.0)
            row = (1.0 - share) * self._table[upper - 1] + share * self._table[upper]
            self._rows[requests] = row
        return row


def _grid(dense: int, ratio: float, largest: int) -> FloatArray:
    """1, 2, ..., dense, then rising by `ratio` up to `largest`; at least two knots."""
    knots = list(range(1, min(dense, largest) + 1))
    while knots[-1] < largest:
        knots.append(min(max(round(knots[-1] * ratio), knots[-1] + 1), largest))
    return np.array(knots if len(knots) > 1 else [1, 2], np.float64)


def _kernel(knots: FloatArray, reach: float) -> FloatArray:
    logs = np.log(knots)
    kernel: FloatArray = np.exp(-np.abs(logs[:, None] - logs) / reach)
    return kernel
