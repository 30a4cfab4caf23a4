"""Whether the rows of lookahead windows bring more tokens than they cost time."""

from __future__ import annotations

from vllm_specx.draft.lengths import FloatArray, step_times

HOPE = 0.5
"""Tokens a step that a window is hoped to bring until it has been tried."""
TRIAL = 64
"""Steps of a trial: n-grams have to be made before one comes true."""
PATIENCE = 200
"""Steps from a trial that did not pay to the next one; after each that does not, twice as many."""
_MOST_PATIENCE = 6400
_MEMORY = 0.98
_MARGIN = 1.1
"""What is off must promise this much more than it costs."""


class SpareRows:
    """Off at first. Deterministic given what it is told.

    Where rows cost more than even what is hoped for would pay, as on CPUs, nothing is ever tried.
    """

    def __init__(self) -> None:
        self.on = False
        self._base = 1.0
        self._gain = 0.0
        self._seen = 0
        self._trial = 0
        self._wait = 0
        self._patience = PATIENCE

    def learn(self, requests: int, tokens: int, windows: int, gained: int) -> None:
        """A step of so many requests has committed so many tokens in all; of these, the windows of so many
        requests brought `gained`."""
        if requests:
            self._base += (1.0 - _MEMORY) * ((tokens - gained) / requests - self._base)
        if windows:
            self._seen += 1
            rate = max(1.0 / self._seen, 1.0 - _MEMORY)
            self._gain += rate * (gained / windows - self._gain)

    def pay(self, requests: int, tokens: int, rows: int, windows: int, costs: FloatArray) -> bool:
        """Whether the next step, of so many requests and draft tokens, should have so many windows, of `rows`
        rows in all. costs: see DraftContext."""
        before, after = step_times(costs, [tokens, tokens + rows])
        price = float(after / before) - 1.0
        worth = windows / (requests * max(self._base, 1.0))
        hoped = worth * max(self._gain, HOPE)
        if not self.on:
            self._wait -= 1
            self.on = worth * self._gain > _MARGIN * price
            if not self.on and self._wait <= 0 and hoped > _MARGIN * price:
                self.on, self._trial = True, TRIAL
                self._gain, self._seen = 0.0, 0
            return self.on
        self._trial -= 1
        if self._trial > 0:
            self.on = hoped > price
        elif worth * self._gain > price:
            self._patience = PATIENCE
        else:
            self.on = False
            self._wait, self._patience = self._patience, min(2 * self._patience, _MOST_PATIENCE)
        return self.on
