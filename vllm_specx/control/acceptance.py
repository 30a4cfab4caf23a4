"""How many draft tokens to expect: conditional rates by depth, request <- pool <- everything.

A rate is kept as a hazard: the probability that depth d fails when depth d - 1 did not. A row's
hazards are those of its parent times one factor (proportional hazards with a gamma prior on the
factor), then corrected depth by depth. So one number, learned from all depths, carries over to
depths that a request has never drafted. Evidence is forgotten exponentially, and faster when it is
contradicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_POOLS = 64
_SPREAD_ROWS = 4
_LATELY = 0.93  # kept of a step after the next
_LATELY_IDLE = 0.98
PRIOR_HAZARD = (0.4, 0.15, 0.49)
"""Of the chains, before anything is measured."""
ACCEPT, OFFER, PROGRESS = 0, 1, 2
"""The chains: a verified token is accepted; an allowed token is drafted; an allowed token is drafted
and accepted. The third is not the product of the others: long drafts are the confident ones."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What B requests show, in one step or in several.

    last: int [..., B, chains], the deepest depth that was tried; 0: no evidence.
    failed: bool [..., B, chains], whether the deepest one failed (all before it succeeded).
    """

    last: IntArray
    failed: npt.NDArray[np.bool_]


def evidence(
    drafted: IntArray,
    accepted: IntArray,
    kept: IntArray,
    offered: IntArray | None = None,
    allowed: IntArray | None = None,
    beyond: IntArray | None = None,
) -> Evidence:
    """Evidence of one step from int [B] arrays, or of several from int [steps, B].

    drafted: tokens verified, after any cut by a grammar or by the scheduler.
    accepted: of these, in a row from the first.
    kept: tokens the step added to the output. A request that ends within its draft keeps no more
        than it accepted: what comes after its end is no evidence.
    offered: tokens the proposer drafted before any cut; None: fixed-length drafts, one chain.
    allowed: the most it could draft. 0 and less: it was not asked.
    beyond: where the draft was cut and all of it was accepted, whether the target's next token was
        the first one cut off: 1 yes, 0 no, -1 not known.
    """
    reached = np.minimum(accepted, kept)
    alive = kept > reached
    rejected = (reached < drafted) & alive
    seen = rejected
    failed = rejected
    if beyond is not None:
        more = (beyond >= 0) & alive & ~rejected
        seen = rejected | more
        failed = rejected | (more & (beyond == 0))
    last = reached + seen
    if offered is None:
        return Evidence(last[..., None], failed[..., None])
    if allowed is None:
        allowed = offered
    short = offered < allowed
    out = short & alive & ~seen & (drafted >= offered)
    return Evidence(
        np.stack([last, np.where(allowed > 0, offered + short, 0), last + out], axis=-1),
        np.stack([failed, short, failed | out], axis=-1),
    )


class _Level:
    """Evidence and hazards of rows on one level: [rows, chains, depth].

    Counts have a long memory and know each depth. What happened lately is compared with what they
    foresaw; beyond chance, it scales the hazards of all depths at once, and shortens the memory.
    """

    def __init__(self, rows: int, chains: int, depth: int, memory: float, strength: float) -> None:
        """memory: steps with evidence; strength: prior failures behind a row's factor."""
        self.keep = 1.0 - 1.0 / memory
        self.strength = np.full(chains, strength)
        self._spread = np.array([[strength], [1.0]]) * np.ones(chains)
        self.counts = np.zeros((rows, 2, chains, depth))  # trials, failures
        self.slow = np.zeros((rows, chains, depth))  # hazards by the counts
        self.hazard = np.zeros((rows, chains, depth))  # scaled by what happened lately
        self.lately = np.zeros((rows, 3, chains))  # failures - expected, its variance, expected

    def grow(self, rows: int) -> None:
        for name in ("counts", "slow", "hazard", "lately"):
            setattr(self, name, _longer(getattr(self, name), rows))

    def clear(self, row: int) -> None:
        self.counts[row] = 0.0
        self.lately[row] = 0.0

    def learn(self, rows: IntArray, new: FloatArray, steps: int, elapsed: int) -> FloatArray:
        """Add new evidence [B, 2, chains, depth] and return the rows' counts.

        steps: how many steps it is from; elapsed: steps since the last call.
        """
        hazard = self.slow[rows]
        tried = new[:, 0, :, 0] > 0
        expected = new[:, 0] * hazard
        total = expected.sum(-1)
        lately = self.lately[rows]
        lately *= np.where(tried, _LATELY**elapsed, _LATELY_IDLE**elapsed)[:, None]
        lately[:, 0] += new[:, 1].sum(-1) - total
        lately[:, 1] += total - (expected * hazard).sum(-1)
        lately[:, 2] += total
        self.lately[rows] = lately
        sigmas = np.abs(lately[:, 0]) / np.sqrt(lately[:, 1] + 0.3)
        keep = np.where(tried, self.keep**steps, 1.0 - 0.1 * (1.0 - self.keep))
        keep *= 1.0 - np.minimum(0.1 * np.maximum(sigmas - 2.0, 0.0), 0.5)
        counts: FloatArray = self.counts[rows]
        counts *= keep[:, None, :, None]
        counts += new
        self.counts[rows] = counts
        return counts

    def estimate(
        self, rows: IntArray, counts: FloatArray, parent: FloatArray, spread: bool = False
    ) -> FloatArray:
        """Hazards [B, chains, depth] from counts and the parents' hazards (same shape).

        spread: first learn from these rows how much rows differ (strength).
        """
        trials, failures = counts[:, 0], counts[:, 1]
        failed, expected = failures.sum(-1), (trials * parent).sum(-1)
        if spread and len(rows) >= _SPREAD_ROWS:
            self._learn_spread(failed, expected)
        strength = self.strength
        factor = (failed + strength) / (expected + strength)
        hazard = factor[..., None] * parent
        np.minimum(hazard, 1.0, out=hazard)
        local = 4.0 * strength[:, None]
        hazard *= local
        hazard += failures
        hazard /= trials + local
        self.slow[rows] = hazard
        off, variance, foreseen = self.lately[rows].transpose(1, 0, 2)
        beyond = np.maximum(np.abs(off) - np.sqrt(variance + 0.3), 0.0)
        hazard *= ((foreseen + np.copysign(beyond, off) + 1.0) / (foreseen + 1.0))[..., None]
        np.minimum(hazard, 0.99, out=hazard)
        self.hazard[rows] = hazard
        return np.asarray(hazard)

    def _learn_spread(self, failed: FloatArray, expected: FloatArray) -> None:
        """Method of moments: the variance of failures is E (1 - h) + E^2 / strength.

        Forgetting halves the first part, which is noise.
        """
        noise = 0.5 * expected.sum(0)
        excess = ((failed - expected) ** 2).sum(0) - noise
        square = (expected**2).sum(0)
        self._spread *= 0.9
        self._spread += np.stack([square, np.maximum(excess, 0.0)])
        self.strength = np.clip(self._spread[0] / (self._spread[1] + 1e-9), 1.5, 25.0)


