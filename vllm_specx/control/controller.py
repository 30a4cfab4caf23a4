"""K for each request of a step: the draft lengths that make the most tokens per unit of time.

Goodput of a choice K_1..K_B is  sum_i E_i(K_i) / T(B, B + sum_i C_i(K_i), max_i K_i)  where E_i is the
expected number of tokens, C_i the expected number of verified draft tokens. The gains of one more
token fall with depth, so for every total the best choice is the largest gains (greedy), and the best
total is found by looking at all of them, 0 included (cf. arXiv 2406.14066, SmartSpec).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specx.control.acceptance import ACCEPT, OFFER, PROGRESS, AcceptanceModel, evidence
from vllm_specx.control.cost import CostModel, CostPrior
from vllm_specx.control.policy import PRIOR_REJECTION, Rule
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.control.trace import Trace

logger = logging.getLogger(f"vllm.{__name__}")

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NO_LIMIT = 1 << 30
_BANK = 0.4  # saved probing time, in steps
_PROBE_PAUSE = 4  # steps between probes without success
_UNEVEN = 0.01  # what different K must promise over one K: the best of many is partly luck
_BURST = 3  # most probes one after the other, after a success
_SHIFTS = np.array([1, -1, 2, -2])
_KNOWN = 6.0  # measurements after which the time of a step of some size is known
_SHIFT_PAUSE = 100  # steps between shifts where all sizes near the present one are known
# Steps whose evidence is taken in together, after which K is thought over: few requests, many.
_PAUSE = (10, 6)
_MANY = 16
_SURPRISE = 4.0  # of accepted tokens, squared, a draft token, from which it is done at once
_YOUNG = 24  # steps in which every one is
_ENOUGH = 6.0  # drafts after which a request's starting K is no longer asked
_ENOUGH_POOL = 24.0


@dataclass(frozen=True, slots=True)
class Decision:
    """K for each request of the batch.

    k: int32 [B], the most draft tokens of each request.
    uniform_k: the largest of them, 0 if there is no request: what `num_spec_tokens_to_schedule` takes.
    uniform: whether all requests that may draft have the same K by choice.
    expected_tokens, expected_seconds: of the step that verifies these drafts.
    probe: whether one K of it is a trial rather than the best known.
    """

    k: npt.NDArray[np.int32]
    uniform_k: int
    uniform: bool
    expected_tokens: float
    expected_seconds: float
    probe: bool = False


class _Step(NamedTuple):
    """What one step showed, not yet taken in; int [B] each."""

    drafts: IntArray
    hits: IntArray
    kept: IntArray
    offered: IntArray | None
    allowed: IntArray | None
    beyond: IntArray | None


@dataclass(slots=True)
class _Plan:
    """The last choice, which stands until something is new."""

    slots: IntArray
    cap: IntArray
    k: IntArray
    answer: Decision
    ragged: bool
    free: npt.NDArray[np.bool_]
    idle: bool


class Controller:
    """Decides K each step, and learns from what came of it. Deterministic given its inputs.

    Each step, the engine calls `decide` with the requests that decode (prefill excluded) and later
    `observe` with what was verified. A request is known by its id from `add` (or its first step) to
    `remove`, also while it is preempted.
    """

    def __init__(
        self,
        config: ControllerConfig,
        max_k: int,
        *,
        max_requests: int = 256,
        prior: CostPrior | None = None,
        varying: bool = True,
        uniform: bool = False,
        least_draft_steps: int = 0,
    ) -> None:
        """max_k: num_speculative_tokens.

        varying: the proposer may draft fewer tokens than it is allowed (n-gram, suffix).
        uniform: only one K for the whole batch is possible.
        least_draft_steps: draft steps that run whatever K is, 0 included.
        """
        self.config = config
        self.max_k = max_k if config.k_max is None else min(max_k, config.k_max)
        self.k_min = min(config.k_min, self.max_k)
        self.uniform_only = uniform or config.per_request == "never"
        self.varying = varying
        self.least_draft_steps = least_draft_steps
        depth = max(self.max_k, 1)
        self.acceptance = AcceptanceModel(depth, varying)
        self.cost = CostModel(max_requests, max_requests * (1 + self.max_k), prior)
        self.trace = Trace(config.trace) if config.trace else None
        self.steps = 0
        self.changes = 0
        """Steps in which the K of a request changed by choice while the batch stayed the same."""
        self.probes = 0
        self._depths = np.arange(1, depth + 1)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._k = np.zeros(64, np.int64)
        self._cap = np.zeros(64, np.int64)
        self._fixed = np.full(64, -1, np.int64)
        self._start = np.full(64, -1, np.int64)
        self._fresh = np.zeros(64, np.bool_)
        self._seen_at = np.zeros(64, np.int64)
        self._promised = np.zeros(64)
        self._last_ids: list[str] = []
        self._last_slots: IntArray = np.zeros(0, np.int64)
        self._last_size = 0
        self._bank = 0.0
        self._wanted = 0.0
        self._typical = 0.0
        self._turns = config.changes_per_100_steps
        self._probe_at = 0
        self._shift_at = 0
        self._shifts_next = True
        self._burst = 0
        self._probed: IntArray | None = None
        self._probed_before: IntArray | None = None
        self._probe_k = 0
        self._hot = False
        self._uniform_k = -1
        self._promise_scale = np.array([4.0, 4.0])
        self._pending: list[_Step] = []
        self._learned_at = 0
        self._off = self._off_drafts = 0.0
        self._pending_slots: IntArray = self._last_slots
        self._plan: _Plan | None = None
        self._decision: Decision | None = None
        self._token_errors: list[float] = [0.0, 0.0]
        self._probe_seconds = 0.0
        self._all_seconds = 0.0

    # Requests

    def add(self, request_id: str, rule: Rule | None = None) -> None:
        """A new request. Adding a known one changes its rule."""
        rule = rule or Rule()
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            if slot >= len(self._k):
                self._grow()
            self._slots[request_id] = slot
            self._forget_batch()
            pool = self.acceptance.pool(rule.pool, rule.rejection / PRIOR_REJECTION)
            self.acceptance.start(slot, pool)
            self._fresh[slot] = True
            self._k[slot] = 0
            self._seen_at[slot] = -NO_LIMIT
        fixed = -1 if rule.fixed_k is None else min(rule.fixed_k, self.max_k)
        if self.config.static_k is not None:
            fixed = min(self.config.static_k, self.max_k) if fixed else 0
        self._fixed[slot] = fixed
        self._cap[slot] = self.max_k if fixed < 0 else fixed
        self._start[slot] = -1 if rule.start_k is None else rule.start_k

    def remove(self, request_id: str) -> None:
        """The request has ended; its place is reused."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._forget_batch()
            self._free.append(slot)
            self._probed = self._probed_before = None

    def _forget_batch(self) -> None:
        self._learn()
        self._last_ids = []

    # The choice

    def decide(
        self,
        request_ids: Sequence[str],
        *,
        limits: npt.ArrayLike | None = None,
        offered: npt.ArrayLike | None = None,
        promise: npt.ArrayLike | None = None,
    ) -> Decision:
        """K of the requests that decode, for the drafts that are verified next.

        limits: int [B], the most each request can use (tokens left, max_model_len, grammar).
        offered: int [B], how many tokens the proposer has drafted already; then K is how many of
            them to verify, and nothing is spent on drafting. None: decide before drafting.
        promise: float [B, depth], the proposer's own estimate that its draft is accepted down to
            each depth; replaces ours after calibration. Only with `offered`.
        """
        size = len(request_ids)
        if size == 0:
            return Decision(np.zeros(0, np.int32), 0, True, 0.0, 0.0)
        slots = self._find(request_ids)
        cap = self._cap[slots]
        if limits is not None:
            room = np.asarray(limits, np.int64)
            if int(room.min()) < self.max_k:
                cap = np.minimum(cap, np.maximum(room, 0))
        if not self.config.enabled or self.config.static_k is not None or self.max_k == 0:
            if not self.config.enabled:
                cap = np.minimum(cap, self.max_k)
            k32 = cap.astype(np.int32)
            return Decision(k32, int(k32.max()), True, 0.0, 0.0)
        if offered is not None:
            floor = self._floor(slots, cap)
            return self._trim(slots, cap, floor, np.asarray(offered, np.int64), promise)
        plan = self._plan
        if plan is None or plan.slots is not slots or not np.array_equal(plan.cap, cap):
            plan = self._think(slots, cap)
        self._decision = self._probe(plan)
        return self._decision

    def _floor(self, slots: IntArray, cap: IntArray) -> IntArray:
        """int [B]: the least K of each request."""
        floor = np.where(self._fixed[slots] >= 0, cap, self.k_min)
        least: IntArray = np.minimum(floor, cap)
        return least

    def _think(self, slots: IntArray, cap: IntArray) -> _Plan:
        """Choose anew, from the present estimates."""
        usable = self._start_cap(slots, cap)
        floor = self._floor(slots, usable)
        if self.uniform_only:
            best, ragged = self._best_uniform(slots, usable, floor), False
        else:
            best, ragged = self._best(slots, usable, floor), True
            if self.config.per_request == "auto" and len(slots) > 1 and best.any():
                even = self._best_uniform(slots, usable, floor)
                values = self._goodputs(slots, np.stack([even, best]))
                if values[0] * (1.0 + _UNEVEN) >= values[1]:
                    best, ragged = even, False
        k = self._settle(slots, best, usable, floor, ragged)
        free = (self._fixed[slots] < 0) & (cap > k)
        idle = bool((free & (k == 0)).any())
        answer = self._answer(slots, k, ragged, False)
        self._plan = _Plan(slots, cap, k, answer, ragged, free, idle)
        return self._plan

    def _answer(self, slots: IntArray, k: IntArray, ragged: bool, probe: bool) -> Decision:
        tokens, seconds = self._expect(slots, k[None])
        most = int(k.max())
        uniform = not ragged or most == int(k.min())
        return Decision(
            k.astype(np.int32), most, uniform, float(tokens[0]), float(seconds[0]), probe
        )

    def _find(self, request_ids: Sequence[str]) -> IntArray:
        ids = request_ids if isinstance(request_ids, list) else list(request_ids)
        if ids == self._last_ids:
            return self._last_slots
        self._learn()
        for request_id in ids:
            if request_id not in self._slots:
                self.add(request_id)
        slots = np.fromiter((self._slots[i] for i in ids), np.int64, len(ids))
        self._last_ids, self._last_slots = list(ids), slots
        return slots

    def _start_cap(self, slots: IntArray, cap: IntArray) -> IntArray:
        start = self._start[slots]
        if (start < 0).all():
            return cap
        known = (self.acceptance.trials(slots) >= _ENOUGH) | (
            self.acceptance.pool_trials(slots) >= _ENOUGH_POOL
        )
        self._start[slots[known]] = -1
        return np.where((start >= 0) & ~known, np.minimum(cap, start), cap)

    def _best(
        self, slots: IntArray, cap: IntArray, floor: IntArray, gain: FloatArray | None = None
    ) -> IntArray:
        """int [B]: the optimum over all K vectors, by gain for what is spent.

        gain: [B, depth], of tokens that are there already; None: ours, of tokens yet to be drafted.
        """
        size = len(slots)
        deepest = int(cap.max())
        if deepest == 0:
            return np.zeros(size, np.int64)
        depths = self._depths[:deepest]
        survival = self.acceptance.survival[slots]
        spend: FloatArray | None = None
        if gain is None and self.varying:
            gain, spend = survival[:, PROGRESS, :deepest], survival[:, OFFER, :deepest]
            key = np.minimum.accumulate(gain / np.maximum(spend, 1e-6), axis=1)
        else:
            gain = (survival[:, ACCEPT] if gain is None else gain)[:, :deepest]
            key = gain
        forced = int(floor.sum())
        if forced:
            key = np.where(depths <= floor[:, None], 2.0, key)
        items = ((depths <= cap[:, None]) & (key > 0.01)).ravel().nonzero()[0]
        order = items[(-key.ravel()[items]).argsort(kind="stable")]
        gains = gain.ravel()[order]
        costs = np.ones(len(order)) if spend is None else spend.ravel()[order]
        if self.cost.draft_step > 0.0:
            chosen = self._within_ladder(size, order, gains, costs, deepest, forced)
        else:
            got, used = np.full(len(order) + 1, size, float), np.full(len(order) + 1, size, float)
            got[1:] += gains.cumsum()
            used[1:] += costs.cumsum()
            uneven = (used > size) & (size > 1) & (not self.varying)
            goodput = got / self.cost.times(size, used, ragged=uneven)
            goodput[:forced] = -1.0
            chosen = order[: int(goodput.argmax())]
        return np.bincount(chosen // deepest, minlength=size)

    def _within_ladder(
        self,
        size: int,
        order: IntArray,
        gains: FloatArray,
        costs: FloatArray,
        deepest: int,
        forced: int,
    ) -> IntArray:
        """The items to take where draft steps cost time: the best total for each cap on K."""
        if not len(order):
            return order
        caps = _ladder(deepest)[:, None]
        inside = order % deepest < caps
        inside[:, :forced] = True
        got = size + np.where(inside, gains, 0.0).cumsum(axis=1)
        used = size + np.where(inside, costs, 0.0).cumsum(axis=1)
        steps = np.maximum(caps, (order[:forced] % deepest + 1).max(initial=0))
        goodput = got / self.cost.times(size, used, steps, size > 1 and not self.varying)
        if forced:
            goodput[:, : forced - 1] = -1.0
        row, column = divmod(int(goodput.argmax()), len(order))
        nothing = size / self.cost.time(size, size, self.least_draft_steps)
        if not forced and goodput[row, column] <= nothing:
            return order[:0]
        return order[: column + 1][inside[row, : column + 1]]

    def _best_uniform(self, slots: IntArray, cap: IntArray, floor: IntArray) -> IntArray:
        """int [B]: the best single K; requests whose limit is lower get their limit."""
        ks = np.arange(int(cap.max()) + 1)
        choices = np.clip(ks[:, None], floor, cap)
        value = self._goodputs(slots, choices)
        best: IntArray = choices[int(value.argmax())]
        return best

    def _expect(self, slots: IntArray, choices: IntArray) -> tuple[FloatArray, FloatArray]:
        """Tokens and seconds [choices] of K vectors [choices, B]."""
        size = len(slots)
        expected = self.acceptance.expected
        if self.varying:
            tokens = size + expected[slots, PROGRESS, choices].sum(-1)
            totals = size + expected[slots, OFFER, choices].sum(-1)
        else:
            tokens = size + expected[slots, ACCEPT, choices].sum(-1)
            totals = size + choices.sum(-1)
        most = choices.max(-1)
        uneven = False if self.varying else choices.min(-1) < most
        steps = np.maximum(most, self.least_draft_steps)
        return tokens, self.cost.times(size, totals, steps, uneven)

    def _uneven(self, drafts: IntArray) -> bool:
        """Whether requests of one step verify different numbers of draft tokens by choice.

        Drafts that vary are hardly ever even, so what that costs is part of their step times.
        """
        return not self.varying and len(drafts) > 1 and bool((drafts != drafts[0]).any())

    def _goodputs(self, slots: IntArray, choices: IntArray) -> FloatArray:
        tokens, seconds = self._expect(slots, choices)
        return tokens / seconds

    def _settle(
        self, slots: IntArray, best: IntArray, cap: IntArray, floor: IntArray, ragged: bool
    ) -> IntArray:
        """Keep the K in force unless the best is clearly better (hysteresis).

        Each change makes the next one need more, up to the configured gain; rest undoes that.
        """
        fresh = self._fresh[slots]
        size = len(slots)
        any_fresh = bool(fresh.any())
        if size != self._last_size or any_fresh:
            self._turns = min(self._turns + 1.0, self.config.changes_per_100_steps)
        self._last_size = size
        if self.uniform_only:
            old = best if self._uniform_k < 0 else np.clip(self._uniform_k, floor, cap)
        else:
            old = np.minimum(np.maximum(self._k[slots], floor), cap)
            if any_fresh:
                old = np.where(fresh, best, old)
                self._fresh[slots] = False
        if self._turns >= 1.0 and not np.array_equal(old, best):
            rested = min(self._turns / self.config.changes_per_100_steps, 1.0)
            margin = self.config.hysteresis * (1.0 - 0.8 * rested)
            value = self._goodputs(slots, np.stack([old, best]))
            if value[1] > value[0] * (1.0 + margin) or (
                ragged
                and size > 1
                and self._turns >= 2.0
                and self._one_gains(slots, old, best, margin)
            ):
                self._turns -= 1.0
                self.changes += 1
                old = best
        self._k[slots] = old
        self._uniform_k = int(old.max())
        return old

    def _one_gains(self, slots: IntArray, old: IntArray, best: IntArray, margin: float) -> bool:
        """Whether some request gains by its own change more than `margin` of its tokens."""
        size = len(slots)
        both = np.stack([old, best])
        expected = self.acceptance.expected
        tokens = 1.0 + expected[slots, PROGRESS if self.varying else ACCEPT, both]
        spent = expected[slots, OFFER, both] if self.varying else both
        total, used = tokens[0].sum(), size + spent[0].sum()
        steps = max(int(old.max()), self.least_draft_steps)
        after = used + spent[1] - spent[0]
        uneven = not self.varying
        now = total / self.cost.time(size, used, steps, uneven and used > size)
        swapped = (total + tokens[1] - tokens[0]) / self.cost.times(
            size, after, steps, uneven & (after > size)
        )
        return bool((swapped > now * (1.0 + margin * tokens[0] / total)).any())

    # Probing

    def _probe(self, plan: _Plan) -> Decision:
        """The plan, or sometimes a trial of something else, paid from what was saved for it.

        Either one request that drafts nothing drafts a little, which shows its acceptance, or all K
        are shifted, which shows the time of steps of other sizes (and all acceptances).
        """
        most = self.config.changes_per_100_steps
        self._turns = min(self._turns + most / 100, most)
        since = self.steps - self._probe_at
        burst = self._hot and since <= 2 and self._burst < _BURST
        if self._probed is not None:
            self._probed_before, self._probed = self._probed, None
        else:
            self._probed_before = None
        if self.config.probe_share <= 0.0 or (not burst and since < _PROBE_PAUSE):
            return plan.answer
        if not plan.free.any():
            return plan.answer
        trial, who = self._lift(plan, burst) if burst or not self._shifts_next else (None, None)
        if trial is None:
            trial, who = self._shift(plan)
        if trial is None and self._shifts_next:
            trial, who = self._lift(plan, burst)
        if trial is None or who is None:
            self._probe_at = self.steps
            return plan.answer
        if not self._affordable(plan, trial, burst):
            return plan.answer
        self._probe_at = self.steps
        self._burst = self._burst + 1 if burst else 0
        self._shifts_next = not self._shifts_next
        self._probed = who
        self.probes += 1
        return self._answer(plan.slots, trial, plan.ragged, True)

    def _lift(self, plan: _Plan, burst: bool) -> tuple[IntArray | None, IntArray | None]:
        """A trial where the idle request that was silent longest drafts; more after a success."""
        slots, k = plan.slots, plan.k
        if not plan.idle:
            return None, None
        quiet = np.where(plan.free & (k == 0), self.steps - self._seen_at[slots], -1)
        which = int(quiet.argmax())
        if not burst and quiet[which] < _PROBE_PAUSE:
            return None, None
        trial = k.copy()
        self._probe_k = min(2 * self._probe_k, self.max_k) if burst else 1 + (len(k) < 4)
        if self.uniform_only:
            trial[plan.free] = np.minimum(self._probe_k, plan.cap[plan.free])
            return trial, slots
        trial[which] = min(self._probe_k, int(plan.cap[which]))
        return trial, slots[which : which + 1]

    def _shift(self, plan: _Plan) -> tuple[IntArray | None, IntArray | None]:
        """A trial of the size near the present one whose time is known least, if that is little."""
        slots, k, size = plan.slots, plan.k, len(plan.k)
        lowest = np.where(plan.free, min(self.k_min, int(k.max())), k)
        trials = np.minimum(
            np.maximum(k + _SHIFTS[:, None], lowest), np.where(plan.free, plan.cap, k)
        )
        trials = trials[(trials != k).any(1)]
        if not len(trials):
            return None, None
        spent = self.acceptance.expected[slots, OFFER, trials] if self.varying else trials
        totals = (size + spent.sum(1)).tolist()
        visits = [self.cost.visits(size, total) for total in totals]
        which = visits.index(min(visits))
        if visits[which] >= _KNOWN:
            if self.steps - self._shift_at < _SHIFT_PAUSE:
                return None, None
            self._shift_at = self.steps
        trial = trials[which]
        return trial, slots[trial > k]

    def _affordable(self, plan: _Plan, trial: IntArray, burst: bool) -> bool:
        """Whether what was saved pays for a trial; if so, it is paid."""
        tokens, seconds = self._expect(plan.slots, np.stack([plan.k, trial]))
        plain = float(seconds[0])
        lost = float(seconds[1]) - plain * float(tokens[1] / tokens[0])
        lost = max(lost, 0.004 * plain)
        self._wanted = lost
        limit = self._bank_limit()
        reserve = 0.0 if burst else min(0.5 * _BANK * plain, max(limit - lost, 0.0))
        if self._bank < lost + reserve:
            return False
        self._bank -= lost
        self._probe_seconds += lost
        return True

    def _bank_limit(self) -> float:
        return max(_BANK * self._typical, 1.1 * self._wanted)

    def _trim(
        self,
        slots: IntArray,
        cap: IntArray,
        floor: IntArray,
        offered: IntArray,
        promise: npt.ArrayLike | None,
    ) -> Decision:
        """K given the drafts' lengths: how much of each to verify."""
        cap = np.minimum(cap, offered)
        floor = np.minimum(floor, cap)
        scale = 1.0
        gain = self.acceptance.survival[slots, ACCEPT]
        if promise is not None:
            given = np.asarray(promise, np.float64)[:, : len(self._depths)]
            scale = min(max(float(self._promise_scale[0] / self._promise_scale[1]), 0.02), 1.25)
            gain = np.zeros_like(gain)
            gain[:, : given.shape[1]] = np.minimum(scale * given, 1.0)
        k = self._best(slots, cap, floor, gain)
        if self.uniform_only:
            k = np.minimum(round(float(k.mean())), cap)
        size = len(k)
        until = np.where(self._depths <= k[:, None], gain, 0.0).sum(1)
        if promise is not None:
            self._promised[slots] = until / scale
        most = int(k.max())
        self._plan = None
        self._decision = Decision(
            k.astype(np.int32),
            most,
            most == int(k.min()),
            size + float(until.sum()),
            self.cost.time(size, size + int(k.sum()), ragged=self._uneven(k)),
        )
        return self._decision

    # Learning

    def observe(
        self,
        request_ids: Sequence[str],
        *,
        drafted: npt.ArrayLike,
        accepted: npt.ArrayLike,
        seconds: float,
        pure_decode: bool = True,
        kept: npt.ArrayLike | None = None,
        offered: npt.ArrayLike | None = None,
        allowed: npt.ArrayLike | None = None,
        beyond: npt.ArrayLike | None = None,
        draft_steps: int = 0,
    ) -> None:
        """What a step verified, for the requests that decoded in it; all arrays int [B].

        drafted: verified draft tokens, after any cut. accepted: of these, in a row from the first.
        seconds: of the step; learned only if pure_decode (no prefill, no compilation that is known).
        kept: tokens added to the output, fewer than accepted + 1 where a request ended; None: all.
        offered: what the proposer drafted before any cut; None: the same as drafted.
        allowed: what it was allowed to draft; None: the same as offered.
        beyond: where a draft was cut and what remained was all accepted, whether the next token of
            the target was the first that was cut off: 1, 0, or -1 for not known.
        draft_steps: how many draft steps the proposer made in this step (the next step's drafts).
        """
        size = len(request_ids)
        if size == 0:
            return
        slots = self._find(request_ids)
        drafts = np.asarray(drafted, np.int64)
        hits = np.asarray(accepted, np.int64)
        stay = hits + 1 if kept is None else np.asarray(kept, np.int64)
        self.steps += 1
        verified, tokens = sum(drafts.tolist()), sum(stay.tolist())
        expected = self._foreseen(slots, drafts)
        self._token_errors[0] += 0.02 * (expected - self._token_errors[0])
        self._token_errors[1] += 0.02 * (tokens - self._token_errors[1])
        uneven = self._uneven(drafts)
        predicted = self.cost.time(size, size + verified, draft_steps, uneven)
        if pure_decode:
            self._learn_time(size, verified, seconds, draft_steps, uneven, predicted)
        if verified or offered is not None or beyond is not None:
            self._off += tokens - expected
            self._off_drafts += verified
            self._remember(slots, drafts, hits, stay, offered, allowed, beyond)
        elif self.steps % _PAUSE[size >= _MANY] == 0:
            self._plan = None
        if self.trace is not None:
            step = (tokens, expected, seconds, predicted, pure_decode)
            self._write(request_ids, slots, drafts, hits, *step)

    def _foreseen(self, slots: IntArray, drafts: IntArray) -> float:
        """Tokens to expect of a step that verifies these drafts."""
        table = self.acceptance.expected
        if self.max_k == 0:
            return float(len(slots))
        if len(slots) == 1:
            return 1.0 + float(table[slots[0], ACCEPT, min(int(drafts[0]), self.max_k)])
        within = np.minimum(drafts, self.max_k)
        return len(slots) + float(table[slots, ACCEPT, within].sum())

    def _learn_time(
        self,
        size: int,
        verified: int,
        seconds: float,
        draft_steps: int,
        uneven: bool,
        predicted: float,
    ) -> None:
        if not 0.0 < seconds < math.inf:
            return
        self.cost.observe(size, size + verified, seconds, draft_steps, uneven)
        plain = self.cost.time(size, size)
        if not self._typical:
            self._bank = _BANK * plain
        self._typical += (0.1 if self._typical else 1.0) * (plain - self._typical)
        counted = min(seconds, 3.0 * predicted)
        self._all_seconds += counted
        limit = max(self._bank_limit(), self._bank)
        self._bank = min(self._bank + self.config.probe_share * counted, limit)

    def _remember(
        self,
        slots: IntArray,
        drafts: IntArray,
        hits: IntArray,
        stay: IntArray,
        offered: npt.ArrayLike | None,
        allowed: npt.ArrayLike | None,
        beyond: npt.ArrayLike | None,
    ) -> None:
        ahead = None if beyond is None else np.asarray(beyond, np.int64)
        drew = room = None
        if self.varying:
            drew = drafts if offered is None else np.asarray(offered, np.int64)
            room = drew if allowed is None else np.asarray(allowed, np.int64)
            room = np.minimum(room, self.max_k)
        if self._pending and (
            slots is not self._pending_slots or (ahead is None) != (self._pending[0].beyond is None)
        ):
            self._learn()
        self._pending_slots = slots
        self._pending.append(_Step(drafts, hits, stay, drew, room, ahead))
        probed = self._probed if self._probed is not None else self._probed_before
        if probed is not None:
            mine = np.isin(slots, probed)
            drawn = int(drafts[mine].sum())
            if drawn:
                self._hot = 10 * int(hits[mine].sum()) > 6 * drawn
        hot = probed is not None and self._hot
        surprised = self._off * self._off > _SURPRISE * (1.0 + self._off_drafts)
        enough = len(self._pending) >= _PAUSE[len(slots) >= _MANY]
        if enough or surprised or hot or self.steps <= _YOUNG:
            self._learn()

    def _learn(self) -> None:
        """Take in what is pending; the next `decide` thinks again."""
        if not self._pending:
            return
        slots, steps = self._pending_slots, self._pending
        columns: Any = zip(*steps, strict=True)
        arrays = [None if column[0] is None else np.array(column) for column in columns]
        hits = arrays[1]
        assert hits is not None
        shown = evidence(*arrays)  # type: ignore[arg-type]
        self.acceptance.learn(slots, shown, self.steps - self._learned_at)
        self._learned_at = self.steps
        tried = (shown.last[..., ACCEPT] > 0).any(0)
        self._seen_at[slots[tried]] = self.steps
        promised = self._promised[slots]
        if promised.any():
            self._promise_scale *= 0.99
            self._promise_scale += (float(hits[-1][promised > 0].sum()), float(promised.sum()))
            self._promised[slots] = 0.0
        else:
            self._promise_scale += 0.01 * (4.0 - self._promise_scale)
        steps.clear()
        self._off = self._off_drafts = 0.0
        self._plan = None

    # Reports

    def stats(self) -> dict[str, float]:
        """Numbers for metrics and benchmarks; errors are relative."""
        return {
            "steps": self.steps,
            "changes": self.changes,
            "probes": self.probes,
            "probe_share": self._probe_seconds / self._all_seconds if self._all_seconds else 0.0,
            "time_error": self.cost.error,
            "token_error": abs(self._token_errors[0] / max(self._token_errors[1], 1e-9) - 1.0)
            if self.steps
            else 0.0,
            "draft_step_seconds": self.cost.draft_step,
            "ragged_factor": self.cost.ragged,
        }

    def close(self) -> None:
        """Write the rest of the trace."""
        if self.trace is not None:
            self.trace.close()

    def _write(
        self,
        request_ids: Sequence[str],
        slots: IntArray,
        drafts: IntArray,
        hits: IntArray,
        tokens: int,
        expected: float,
        seconds: float,
        predicted: float,
        pure_decode: bool,
    ) -> None:
        assert self.trace is not None
        rates = self.acceptance.survival[slots, ACCEPT, : min(self.max_k, 4)]
        decision = self._decision
        self.trace.write(
            {
                "step": self.steps,
                "batch": len(slots),
                "pure_decode": pure_decode,
                "requests": list(request_ids),
                "survival": rates.round(3).tolist(),
                "drafted": drafts.tolist(),
                "accepted": hits.tolist(),
                "tokens": tokens,
                "expected_tokens": round(expected, 3),
                "seconds": round(seconds, 6),
                "expected_seconds": round(predicted, 6),
                "next_k": [] if decision is None else decision.k.tolist(),
                "probe": decision is not None and decision.probe,
                "time_error": round(self.cost.error, 4),
            }
        )

    def _grow(self) -> None:
        size = len(self._k)
        for name in ("_k", "_cap", "_fixed", "_start", "_fresh", "_seen_at", "_promised"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(size, old.dtype)]))


def _ladder(deepest: int) -> IntArray:
    """Caps that are tried where draft steps cost time: all up to 8, then every fourth."""
    return np.array(
        [
            *range(1, min(deepest, 8) + 1),
            *range(12, deepest, 4),
            *([deepest] if deepest > 8 else []),
        ]
    )
