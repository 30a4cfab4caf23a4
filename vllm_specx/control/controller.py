"""K for each request of a step: learned from what steps show, weighed (choice.py), kept while it is good
enough, and tried (probing.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_specx.control.acceptance import ACCEPT, AcceptanceModel, evidence
from vllm_specx.control.choice import Choice, IntArray
from vllm_specx.control.cost import CostModel, CostPrior
from vllm_specx.control.decision import Decision
from vllm_specx.control.policy import PRIOR_REJECTION, Rule
from vllm_specx.control.probing import Plan, Probing
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.control.trace import Trace

NO_LIMIT = 1 << 30
_UNEVEN = 0.01  # what different K must promise over one K: the best of many is partly luck
# Steps whose evidence is taken in together, after which K is thought over: few requests, many.
_PAUSE = (10, 6)
_MANY = 16
_SURPRISE = 4.0  # of accepted tokens, squared, a draft token, from which it is done at once
_YOUNG = 24  # steps in which every one is
_ENOUGH = 6.0  # drafts after which a request's starting K is no longer asked
_ENOUGH_POOL = 24.0


class _Step(NamedTuple):
    """What one step showed, not yet taken in; int [B] each."""

    drafts: IntArray
    hits: IntArray
    kept: IntArray
    offered: IntArray | None
    allowed: IntArray | None
    beyond: IntArray | None


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
        least_draft_steps: int = 0,
        most_draft_steps: int | None = None,
    ) -> None:
        """max_k: num_speculative_tokens.

        varying: the proposer may draft fewer tokens than it is allowed (n-gram, suffix).
        least_draft_steps: draft steps that run whatever K is, 0 included.
        most_draft_steps: that run at most; what is drafted beyond takes none. None: one a token.
        """
        self.config = config
        self.max_k = max_k if config.k_max is None else min(max_k, config.k_max)
        self.k_min = min(config.k_min, self.max_k)
        self.uniform_only = config.per_request == "never"
        self.varying = varying
        self.least_draft_steps = least_draft_steps
        depth = max(self.max_k, 1)
        self.acceptance = AcceptanceModel(depth, varying)
        self.cost = CostModel(max_requests, max_requests * (1 + self.max_k), prior)
        self.trace = Trace(config.trace) if config.trace else None
        self.steps = 0
        self.changes = 0
        """Steps in which the K of a request changed by choice while the batch stayed the same."""
        self._choice = Choice(
            self.acceptance, self.cost, depth, varying, least_draft_steps, most_draft_steps
        )
        self._probing = Probing(
            config.probe_share, self._choice, self.k_min, self.max_k, self.uniform_only
        )
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
        self._turns = config.changes_per_100_steps
        self._uniform_k = -1
        self._promise_scale = np.array([4.0, 4.0])
        self._pending: list[_Step] = []
        self._learned_at = 0
        self._off = self._off_drafts = 0.0
        self._pending_slots: IntArray = self._last_slots
        self._plan: Plan | None = None
        self._decision: Decision | None = None
        self._token_errors: list[float] = [0.0, 0.0]
        self.foreseen = (0.0, 0.0)
        """Tokens and seconds expected of the step that was last observed."""

    @property
    def probes(self) -> int:
        """How many steps were trials."""
        return self._probing.count

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
            self._probing.forget()

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
        most = self.config.changes_per_100_steps
        self._turns = min(self._turns + most / 100, most)
        trial = self._probing.trial(plan, self.steps, self._seen_at)
        if trial is None:
            self._decision = plan.answer
        else:
            self._decision = self._answer(slots, trial, plan.ragged, True)
        return self._decision

    def _floor(self, slots: IntArray, cap: IntArray) -> IntArray:
        """int [B]: the least K of each request."""
        floor = np.where(self._fixed[slots] >= 0, cap, self.k_min)
        least: IntArray = np.minimum(floor, cap)
        return least

    def _think(self, slots: IntArray, cap: IntArray) -> Plan:
        """Choose anew, from the present estimates."""
        usable = self._start_cap(slots, cap)
        floor = self._floor(slots, usable)
        if self.uniform_only:
            best, ragged = self._choice.best_uniform(slots, usable, floor), False
        else:
            best, ragged = self._choice.best(slots, usable, floor), True
            if self.config.per_request == "auto" and len(slots) > 1 and best.any():
                even = self._choice.best_uniform(slots, usable, floor)
                values = self._choice.goodputs(slots, np.stack([even, best]))
                if values[0] * (1.0 + _UNEVEN) >= values[1]:
                    best, ragged = even, False
        k = self._settle(slots, best, usable, floor, ragged)
        free = (self._fixed[slots] < 0) & (cap > k)
        idle = bool((free & (k == 0)).any())
        answer = self._answer(slots, k, ragged, False)
        self._plan = Plan(slots, cap, k, answer, ragged, free, idle)
        return self._plan

    def _answer(self, slots: IntArray, k: IntArray, ragged: bool, probe: bool) -> Decision:
        tokens, seconds = self._choice.expect(slots, k[None])
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
            value = self._choice.goodputs(slots, np.stack([old, best]))
            if value[1] > value[0] * (1.0 + margin) or (
                ragged
                and size > 1
                and self._turns >= 2.0
                and self._choice.one_gains(slots, old, best, margin)
            ):
                self._turns -= 1.0
                self.changes += 1
                old = best
        self._k[slots] = old
        self._uniform_k = int(old.max())
        return old

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
        k = self._choice.best(slots, cap, floor, gain)
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
            self.cost.time(size, size + int(k.sum()), ragged=self._choice.uneven(k)),
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
        draft_seconds: float | None = None,
        beside: int = 0,
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
        draft_seconds: what these took of the step, where it was timed.
        beside: rows of the target's forward that were neither requests' own nor drafts.
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
        uneven = self._choice.uneven(drafts)
        read = verified + beside
        predicted = self.cost.time(size, size + read, draft_steps, uneven)
        self.foreseen = expected, predicted
        if pure_decode:
            self._learn_time(size, read, seconds, draft_steps, draft_seconds, uneven, predicted)
        if verified or offered is not None or beyond is not None:
            self._off += tokens - expected
            self._off_drafts += verified
            self._remember(slots, drafts, hits, stay, offered, allowed, beyond)
        elif self.steps % _PAUSE[size >= _MANY] == 0:
            self._plan = None
        if self.trace is not None:
            step = (tokens, expected, seconds, predicted, draft_steps, pure_decode)
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
        read: int,
        seconds: float,
        draft_steps: int,
        draft_seconds: float | None,
        uneven: bool,
        predicted: float,
    ) -> None:
        if not 0.0 < seconds < math.inf:
            return
        self.cost.observe(size, size + read, seconds, draft_steps, uneven, draft_seconds)
        self._probing.earn(seconds, self.cost.time(size, size), predicted)

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
        hot = self._probing.saw(slots, drafts, hits)
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
            "probes": self._probing.count,
            "probe_share": self._probing.spent_share,
            "time_error": self.cost.error,
            "token_error": abs(self._token_errors[0] / max(self._token_errors[1], 1e-9) - 1.0)
            if self.steps
            else 0.0,
            "draft_step_seconds": self.cost.draft_step(1),
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
        draft_steps: int,
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
                "draft_steps": draft_steps,
                "draft_step_seconds": round(self.cost.draft_step(len(request_ids)), 6),
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
