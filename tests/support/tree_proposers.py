"""Draft trees that a test dictates while the engine runs, and engines in which a part of verifying is left out."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, ClassVar

import numpy as np

from tests.support.proposers import SCRIPT
from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.engine.trees import Trees

BREAK = "SPECX_TEST_BREAK"


def random_tree(
    rng: np.random.Generator, right: list[int], nodes: int, depth: int, vocab: int
) -> DraftTree:
    """A tree of up to `nodes` nodes with a beginning of `right` in it, at random places of a random
    topological order, among wrong tokens."""
    length = int(rng.integers(0, min(len(right), depth) + 1))
    parents = [i - 1 for i in range(length)]
    tokens = list(right[:length])
    depths = list(range(1, length + 1))
    used: dict[int, set[int]] = {}
    for i, parent in enumerate(parents):
        used.setdefault(parent, set()).add(tokens[i])
    if length < len(right):
        used.setdefault(length - 1, set()).add(right[length])
    for _ in range(4 * nodes):
        if len(tokens) >= nodes:
            break
        parent = int(rng.integers(-1, len(tokens)))
        below = 1 if parent < 0 else depths[parent] + 1
        token = int(rng.integers(0, vocab))
        if below > depth or token in used.setdefault(parent, set()):
            continue
        used[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        depths.append(below)
    order: list[int] = []
    ready = [j for j, parent in enumerate(parents) if parent < 0]
    while ready:
        order.append(ready.pop(int(rng.integers(len(ready)))))
        ready += [j for j, parent in enumerate(parents) if parent == order[-1]]
    place = {node: k for k, node in enumerate(order)}
    return DraftTree(
        np.array([tokens[node] for node in order], np.int32),
        np.array([place.get(parents[node], -1) for node in order], np.int32),
    )


class ScriptedTrees:
    """Trees by the JSON file that SPECX_TEST_SCRIPT names, read anew when it changes.

    mode: "nothing" | "trees" (random ones, with as much of `answers` in them as chance gives) | "wrong" (with
    nothing of them) | "mixed" (trees, chains and nothing, by the request's place and the step).
    nodes, depth: of the trees. answers: prompt ids as a JSON list -> answer ids.
    """

    needs_hidden_states: ClassVar[bool] = True
    needs_verified_rows: ClassVar[bool] = False
    draft_steps: ClassVar[int] = 0

    def __init__(self, path: str) -> None:
        self.path = path
        self.stamp = 0
        self.script: dict[str, Any] = {"mode": "nothing"}
        self.steps = 0

    def propose(self, context: DraftContext) -> list[DraftTree]:
        stamp = os.stat(self.path).st_mtime_ns
        if stamp != self.stamp:
            with open(self.path) as file:
                self.script = json.load(file)
            self.stamp = stamp
        self.steps += 1
        return [self._one(context, i) for i in range(len(context.request_ids))]

    def _one(self, context: DraftContext, i: int) -> DraftTree:
        mode = self.script["mode"]
        kind = (self.steps + i) % 3 if mode == "mixed" else 0
        if mode == "nothing" or kind == 2:
            return DraftTree.chain([])
        row = context.token_ids[context.rows[i]]
        done = int(context.num_tokens[i] - context.num_prompt_tokens[i])
        prompt = row[: context.num_prompt_tokens[i]].tolist()
        answer = self.script["answers"].get(json.dumps(prompt), [])[done:]
        depth = self.script.get("depth", 6)
        if kind == 1:
            return DraftTree.chain(answer[:depth])
        # By what the request has said, so that every rank and every batch draws the same.
        rng = np.random.default_rng([*prompt[-3:], done, self.script.get("seed", 0)])
        right = [] if mode == "wrong" else answer
        return random_tree(rng, right, self.script["nodes"], depth, context.vocab_size)


class TreeScripted(EngineProposer):
    """For `--speculative-config '{"model": "tests.support.tree_proposers.TreeScripted", ...}'`."""

    name = "scripted trees"

    def build(self) -> Proposer:
        self.trees = Trees()
        self.specx_counts = self.trees.counts
        _break(self.trees, os.environ.get(BREAK, ""))
        return ScriptedTrees(os.environ[SCRIPT])


def _break(trees: Trees, what: str) -> None:
    if what == "commit":
        trees.attention.commit = lambda: None  # type: ignore[method-assign]
    elif what in ("positions", "mask"):
        module: Any = sys.modules[Trees.__module__]
        plan_step = module.plan_step

        def broken(*args: Any) -> Any:
            plan, nodes, positions = plan_step(*args)
            if plan is not None and what == "positions":
                positions = np.concatenate(
                    [c + np.arange(1, r) for c, r in zip(plan.context, plan.rows, strict=True)]
                )
            elif plan is not None:
                masks = [np.tril(np.ones((r, r), np.uint8)).ravel() for r in plan.rows]
                plan.visible = np.concatenate(masks)
            return plan, nodes, positions

        module.plan_step = broken
