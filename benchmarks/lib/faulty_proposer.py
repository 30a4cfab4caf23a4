"""A custom_class proposer that fails on purpose, to see what that costs requests: nothing."""

from __future__ import annotations

import os
from typing import Any

from vllm_specx.config import NgramConfig
from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine.proposers import EngineProposer

FAULTS = "SPECX_TEST_FAULTS"
"""An environment variable: numbers of the steps that fail, separated by commas; `*500`: every 500th."""


class Faulty:
    """The n-gram lookahead, but some steps raise."""

    def __init__(self, proposer: Proposer, faults: str) -> None:
        self._proposer = proposer
        self._every = int(faults[1:]) if faults.startswith("*") else 0
        self._at = set() if self._every else {int(step) for step in faults.split(",") if step}
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """As the proposer's own."""
        self._steps += 1
        if self._steps in self._at or (self._every and self._steps % self._every == 0):
            raise RuntimeError(f"step {self._steps} fails on purpose ({FAULTS})")
        return self._proposer.propose(context)


class FaultyNgram(EngineProposer):
    """For `{"method": "custom_class", "model": "benchmarks.lib.faulty_proposer.FaultyNgram"}`."""

    name = "faulty n-gram"
    remembers = True

    def build(self) -> Proposer:
        return Faulty(self.lookahead(NgramConfig()), os.environ.get(FAULTS, ""))  # type: ignore[return-value]
