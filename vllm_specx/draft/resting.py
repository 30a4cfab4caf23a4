"""Whether a draft is hardly ever asked for, so that reading everything for it would be wasted."""

from __future__ import annotations

from vllm_specx.draft.proposer import DraftContext

_MEMORY = 0.95
_SELDOM = 0.1
"""Share of the requests that are asked for drafts, below which the draft rests. Above what trying it now
and then comes to (draft.gate)."""


class Resting:
    """Follows how many of the requests that could be drafted for are."""

    def __init__(self) -> None:
        self._share = 1.0

    def learn(self, context: DraftContext) -> None:
        """One more step."""
        able = [bool(sampled) for sampled in context.sampled]
        if any(able):
            share = float((context.budgets[able] > 0).mean())
            self._share = _MEMORY * self._share + (1.0 - _MEMORY) * share

    def __bool__(self) -> bool:
        return self._share < _SELDOM
