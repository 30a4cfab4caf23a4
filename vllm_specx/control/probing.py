"""Trials of another K than the best known: what is never drafted shows neither acceptance nor time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specx.control.acceptance import OFFER
from vllm_specx.control.choice import Choice, IntArray
from vllm_specx.control.decision import Decision

_BANK = 0.4  # saved probing time, in steps
_PAUSE = 4  # steps between probes without success
_BURST = 3  # most probes one after the other, after a success
_SHIFTS = np.array([1, -1, 2, -2])
_KNOWN = 6.0  # measurements after which the time of a step of some size is known
_SHIFT_PAUSE = 100  # steps between shifts where all sizes near the present one are known


@dataclass(slots=True)
class Plan:
    """The last choice, which stands until something is new."""

    slots: IntArray
    cap: IntArray
    k: IntArray
    answer: Decision
    ragged: bool
    """Whether requests may have different K by choice."""
    free: npt.NDArray[np.bool_]
    """Requests whose K is not fixed and could be more."""
    idle: bool
    """Whether one of these drafts nothing."""


class Probing:
    """Saves a share of the time that passes, and pays for trials from it."""

    def __init__(self, share: float, choice: Choice, k_min: int, max_k: int, uniform: bool) -> None:
        """share: of the time; uniform: only one K for the whole batch is possible."""
        self.count = 0
        self._share = share
        self._choice = choice
        self._k_min = k_min
        self._max_k = max_k
        self._uniform = uniform
        self._bank = 0.0
        self._wanted = 0.0
        self._typical = 0.0
        self._last = 0
        self._last_shift = 0
        self._shifts_next = True
        self._burst = 0
        self._probed: IntArray | None = None
        self._probed_before: IntArray | None = None
        self._k = 0
        self._hot = False
        self._spent = 0.0
        self._passed = 0.0

    @property
    def spent_share(self) -> float:
        """Of all time, what trials are thought to have cost."""
        return self._spent / self._passed if self._passed else 0.0

    def trial(self, plan: Plan, step: int, seen_at: IntArray) -> IntArray | None:
        """int [B]: a K vector to try in place of the plan's, if it can be paid; most times None.

        Either one request that drafts nothing drafts a little, which shows its acceptance, or all K
        are shifted, which shows the time of steps of other sizes (and all acceptances).
        seen_at: int [slots], the step in which each request was last drafted for.
        """
        since = step - self._last
        burst = self._hot and since <= 2 and self._burst < _BURST
        if self._probed is not None:
            self._probed_before, self._probed = self._probed, None
        else:
            self._probed_before = None
        if self._share <= 0.0 or (not burst and since < _PAUSE):
            return None
        if not plan.free.any():
            return None
        trial, who = (
            self._lift(plan, burst, step, seen_at)
            if burst or not self._shifts_next
            else (None, None)
        )
        if trial is None:
            trial, who = self._shift(plan, step)
        if trial is None and self._shifts_next:
            trial, who = self._lift(plan, burst, step, seen_at)
        if trial is None or who is None:
            self._last = step
            return None
        if not self._affordable(plan, trial, burst):
            return None
        self._last = step
        self._burst = self._burst + 1 if burst else 0
        self._shifts_next = not self._shifts_next
        self._probed = who
        self.count += 1
        return trial

    def saw(self, slots: IntArray, drafts: IntArray, hits: IntArray) -> bool:
        """What came of a step; whether it showed a trial that went well."""
        probed = self._probed if self._probed is not None else self._probed_before
        if probed is None:
            return False
        mine = np.isin(slots, probed)
        drawn = int(drafts[mine].sum())
        if drawn:
            self._hot = 10 * int(hits[mine].sum()) > 6 * drawn
        return self._hot

    def forget(self) -> None:
        """A request has ended; its slot may mean another one soon."""
        self._probed = self._probed_before = None

    def earn(self, seconds: float, plain: float, predicted: float) -> None:
        """A step has passed. plain: the time of one without drafts; predicted: of this one."""
        if not self._typical:
            self._bank = _BANK * plain
        self._typical += (0.1 if self._typical else 1.0) * (plain - self._typical)
        counted = min(seconds, 3.0 * predicted)
        self._passed += counted
        limit = max(self._limit(), self._bank)
        self._bank = min(self._bank + self._share * counted, limit)

    def _lift(
        self, plan: Plan, burst: bool, step: int, seen_at: IntArray
    ) -> tuple[IntArray | None, IntArray | None]:
        """A trial where the idle request that was silent longest drafts; more after a success."""
        slots, k = plan.slots, plan.k
        if not plan.idle:
            return None, None
        quiet = np.where(plan.free & (k == 0), step - seen_at[slots], -1)
        which = int(quiet.argmax())
        if not burst and quiet[which] < _PAUSE:
            return None, None
        trial = k.copy()
        self._k = min(2 * self._k, self._max_k) if burst else 1 + (len(k) < 4)
        if self._uniform:
            trial[plan.free] = np.minimum(self._k, plan.cap[plan.free])
            return trial, slots
        trial[which] = min(self._k, int(plan.cap[which]))
        return trial, slots[which : which + 1]

    def _shift(self, plan: Plan, step: int) -> tuple[IntArray | None, IntArray | None]:
        """A trial of the size near the present one whose time is known least, if that is little."""
        slots, k, size = plan.slots, plan.k, len(plan.k)
        lowest = np.where(plan.free, min(self._k_min, int(k.max())), k)
        trials = np.minimum(
            np.maximum(k + _SHIFTS[:, None], lowest), np.where(plan.free, plan.cap, k)
        )
        trials = trials[(trials != k).any(1)]
        if not len(trials):
            return None, None
        spent = (
            self._choice.acceptance.expected[slots, OFFER, trials]
            if self._choice.varying
            else trials
        )
        totals = (size + spent.sum(1)).tolist()
        visits = [self._choice.cost.visits(size, total) for total in totals]
        which = visits.index(min(visits))
        if visits[which] >= _KNOWN:
            if step - self._last_shift < _SHIFT_PAUSE:
                return None, None
            self._last_shift = step
        trial = trials[which]
        return trial, slots[trial > k]

    def _affordable(self, plan: Plan, trial: IntArray, burst: bool) -> bool:
        """Whether what was saved pays for a trial; if so, it is paid."""
        tokens, seconds = self._choice.expect(plan.slots, np.stack([plan.k, trial]))
        plain = float(seconds[0])
        lost = float(seconds[1]) - plain * float(tokens[1] / tokens[0])
        lost = max(lost, 0.004 * plain)
        self._wanted = lost
        limit = self._limit()
        reserve = 0.0 if burst else min(0.5 * _BANK * plain, max(limit - lost, 0.0))
        if self._bank < lost + reserve:
            return False
        self._bank -= lost
        self._spent += lost
        return True

    def _limit(self) -> float:
        return max(_BANK * self._typical, 1.1 * self._wanted)
