"""What drafters with a K/V cache of their own share: who is followed, how chains are drafted, faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_specx.draft.chain_drafts import proposed
from vllm_specx.draft.chain_rule import ChainRule
from vllm_specx.draft.chains import ChainSteps, draw
from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.outcomes import Outcomes
from vllm_specx.draft.page_holders import Holders
from vllm_specx.draft.paged_cache import PagedCache
from vllm_specx.draft.paged_layers import Ahead
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree

DEPTH = 16
"""The longest draft."""


class CachedDrafter(ABC):
    """Implements draft.proposer.TrainedDrafter but for what is read of a step, and with what.

    cache, requests: of the draft. net_bytes: of its weights and their packed copies. acceptance: see
        TrainedDrafter. min_probability, token_cost: as configured.
    """

    needs_hidden_states: ClassVar[bool] = False

    def __init__(
        self,
        cache: PagedCache,
        requests: Holders[Any],
        *,
        device: torch.device,
        net_bytes: int,
        acceptance: Sequence[float],
        min_probability: float | None,
        token_cost: float | None,
    ) -> None:
        self._cache, self._holders = cache, requests
        self._device = device
        self._net_bytes = net_bytes
        self.depth = DEPTH
        self.draft_steps = 0
        self.missed: Collection[str] = ()
        self.stops_early = device.type == "cpu"
        self.acceptance = acceptance
        self._calibration = DepthCalibration(DEPTH, acceptance)
        self._outcomes = Outcomes(self._calibration)
        self.rule = ChainRule(
            self._calibration,
            min_probability=min_probability,
            token_cost=token_cost,
            on_cpu=self.stops_early,
        )

    def memory(self) -> int:
        """Bytes: weights that are the draft's own, their packed copies, and the whole cache."""
        return self._net_bytes + self._cache.nbytes

    def forwards(self, depth: int) -> int:
        """See draft.proposer.TrainedDrafter."""
        return depth

    def cache_use(self) -> dict[str, int]:
        """Pages of the cache: all of them, those that requests hold, and requests known."""
        return {
            "pages": self._cache.pages,
            "used": self._cache.used,
            "requests": len(self._holders),
        }

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, of at most its budget; see draft.proposer.DraftContext. After a fault
        nothing is known of any request: what was half done is not read."""
        self.draft_steps = 0
        try:
            for name, right in self._outcomes.learn(context).items():
                self._holders.judge(name, right)
            for name in context.finished:
                self._holders.drop(name)
            return self._propose(context)
        except Exception:
            self._forget()
            raise

    @abstractmethod
    def _propose(self, context: DraftContext) -> list[DraftTree]:
        """The step's drafts; outcomes are learned and ended requests are gone."""

    @abstractmethod
    def _steps(self, ahead: Ahead, depth: int) -> ChainSteps:
        """Each depth's tokens and probabilities [B]; takes the rows int64 [n] that go on, or None."""

    def _forget(self) -> None:
        self._holders.clear()

    def _asked_depth(self, context: DraftContext, drafting: list[int]) -> int:
        """How deep the places in `drafting` are to be drafted for; who else was asked for is missed."""
        asked = set(np.flatnonzero(context.budgets > 0).tolist())
        self.missed = {context.request_ids[i] for i in asked.difference(drafting)}
        return min(self.depth, int(context.budgets[drafting].max())) if drafting else 0

    def _drafted(
        self, context: DraftContext, drafting: list[int], ahead: Ahead | None, depth: int
    ) -> list[DraftTree]:
        """All drafts of the step. ahead: where the draft's layers are; None: nobody drafts."""
        size = len(context.request_ids)
        if ahead is None:
            return [EMPTY_DRAFT] * size
        goes_on = (
            self.rule.goes_on(context.budgets[drafting], context) if self.stops_early else None
        )
        chains = draw(self._steps(ahead, depth), len(drafting), depth, goes_on)
        self.draft_steps = chains.steps
        made = proposed(chains, drafting, context, self.rule, self._outcomes)
        return [made.get(i, EMPTY_DRAFT) for i in range(size)]

    def _moved(self, places: Any) -> torch.Tensor:
        """NumPy to the draft's device."""
        return torch.from_numpy(places).to(self._device, non_blocking=True)
