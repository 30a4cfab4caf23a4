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
_DEEPEN_PAUSE = 40
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
    ) -> None:
        """max_k: num_speculative_tokens.

        varying: the proposer may draft fewer tokens than it is allowed (n-gram, suffix).
        uniform: only one K for the whole batch is possible (asynchronous scheduling).
        """
        self.config = config
        self.max_k = max_k if config.k_max is None else min(max_k, config.k_max)
        self.k_min = min(config.k_min, self.max_k)
        self.uniform_only = uniform or config.per_request == "never"
        self.varying = varying
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
        self._allowance = 0.0
        self._bank = 0.0
        self._wanted = 0.0
        self._typical = 0.0
        self._turns = config.changes_per_100_steps
        self._probe_at = 0
        self._deepen_at = 0
        self._probed = -1
        self._hot = False
        self._probe_k = 0
        self._uniform_k = -1
        self._promise_scale = np.array([4.0, 4.0])
        self._token_errors = np.zeros(128)
        self._token_steps = 0
        self._decision: Decision | None = None
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
            self._last_ids = []
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
            self._free.append(slot)
            self._last_ids = []
            if slot == self._probed:
                self._probed = -1

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
            cap = np.minimum(cap, np.maximum(np.asarray(limits, np.int64), 0))
        if not self.config.enabled or self.config.static_k is not None or self.max_k == 0:
            if not self.config.enabled:
                cap = np.minimum(cap, self.max_k)
            k32 = cap.astype(np.int32)
            return Decision(k32, int(k32.max()), True, 0.0, 0.0)
        cap = self._start_cap(slots, cap)
        floor = np.where(self._fixed[slots] >= 0, cap, min(self.k_min, self.max_k))
        np.minimum(floor, cap, out=floor)
        if offered is not None:
            return self._trim(slots, cap, floor, np.asarray(offered, np.int64), promise)
        survival = self.acceptance.survival[slots]
        gain = survival[:, PROGRESS if self.varying else ACCEPT]
        spend = survival[:, OFFER] if self.varying else np.ones_like(gain)
        if self.uniform_only:
            best, ragged = self._best_uniform(gain, spend, cap, floor), False
        else:
            best, ragged = self._best(gain, spend, cap, floor), True
            if self.config.per_request == "auto" and self.cost.ragged > 1.001 and size > 1:
                even = self._best_uniform(gain, spend, cap, floor)
                value = self._goodputs(gain, spend, np.stack([best, even]), ragged)
                if value[1] >= value[0]:
                    best, ragged = even, False
        k = self._settle(slots, gain, spend, best, cap, floor, ragged)
        k, probing = self._probe(slots, k, cap, gain, spend)
        tokens, seconds = self._expect(gain, spend, k[None], ragged)
        decision = Decision(
            k.astype(np.int32),
            int(k.max()),
            not ragged or bool((k == k[0]).all()),
            float(tokens[0]),
            float(seconds[0]),
            probing,
        )
        self._decision = decision
        return decision

    def _find(self, request_ids: Sequence[str]) -> IntArray:
        ids = request_ids if isinstance(request_ids, list) else list(request_ids)
        if ids == self._last_ids:
            return self._last_slots
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
        self, gain: FloatArray, spend: FloatArray, cap: IntArray, floor: IntArray
    ) -> IntArray:
        """int [B]: the optimum over all K vectors, by gain for what is spent."""
        size = len(gain)
        deepest = int(cap.max())
        if deepest == 0:
            return np.zeros(size, np.int64)
        gain, spend, depths = gain[:, :deepest], spend[:, :deepest], self._depths[:deepest]
        key = gain / np.maximum(spend, 1e-6)
        if self.varying:
            key = np.minimum.accumulate(key, axis=1)
        forced = int(floor.sum())
        if forced:
            key = np.where(depths <= floor[:, None], 2.0, key)
        usable = (depths <= cap[:, None]) & (key > 0.01)
        items = np.flatnonzero(usable)
        order = items[np.argsort(-key.ravel()[items], kind="stable")]
        got = np.empty(len(order) + 1)
        used = np.empty(len(order) + 1)
        got[0], used[0] = size, size
        np.cumsum(gain.ravel()[order], out=got[1:])
        np.cumsum(spend.ravel()[order], out=used[1:])
        got[1:] += size
        used[1:] += size
        if self.cost.draft_step <= 0.0:
            goodput = got / self.cost.times(size, used)
            goodput[:forced] = -1.0
            chosen = order[: int(goodput.argmax())]
        else:
            depth = order % deepest + 1
            caps = _ladder(deepest)
            inside = depth <= caps[:, None]
            got2 = size + np.cumsum(np.where(inside, gain.ravel()[order], 0.0), axis=1)
            used2 = size + np.cumsum(np.where(inside, spend.ravel()[order], 0.0), axis=1)
            goodput2 = got2 / self.cost.times(size, used2, caps[:, None])
            top = int(goodput2.argmax())
            row, column = divmod(top, len(order)) if len(order) else (0, 0)
            none = size / self.cost.time(size, size)
            if not len(order) or (not forced and goodput2[row, column] <= none):
                return np.zeros(size, np.int64)
            take = column + 1
            chosen = order[:take][inside[row, :take]]
            if forced:
                chosen = np.union1d(chosen, order[:forced])
        return np.bincount(chosen // deepest, minlength=size)

    def _best_uniform(
        self, gain: FloatArray, spend: FloatArray, cap: IntArray, floor: IntArray
    ) -> IntArray:
        """int [B]: the best single K; requests whose limit is lower get their limit."""
        ks = np.arange(int(cap.max()) + 1)
        choices = np.clip(ks[:, None], floor, cap)
        if self.uniform_only:
            lowest = int(floor[self._free_to_choose(floor, cap)].max(initial=0))
            choices = choices[lowest:]
        value = self._goodputs(gain, spend, choices, False)
        best: IntArray = choices[int(value.argmax())]
        return best

    def _free_to_choose(self, floor: IntArray, cap: IntArray) -> npt.NDArray[np.bool_]:
        free: npt.NDArray[np.bool_] = floor < cap
        return free

    def _expect(
        self, gain: FloatArray, spend: FloatArray, choices: IntArray, ragged: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Tokens and seconds [choices] of K vectors [choices, B]."""
        size = len(gain)
        inside = self._depths <= choices[:, :, None]
        tokens = size + (inside * gain).sum((1, 2))
        totals = size + (inside * spend).sum((1, 2))
        return tokens, self.cost.times(size, totals, choices.max(1), ragged)

    def _goodputs(
        self, gain: FloatArray, spend: FloatArray, choices: IntArray, ragged: bool
    ) -> FloatArray:
        tokens, seconds = self._expect(gain, spend, choices, ragged)
        return tokens / seconds

    def _settle(
        self,
        slots: IntArray,
        gain: FloatArray,
        spend: FloatArray,
        best: IntArray,
        cap: IntArray,
        floor: IntArray,
        ragged: bool,
    ) -> IntArray:
        """Keep the K in force unless the best is clearly better (hysteresis)."""
        fresh = self._fresh[slots]
        size = len(slots)
        if size != self._last_size or fresh.any():
            self._turns = min(self._turns + 1.0, self.config.changes_per_100_steps)
        self._turns = min(
            self._turns + self.config.changes_per_100_steps / 100, self.config.changes_per_100_steps
        )
        self._last_size = size
        old = np.where(fresh, best, np.clip(self._k[slots], floor, cap))
        if self.uniform_only and size:
            old = np.clip(np.full(size, self._uniform_k), floor, cap)
            if self._uniform_k < 0:
                old = best
        self._fresh[slots] = False
        differs = bool((old != best).any())
        if differs and self._turns >= 1.0:
            value = self._goodputs(gain, spend, np.stack([old, best]), ragged)
            margin = self.config.hysteresis
            if value[1] > value[0] * (1.0 + margin) or (
                ragged and self._turns >= 2.0 and self._one_gains(gain, spend, old, best, margin)
            ):
                self._turns -= 1.0
                self.changes += 1
                old = best
        self._k[slots] = old
        self._uniform_k = int(old.max())
        return old

    def _one_gains(
        self, gain: FloatArray, spend: FloatArray, old: IntArray, best: IntArray, margin: float
    ) -> bool:
        """Whether some request gains by its own change more than `margin` of its tokens."""
        size = len(gain)
        inside = self._depths <= np.stack([old, best])[:, :, None]
        tokens = 1.0 + (inside * gain).sum(2)
        spent = (inside * spend).sum(2)
        total, used = tokens[0].sum(), size + spent[0].sum()
        now = total / self.cost.time(size, used, int(old.max()))
        swapped = (total + tokens[1] - tokens[0]) / self.cost.times(
            size, used + spent[1] - spent[0], int(old.max())
        )
        return bool((swapped > now * (1.0 + margin * tokens[0] / total)).any())

    # Probing

    def _probe(
        self, slots: IntArray, k: IntArray, cap: IntArray, gain: FloatArray, spend: FloatArray
    ) -> tuple[IntArray, bool]:
        """Sometimes one request (or the batch, where K is uniform) tries more than looks best."""
        self._probed = -1
        if self.config.probe_share <= 0.0:
            return k, False
        since = self.steps - self._probe_at
        burst = self._hot and since <= 2
        if not burst and since < _PROBE_PAUSE:
            return k, False
        free = (self._fixed[slots] < 0) & (cap > k)
        idle = free & (k == 0)
        if idle.any():
            quiet = self.steps - self._seen_at[slots]
            which = int(np.where(idle, quiet, -1).argmax())
            if not burst and quiet[which] < _PROBE_PAUSE:
                return k, False
            target = min(2 * self._probe_k if burst else 2, int(cap[which]))
        elif free.any() and self.steps - self._deepen_at >= _DEEPEN_PAUSE:
            which = int(
                np.where(free, self.steps - self._seen_at[slots] - 0.1 * k, -NO_LIMIT).argmax()
            )
            target = min(int(k[which]) + 2, int(cap[which]))
            burst = False
        else:
            return k, False
        if self.uniform_only:
            target = 1 if k.max() == 0 and not burst else target
            trial = np.where(free, np.minimum(target, cap), k)
        else:
            trial = k.copy()
            trial[which] = target
        size = len(k)
        base, more = k.max(), trial.max()
        used = float(size + k.sum())
        plain = self.cost.time(size, used, int(base))
        extra = self.cost.time(size, float(size + trial.sum()), int(more)) - plain
        extra = max(extra, 0.004 * plain)
        reserve = 0.0 if burst else 0.5 * min(self._bank_limit(), _BANK * plain)
        self._wanted = max(extra, 0.0)
        if self._bank < extra + min(reserve, self._bank_limit() - extra):
            return k, False
        self._bank -= extra
        self._probe_seconds += extra
        self._probe_at = self.steps
        if not idle.any():
            self._deepen_at = self.steps
        self._probed = int(slots[which])
        self._probe_k = target
        self.probes += 1
        return trial, True

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
        if promise is None:
            gain = self.acceptance.survival[slots, ACCEPT]
        else:
            scale = min(max(self._promise_scale[0] / self._promise_scale[1], 0.25), 1.25)
            gain = np.minimum(scale * np.asarray(promise, np.float64)[:, : len(self._depths)], 1.0)
        spend = np.ones_like(gain)
        if self.uniform_only:
            k = self._best_uniform(gain, spend, cap, floor)
        else:
            k = self._best(gain, spend, cap, floor)
        k, probing = self._probe(slots, k, cap, gain, spend)
        if promise is not None:
            self._promised[slots] = (np.where(self._depths <= k[:, None], gain, 0.0)).sum(1) / scale
        ragged = not self.uniform_only
        tokens, seconds = self._expect(gain, spend, k[None], ragged)
        decision = Decision(
            k.astype(np.int32), int(k.max()), False, float(tokens[0]), float(seconds[0]), probing
        )
        self._decision = decision
        return decision

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
        verified = int(drafts.sum())
        expected = self._expected_tokens(slots, drafts, size)
        predicted = self.cost.time(size, size + verified, draft_steps)
        if pure_decode:
            self._learn_time(size, drafts, verified, seconds, draft_steps)
        if verified or offered is not None or beyond is not None:
            self._learn_acceptance(slots, drafts, hits, stay, offered, allowed, beyond)
        tokens = int(stay.sum())
        self._token_errors[self._token_steps % 128] = expected - tokens
        self._token_steps += 1
        if self.trace is not None:
            self._write(
                request_ids, slots, drafts, hits, tokens, expected, seconds, predicted, pure_decode
            )

    def _expected_tokens(self, slots: IntArray, drafts: IntArray, size: int) -> float:
        inside = self._depths <= drafts[:, None]
        return size + float((self.acceptance.survival[slots, ACCEPT] * inside).sum())

    def _learn_time(
        self, size: int, drafts: IntArray, verified: int, seconds: float, draft_steps: int
    ) -> None:
        if not 0.0 < seconds < math.inf:
            return
        ragged = size > 1 and verified > 0 and bool((drafts != drafts[0]).any())
        self.cost.observe(size, size + verified, seconds, draft_steps, ragged)
        plain = self.cost.time(size, size)
        self._typical = (
            plain if not self._typical else self._typical + 0.1 * (plain - self._typical)
        )
        counted = min(seconds, 3.0 * self.cost.time(size, size + verified, draft_steps))
        self._all_seconds += counted
        self._bank = min(
            self._bank + self.config.probe_share * counted, max(self._bank_limit(), self._bank)
        )

    def _learn_acceptance(
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
            room = (
                drew if allowed is None else np.minimum(np.asarray(allowed, np.int64), self.max_k)
            )
        shown = evidence(drafts, hits, stay, drew, room, ahead)
        self.acceptance.learn(slots, shown)
        tried = shown.last[:, ACCEPT] > 0
        self._seen_at[slots[tried]] = self.steps
        if self._probed >= 0:
            mine = slots == self._probed
            self._hot = bool((mine & (drafts > 0) & (hits >= drafts)).any())
        promised = self._promised[slots]
        if promised.any():
            self._promise_scale *= 0.99
            self._promise_scale += (float(hits[promised > 0].sum()), float(promised.sum()))
            self._promised[slots] = 0.0

    # Reports

    def stats(self) -> dict[str, float]:
        """Numbers for metrics and benchmarks; errors are relative."""
        return {
            "steps": self.steps,
            "changes": self.changes,
            "probes": self.probes,
            "probe_share": self._probe_seconds / self._all_seconds if self._all_seconds else 0.0,
            "time_error": self.cost.error,
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
