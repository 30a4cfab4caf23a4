"""The draft lengths that make the most tokens per unit of time, by what is known of both.

Goodput of a choice K_1..K_B is  sum_i E_i(K_i) / T(B, B + sum_i C_i(K_i), max_i K_i)  where E_i is the
expected number of tokens, C_i the expected number of verified draft tokens. The gains of one more
token fall with depth, so for every total the best choice is the largest gains (greedy), and the best
total is found by looking at all of them, 0 included (cf. arXiv 2406.14066, SmartSpec).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specx.control.acceptance import ACCEPT, OFFER, PROGRESS, AcceptanceModel
from vllm_specx.control.cost import CostModel

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Choice:
    """Weighs K vectors by goodput. Requests are slots of the acceptance model: int64 [B]."""

    def __init__(
        self,
        acceptance: AcceptanceModel,
        cost: CostModel,
        depth: int,
        varying: bool,
        least_draft_steps: int,
        most_draft_steps: int | None = None,
    ) -> None:
        """depth: the largest K; the others: see Controller."""
        self.acceptance = acceptance
        self.cost = cost
        self.varying = varying
        self.least_draft_steps = least_draft_steps
        self.most_draft_steps = depth if most_draft_steps is None else most_draft_steps
        self._depths = np.arange(1, depth + 1)

    def expect(self, slots: IntArray, choices: IntArray) -> tuple[FloatArray, FloatArray]:
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
        steps = np.clip(most, self.least_draft_steps, self.most_draft_steps)
        return tokens, self.cost.times(size, totals, steps, uneven)

    def goodputs(self, slots: IntArray, choices: IntArray) -> FloatArray:
        tokens, seconds = self.expect(slots, choices)
        return tokens / seconds

    def uneven(self, drafts: IntArray) -> bool:
        """Whether requests of one step verify different numbers of draft tokens by choice.

        Drafts that vary are hardly ever even, so what that costs is part of their step times.
        """
        return not self.varying and len(drafts) > 1 and bool((drafts != drafts[0]).any())

    def best(
        self, slots: IntArray, cap: IntArray, floor: IntArray, gain: FloatArray | None = None
    ) -> IntArray:
        """int [B]: the optimum over all K vectors, by gain for what is spent.

        gain: [B, depth], of tokens that are there already (no trials are made with those, so their
        times are taken cautiously); None: ours, of tokens yet to be drafted.
        """
        size = len(slots)
        offered = gain is not None
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
        if self.cost.draft_step(size) > 0.0:
            chosen = self._within_ladder(size, order, gains, costs, deepest, forced)
        else:
            got, used = np.full(len(order) + 1, size, float), np.full(len(order) + 1, size, float)
            got[1:] += gains.cumsum()
            used[1:] += costs.cumsum()
            if offered:
                seconds = self.cost.cautious(size, len(order))
            else:
                ragged = (used > size) & (size > 1) & (not self.varying)
                seconds = self.cost.times(size, used, ragged=ragged)
            goodput = got / seconds
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
        steps = np.minimum(steps, self.most_draft_steps)
        goodput = got / self.cost.times(size, used, steps, size > 1 and not self.varying)
        if forced:
            goodput[:, : forced - 1] = -1.0
        row, column = divmod(int(goodput.argmax()), len(order))
        nothing = size / self.cost.time(size, size, self.least_draft_steps)
        if not forced and goodput[row, column] <= nothing:
            return order[:0]
        return order[: column + 1][inside[row, : column + 1]]

    def best_uniform(self, slots: IntArray, cap: IntArray, floor: IntArray) -> IntArray:
        """int [B]: the best single K; requests whose limit is lower get their limit."""
        ks = np.arange(int(cap.max()) + 1)
        choices = np.clip(ks[:, None], floor, cap)
        value = self.goodputs(slots, choices)
        best: IntArray = choices[int(value.argmax())]
        return best

    def one_gains(self, slots: IntArray, old: IntArray, best: IntArray, margin: float) -> bool:
        """Whether some request gains by its own change more than `margin` of its tokens."""
        size = len(slots)
        both = np.stack([old, best])
        expected = self.acceptance.expected
        tokens = 1.0 + expected[slots, PROGRESS if self.varying else ACCEPT, both]
        spent = expected[slots, OFFER, both] if self.varying else both
        total, used = tokens[0].sum(), size + spent[0].sum()
        steps = min(max(int(old.max()), self.least_draft_steps), self.most_draft_steps)
        after = used + spent[1] - spent[0]
        uneven = not self.varying
        now = total / self.cost.time(size, used, steps, uneven and used > size)
        swapped = (total + tokens[1] - tokens[0]) / self.cost.times(
            size, after, steps, uneven & (after > size)
        )
        return bool((swapped > now * (1.0 + margin * tokens[0] / total)).any())


def _ladder(deepest: int) -> IntArray:
    """Caps that are tried where draft steps cost time: all up to 8, then every fourth."""
    return np.array(
        [
            *range(1, min(deepest, 8) + 1),
            *range(12, deepest, 4),
            *([deepest] if deepest > 8 else []),
        ]
    )
