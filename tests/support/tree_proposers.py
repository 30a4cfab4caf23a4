"""Draft trees that a test dictates while the engine runs."""

from __future__ import annotations

import numpy as np

from tests.support.proposers import Scripting
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree


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


class ScriptedTrees(Scripting):
    """Trees by the JSON file that SPECX_TEST_SCRIPT names.

    mode: "nothing" | "trees" (random ones, with as much of `answers` in them as chance gives) | "wrong" (with
    nothing of them) | "mixed" (trees, chains and nothing, by the request's place and the step).
    nodes, depth: of the trees.
    """

    def propose(self, context: DraftContext) -> list[DraftTree]:
        self.read()
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
        answer = self.rest(context, i)
        depth = self.script.get("depth", 6)
        if kind == 1:
            return DraftTree.chain(answer[:depth])
        # By what the request has said, so that every rank and every batch draws the same.
        rng = np.random.default_rng([*prompt[-3:], done, self.script.get("seed", 0)])
        right = [] if mode == "wrong" else answer
        return random_tree(rng, right, self.script["nodes"], depth, context.vocab_size)
