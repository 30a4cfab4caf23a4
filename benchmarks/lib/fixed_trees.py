"""A proposer for cost measurements: chains and trees of as many nodes as the prompt asks for."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import EMPTY_DRAFT, DraftTree
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.engine.trees import Trees

SECONDS = "SPECX_TREE_SECONDS"
"""An environment variable: the file that the times of the parts of verifying are written to."""
NODES = 128
"""A prompt's first token id is how many nodes its drafts have, and below this."""
CHAIN, WRONG, RIGHT = 1, 2, 3
"""A prompt's second token id: chains, trees with nothing right in them, or trees whose last two nodes are
the next two tokens, where the prompt was answered before without drafts."""
LEADS = 256
DEPTH = 6


class FixedTrees:
    """No hidden states, no forwards: what is measured is verifying."""

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = False
    draft_steps: ClassVar[int] = 0

    def __init__(self, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self._wrong = rng.integers(LEADS, vocab_size, NODES).astype(np.int32)
        self._parents = np.full(NODES, -1, np.int32)
        depths = np.ones(NODES, np.int64)
        for j in range(3, NODES):
            open_nodes = np.flatnonzero(depths[:j] < DEPTH)
            self._parents[j] = rng.choice(open_nodes)
            depths[j] = depths[self._parents[j]] + 1
        self._said: dict[bytes, np.ndarray[Any, Any]] = {}

    def propose(self, context: DraftContext) -> list[DraftTree]:
        return [
            self._one(context, i) if context.budgets[i] > 0 else EMPTY_DRAFT
            for i in range(len(context.request_ids))
        ]

    def _one(self, context: DraftContext, i: int) -> DraftTree:
        prompt, length = int(context.num_prompt_tokens[i]), int(context.num_tokens[i])
        row = context.token_ids[context.rows[i], :length]
        nodes, kind = min(int(row[0]), int(context.budgets[i])), int(row[1])
        text = row[2:prompt].tobytes()
        if nodes == 0:
            self._said[text] = row[2:].copy()
            return EMPTY_DRAFT
        if kind == CHAIN:
            return DraftTree.chain(self._wrong[:nodes])
        tokens, parents = self._wrong[:nodes].copy(), self._parents[:nodes].copy()
        if kind == RIGHT and nodes > 2:
            following = self._said.get(text, row)[length - 2 : length]
            if len(following) == 2:
                tokens[-2:] = following
                parents[-2:] = -1, nodes - 2
        return DraftTree(tokens, parents)


class FixedTreeProposer(EngineProposer):
    """For `custom_class`; also says where the time goes, if SPECX_TREE_SECONDS names a file."""

    name = "fixed trees"

    def build(self) -> Proposer:
        self.trees = Trees()
        if path := os.environ.get(SECONDS):
            _Timed(self.trees, Path(path))
        return FixedTrees(self.vocab_size)


class _Timed:
    """Times by nodes in the batch: {nodes: {part: [seconds, ...]}}."""

    def __init__(self, trees: Trees, path: Path) -> None:
        self._path = path
        self._now: dict[str, float] = defaultdict(float)
        self._found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._steps = 0
        self._trees = trees
        sample = trees.sample

        def sampled(*arguments: Any) -> Any:
            plan = trees.attention.plan
            answer = self._during("sample", sample, *arguments)
            self._now["sample"] -= self._now["commit"]
            assert plan is not None
            self._keep(int(plan.rows.sum()) - len(plan.rows))
            return answer

        trees.sample = sampled  # type: ignore[method-assign, assignment]
        for owner, name, part in (
            (trees, "prepare", "plan"),
            (trees.attention, "commit", "commit"),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Any) -> Any:
        return lambda *arguments: self._during(part, function, *arguments)

    def _during(self, part: str, function: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self._now[part] += time.perf_counter() - began

    def _keep(self, nodes: int) -> None:
        for part, seconds in self._now.items():
            self._found[nodes][part].append(seconds)
        self._now.clear()
        self._steps += 1
        if self._steps % 8 == 0:
            medians = {
                count: {part: float(np.median(seconds)) for part, seconds in parts.items()}
                for count, parts in self._found.items()
            }
            self._path.write_text(json.dumps(medians))
