"""A proposer whose drafts a test dictates while the engine runs."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import numpy as np

from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine.proposers import EngineProposer

SCRIPT = "SPECX_TEST_SCRIPT"


class Scripting:
    """A proposer that does what a JSON file says, which is read anew when it changes. Key `answers`: prompt ids as
    a JSON list -> answer ids."""

    needs_hidden_states: ClassVar[bool] = True
    needs_verified_rows: ClassVar[bool] = False
    draft_steps: ClassVar[int] = 0

    def __init__(self, path: str) -> None:
        self.path = path
        self.stamp = 0
        self.script: dict[str, Any] = {"mode": "nothing"}
        self.steps = 0

    def read(self) -> None:
        stamp = os.stat(self.path).st_mtime_ns
        if stamp != self.stamp:
            with open(self.path) as file:
                self.script = json.load(file)
            self.stamp = stamp

    def rest(self, context: DraftContext, i: int) -> list[int]:
        """What is left of the answer to request i's prompt."""
        row = context.token_ids[context.rows[i]]
        prompt = row[: context.num_prompt_tokens[i]].tolist()
        done = int(context.num_tokens[i] - context.num_prompt_tokens[i])
        rest: list[int] = self.script["answers"].get(json.dumps(prompt), [])[done:]
        return rest


class ScriptedDrafts(Scripting):
    """Drafts by the JSON file that SPECX_TEST_SCRIPT names.

    mode: "nothing" | "right" | "wrong" (both by `answers`)
    | "chain" (`tokens`, whatever the context) | "short" (one draft too few).
    fail_every: raises in every so manieth step.
    """

    def propose(self, context: DraftContext) -> list[DraftTree]:
        self.read()
        assert context.hidden_states is not None
        assert context.hidden_states.shape[0] == len(context.request_ids)
        mode = self.script["mode"]
        self.steps += 1
        if self.steps % self.script.get("fail_every", self.steps + 1) == 0:
            raise ValueError("the test told the proposer to fail")
        drafts = [DraftTree.chain(self._one(context, i)) for i in range(len(context.request_ids))]
        return drafts[:-1] if mode == "short" else drafts

    def _one(self, context: DraftContext, i: int) -> list[int]:
        mode = self.script["mode"]
        if mode == "nothing":
            return []
        if mode == "chain":
            return list(self.script["tokens"])
        rest = np.asarray(self.rest(context, i)[: int(context.budgets[i])], dtype=np.int64)
        if mode == "wrong":
            rest = (rest + 1) % context.vocab_size
        return [int(token) for token in rest]


class Scripted(EngineProposer):
    """For `--speculative-config '{"model": "tests.support.proposers.Scripted", ...}'`."""

    name = "scripted"

    def build(self) -> Proposer:
        return ScriptedDrafts(os.environ[SCRIPT])
