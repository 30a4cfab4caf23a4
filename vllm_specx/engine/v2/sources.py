"""n-gram lookahead or trained draft, per request and step, chosen on the device.

What V1's Gate (draft/gate.py) weighs before drafting is weighed here after it: nothing may wait for the
device, so both draft always, and both are judged by every token that the target commits, whichever was
verified. The choice is the draft of which more tokens are expected to be accepted, at the same price.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specx.engine.v2.ngram_torch import WINDOWS

DEPTHS = 8
"""Depths that are told apart; deeper ones are taken together."""
FIRST_BY_MATCH = (0.15, 0.3, 0.5, 0.7, 0.85)
"""Acceptance of an n-gram draft's first token to begin with, by the longest of WINDOWS that matched."""
_PRIOR = 10.0
"""Outcomes that the start is worth."""
_PRIOR_OF_ALL = 4.0
"""Outcomes that what is known of all requests is worth beside a request's own."""
_MEMORY = 0.95
"""What a request's evidence is worth after one more outcome."""
_MEMORY_OF_ALL = 0.998
NGRAM, TRAINED = 0, 1
_TRAINED_CONTEXT = len(WINDOWS)
CONTEXTS = _TRAINED_CONTEXT + 1


def starting_rates(depth: int, acceptance: Sequence[float]) -> torch.Tensor:
    """float32 [CONTEXTS, depth]: acceptance at each depth given the one before. acceptance: of the trained
    draft, as measured in training; missing depths are taken to be as good as the last known."""
    steps = torch.arange(depth)
    rates = torch.empty(CONTEXTS, depth)
    for context, first in enumerate(FIRST_BY_MATCH):
        # What has come true once comes true more easily again.
        rates[context] = 1.0 - (1.0 - first) * 0.6 ** steps.clamp(max=2)
    known = [min(max(a, 0.02), 0.98) for a in acceptance[:depth]] or [0.5]
    rates[_TRAINED_CONTEXT] = torch.tensor(known + [known[-1]] * (depth - len(known)))
    return rates


class Sources:
    """Estimates on the device, updated in place by static shapes; B requests, R rows, K slots.

    Counts of outcomes are whole numbers until they fade, so their sums do not depend on the order in which
    a device adds them: every tensor-parallel rank chooses alike.
    """

    def __init__(
        self, rows: int, max_k: int, acceptance: Sequence[float], device: torch.device
    ) -> None:
        """rows: of the runner's request states; max_k: slots of a draft at most."""
        depth = min(DEPTHS, max_k)
        self.start = starting_rates(depth, acceptance).to(device)
        with torch.device(device):
            # [tried, right]: by context and depth of all requests; by row, context and depth of each.
            self.all = torch.stack([torch.full_like(self.start, _PRIOR), self.start * _PRIOR])
            self.own = torch.zeros(2, rows, CONTEXTS, depth)
            self.guesses = torch.full((rows, 2, max_k), -1, dtype=torch.int64)
            self.contexts = torch.zeros(rows, 2, dtype=torch.int64)
            self.at = torch.full((rows,), -1, dtype=torch.int32)
            self.alone = torch.zeros(rows, dtype=torch.bool)
            self._slots = torch.arange(max_k)
            self._depth_of = self._slots.clamp(max=depth - 1)
            self._fold = torch.nn.functional.one_hot(self._depth_of, depth).float()
            self._bounds = torch.tensor(WINDOWS)

    def admit(self, row: int, alone: bool) -> None:
        """Another request takes a row. alone: what is known of other requests must not count for it."""
        self.at[row].fill_(-1)
        self.own[:, row].zero_()
        self.alone[row].fill_(alone)

    def learn(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Judge the drafts of the last step by what this one committed.

        rows: int64 [B]; tokens: int32 [R, L]; lengths: int32 [R], committed tokens, those of this step
        among them; num_sampled: int [B], how many these are.
        """
        length = lengths[rows]
        before = length - num_sampled
        known = (self._slots < num_sampled[:, None]) & (self.at[rows] == before)[:, None]
        places = (before[:, None] + self._slots).clamp(max=tokens.shape[1] - 1).long()
        truth = tokens[rows[:, None], places]
        guesses = self.guesses[rows]
        tried = known[:, None] & (guesses >= 0)
        agreed = (tried & (guesses == truth[:, None])).cumprod(-1)
        reached = torch.nn.functional.pad(agreed[..., :-1], (1, 0), value=1)
        outcomes = torch.stack([tried * reached, agreed]).float() @ self._fold  # [2, B, 2, depth]
        contexts = self.contexts[rows]

        new = torch.zeros_like(self.all)
        new.index_add_(1, contexts.flatten(), outcomes.flatten(1, 2))
        self.all.mul_(_MEMORY_OF_ALL ** new[0]).add_(new)
        # A request's two contexts differ, and so do rows: no place is written twice.
        own = self.own[:, rows[:, None], contexts]
        self.own[:, rows[:, None], contexts] = own * _MEMORY ** outcomes[0] + outcomes

    def promise(
        self, rows: torch.Tensor, drafts: torch.Tensor, contexts: torch.Tensor
    ) -> torch.Tensor:
        """float32 [B, 2]: tokens of each draft that are expected to be accepted. drafts: int64 [B, 2, K], -1
        where there is none; contexts: int64 [B, 2]."""
        pooled = self.all[1] / self.all[0]
        alone = self.alone[rows, None, None]
        rates = torch.where(alone, self.start[contexts], pooled[contexts])
        tried, right = self.own[:, rows[:, None], contexts]
        rates = (right + _PRIOR_OF_ALL * rates) / (tried + _PRIOR_OF_ALL)
        by_slot = rates[..., self._depth_of[: drafts.shape[-1]]]
        reached: torch.Tensor = ((drafts >= 0) * by_slot).cumprod(-1)
        return reached.sum(-1)

    def choose(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        matched: torch.Tensor,
        found: torch.Tensor,
        trained: torch.Tensor,
    ) -> torch.Tensor:
        """int64 [B, K]: each request's draft, -1 where it ends; both are remembered for learn().

        matched: int32 [B], lengths of the matches behind found, int64 [B, K], -1 where there is no token;
        trained: int64 [B, depth], depth at most K; rows, lengths: as in learn().
        """
        size, k = found.shape
        depth = trained.shape[1]
        both = torch.full(
            (size, 2, self.guesses.shape[2]), -1, dtype=torch.int64, device=rows.device
        )
        both[:, NGRAM, :k] = found
        both[:, TRAINED, :depth] = trained
        context = (matched[:, None] >= self._bounds).sum(1).clamp(min=1) - 1
        contexts = torch.stack([context, torch.full_like(context, _TRAINED_CONTEXT)], 1)
        self.guesses[rows] = both
        self.contexts[rows] = contexts
        self.at[rows] = lengths[rows]
        value = self.promise(rows, both[..., :k], contexts)
        # Where both say the same, what the n-gram says beyond the trained draft's end costs nothing more.
        same = (found[:, :depth] == trained).all(1)
        by_ngram = same | (value[:, NGRAM] >= value[:, TRAINED])
        return torch.where(by_ngram[:, None], found, both[:, TRAINED, :k])
