"""Scripted trees whose counts a test can read, and parts of whose verification it can leave out while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.proposers import SCRIPT
from tests.support.tree_proposers import ScriptedTrees
from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine import trees as tree_steps
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.engine.trees import Trees

COUNTS = "SPECX_TEST_COUNTS"


class _Watched(ScriptedTrees):
    """Key `left_out` of the script: "commit", "positions", "mask" or nothing."""

    def __init__(self, path: str, trees: Trees, counts: Path) -> None:
        super().__init__(path)
        self.trees, self.counts = trees, counts
        commit, plan_step = trees.attention.commit, vars(tree_steps)["plan_step"]

        def committed() -> None:
            if self.script.get("left_out") != "commit":
                commit()

        def planned(*arguments: Any) -> Any:
            plan, nodes, positions = plan_step(*arguments)
            if plan is not None and self.script.get("left_out") == "positions":
                flat = [c + np.arange(1, r) for c, r in zip(plan.context, plan.rows, strict=True)]
                positions = np.concatenate(flat)
            if plan is not None and self.script.get("left_out") == "mask":
                causal = [np.tril(np.ones((r, r), np.uint8)).ravel() for r in plan.rows]
                plan.visible = np.concatenate(causal)
            return plan, nodes, positions

        trees.attention.commit = committed  # type: ignore[method-assign]
        vars(tree_steps)["plan_step"] = planned

    def propose(self, context: DraftContext) -> list[DraftTree]:
        drafts = super().propose(context)
        self.counts.write_text(json.dumps(self.trees.counts))
        return drafts


class WatchedTrees(EngineProposer):
    """For `--speculative-config '{"model": "tests.support.tree_watched.WatchedTrees", ...}'`."""

    name = "watched trees"

    def build(self) -> Proposer:
        self.trees = Trees()
        return _Watched(os.environ[SCRIPT], self.trees, Path(os.environ[COUNTS]))