class AcceptanceModel:
    """Expected tokens by depth for the requests in `slots` (rows that are reused).

    survival: float64 [slots, chains, depth]: probability that depth d is accepted (ACCEPT), is
        drafted when allowed (OFFER), is drafted and accepted (PROGRESS).
    expected: float64 [slots, chains, depth + 1]: its sums, the expected number of tokens for K = 0,
        1, ..., depth, without the one that every step makes.
    """

    def __init__(self, depth: int, varying: bool = True, slots: int = 64) -> None:
        """depth: the largest K; varying: drafts may be shorter than allowed (n-gram, suffix)."""
        self.depth = depth
        self.chains = 3 if varying else 1
        self._depths = np.arange(1, depth + 1)
        self._requests = _Level(slots, self.chains, depth, memory=30.0, strength=2.0)
        self._pools = _Level(MAX_POOLS + 1, self.chains, depth, memory=50.0, strength=3.0)
        self._everything = np.zeros(1, np.int64)
        self._prior = np.full((1, self.chains, depth), PRIOR_HAZARD[ACCEPT])
        if varying:
            self._prior[:, OFFER] = PRIOR_HAZARD[OFFER]
            self._prior[:, PROGRESS] = PRIOR_HAZARD[PROGRESS]
        self._relative = np.ones(MAX_POOLS + 1)
        self._pools.estimate(self._everything, self._pools.counts[:1], self._prior)
        self._names: dict[str, int] = {"": 0}
        self.survival = np.ones((slots, self.chains, depth))
        self.expected = np.zeros((slots, self.chains, depth + 1))
        self.pool_of = np.zeros(slots, np.int64)

    def pool(self, name: str, relative_hazard: float = 1.0) -> int:
        """The row of a pool; names beyond MAX_POOLS share the row of everything.

        relative_hazard: prior probability of a rejection, in units of PRIOR_HAZARD[ACCEPT].
        """
        row = self._names.get(name)
        if row is not None or len(self._names) > MAX_POOLS:
            return row or 0
        row = self._names[name] = len(self._names)
        self._relative[row] = relative_hazard
        self._estimate_pool(row)
        return row

    def start(self, slot: int, pool: int) -> None:
        """A new request: what its pool knows, nothing of its own."""
        if slot >= len(self.survival):
            self._grow(2 * slot + 1)
        self.pool_of[slot] = pool
        self._requests.clear(slot)
        rows = np.array([slot])
        hazard = self._requests.estimate(
            rows, self._requests.counts[rows], self._pools.hazard[[pool]]
        )
        self._renew(rows, hazard)

    def trials(self, slots: IntArray) -> FloatArray:
        """float64 [B]: how many drafts of each request are remembered."""
        counts: FloatArray = self._requests.counts[slots, 0, ACCEPT, 0]
        return counts

    def pool_trials(self, slots: IntArray) -> FloatArray:
        """float64 [B]: how many drafts of each request's pool are remembered."""
        counts: FloatArray = self._pools.counts[self.pool_of[slots], 0, ACCEPT, 0]
        return counts

    def learn(self, slots: IntArray, shown: Evidence, elapsed: int = 0) -> None:
        """Take in the evidence of B requests, of one step or of several in their order.

        elapsed: steps since the last call, with those that showed nothing; 0: as many as are shown.
        """
        last, failed = shown.last[..., None], shown.failed[..., None]
        new = np.empty((*last.shape[:-3], len(slots), 2, self.chains, self.depth))
        new[..., 0, :, :] = self._depths <= last
        new[..., 1, :, :] = (self._depths == last) & failed
        steps = 1
        if new.ndim == 5:
            steps = len(new)
            new = new.sum(0)
        elapsed = max(elapsed, steps)
        self._learn_pools(slots, new, steps, elapsed)
        counts = self._requests.learn(slots, new, steps, elapsed)
        parent = self._pools.hazard[self.pool_of[slots]]
        hazard = self._requests.estimate(slots, counts, parent, spread=True)
        self._renew(slots, hazard)

    def _renew(self, slots: IntArray, hazard: FloatArray) -> None:
        survival = np.multiply.accumulate(1.0 - hazard, axis=-1)
        self.survival[slots] = survival
        expected = np.zeros((*survival.shape[:-1], self.depth + 1))
        np.add.accumulate(survival, axis=-1, out=expected[..., 1:])
        self.expected[slots] = expected

    def _learn_pools(self, slots: IntArray, new: FloatArray, steps: int, elapsed: int) -> None:
        pools = self.pool_of[slots]
        total = new.sum(0)
        if not total[0, :, 0].any():
            return
        rows = set(pools.tolist())
        counts = self._pools.learn(self._everything, total[None], steps, elapsed)
        self._pools.estimate(self._everything, counts, self._prior)
        for row in sorted(rows - {0}):
            mine = total if len(rows) == 1 else new[pools == row].sum(0)
            if mine[0, :, 0].any():
                self._pools.learn(np.array([row]), mine[None], steps, elapsed)
            self._estimate_pool(row)

    def _estimate_pool(self, row: int) -> None:
        parent = self._pools.hazard[:1].copy()
        for chain in (ACCEPT, PROGRESS)[: 1 + (self.chains > 1)]:
            np.minimum(parent[:, chain] * self._relative[row], 0.95, out=parent[:, chain])
        rows = np.array([row])
        self._pools.estimate(rows, self._pools.counts[rows], parent)

    def _grow(self, slots: int) -> None:
        self._requests.grow(slots)
        for name in ("survival", "expected", "pool_of"):
            setattr(self, name, _longer(getattr(self, name), slots))


def _longer(array: Any, rows: int) -> Any:
    new = np.zeros((rows, *array.shape[1:]), array.dtype)
    new[: len(array)] = array
    return new
