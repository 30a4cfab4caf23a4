"""Draft trees on vLLM's V1 runner: from what was drafted to what was accepted, a step at a time.

A tree travels as an ordinary list of draft tokens, in an order in which every beginning is a tree. Before the
target's forward its nodes get the positions of their depths (`prepare`), in it they see what is above them
(tree_attention.py), and after it the target's tokens are followed down the tree (tree_sampling.py); then
the keys and values of the accepted nodes go to where the next step looks for them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_specx.draft.tree import DraftTree, IntArray
from vllm_specx.engine import tree_sampling
from vllm_specx.engine.tree_attention import TreeAttention, can_be_ours, order_of
from vllm_specx.engine.tree_gpu import to_device
from vllm_specx.engine.tree_plan import plan_step
from vllm_specx.engine.tree_requests import drawn_by_seed, why_a_chain

logger = logging.getLogger(f"vllm.{__name__}")

NODES, ACCEPTED, FALLBACKS = "tree_nodes", "tree_accepted", "tree_fallbacks"
WINDOW, GAINED = "lookahead_rows", "lookahead_accepted"
"""Counts by name, as metrics_worker.COUNTS says."""


class Trees:
    """Of one runner; `EngineProposer.trees`."""

    def __init__(self) -> None:
        self.attention = TreeAttention()
        self.counts: dict[str, Counter[str]] = {
            NODES: Counter(),
            ACCEPTED: Counter(),
            FALLBACKS: Counter(),
            WINDOW: Counter(),
        }
        self.answers: dict[str, IntArray] = {}
        """DraftContext.answers of the step that has run."""
        self.beyond: dict[str, int] = {}
        """Rows of a window at the end of the latest drafts, by request."""
        self._drafted: dict[str, DraftTree] = {}
        self._walked: set[str] = set()
        # Whether the attention layers can have trees; None before the first step.
        self._usable: bool | None = None

    @property
    def running(self) -> bool:
        """Whether the step that runs has a tree in it."""
        return self.attention.plan is not None

    @property
    def usable(self) -> bool:
        """Whether the attention layers can have trees."""
        return bool(self._usable)

    def lists(
        self,
        drafts: Sequence[DraftTree],
        requests: Sequence[str],
        limits: Sequence[int],
        params: Callable[[str], Any],
        vocab_size: int,
    ) -> list[list[int]]:
        """vLLM's lists of draft tokens, trees among them where the request can have one, else its best
        path; nothing for a request with a seed that can have none. limits: of draft tokens, beside which a
        window may stand. params: a request's SamplingParams."""
        for request in requests:
            self._drafted.pop(request, None)
            self._walked.discard(request)
        self.beyond.clear()
        made: list[list[int]] = []
        for tree, request, limit in zip(drafts, requests, limits, strict=True):
            if limit <= 0 or not len(tree.tokens):
                made.append([])
                continue
            if len(tree.tokens) - tree.window > limit:
                tree = tree.prefix(int(limit))
            of_request = params(request)
            seeded = drawn_by_seed(of_request)
            if seeded or not tree.is_chain:
                reason = why_a_chain(of_request) if self._usable else "attention"
                if reason and seeded:
                    made.append([])
                    continue
                if reason:
                    self.counts[FALLBACKS][reason] += 1
                    tree = tree.best_path()
            tree = tree.known(vocab_size)
            if seeded:
                self._walked.add(request)
            if seeded or not tree.is_chain:
                self._drafted[request] = tree
            if tree.window:
                self.beyond[request] = tree.window
            made.append(tree.tokens.tolist())
        return made

    def prepare(self, runner: Any, output: Any, num_scheduled: Any) -> None:
        """After GPUModelRunner._prepare_inputs: the plan, and its nodes' rotary positions. Their slots in
        the cache stay one after the other."""
        if self._usable is None:
            self._attach(runner)
        self.answers = {}
        drafted = self._drafted
        if not drafted:
            self.attention.begin(None)
            return
        batch = runner.input_batch
        size = batch.num_reqs
        plan, nodes, positions = plan_step(
            drafted,
            output.scheduled_spec_decode_tokens,
            batch.req_id_to_index,
            num_scheduled[:size],
            batch.num_computed_tokens_cpu[:size],
            self._walked,
        )
        # A request that has no place in this step keeps its drafts.
        for request in output.scheduled_spec_decode_tokens:
            drafted.pop(request, None)
        for request in [each for each in drafted if each not in runner.requests]:
            del drafted[request]
        self._walked.intersection_update(drafted)
        self.attention.begin(plan)
        if plan is not None:
            rows = sum(tree.tree.window for tree in plan.trees)
            self.counts[NODES][""] += sum(len(tree.tree.tokens) for tree in plan.trees) - rows
            if rows:
                self.counts[WINDOW][""] += rows
            device = runner.positions.device
            runner.positions[to_device(nodes, device)] = to_device(positions, device)

    def sample(
        self, original: Callable[..., Any], runner: Any, logits: torch.Tensor, metadata: Any
    ) -> Any:
        """GPUModelRunner._sample of a step with trees."""
        plan = self.attention.plan
        assert plan is not None
        sampled = tree_sampling.sample(plan, original, runner, logits, metadata)
        self.counts[ACCEPTED][""] += sum(
            node < len(tree.tree.tokens) - tree.tree.window
            for tree, path in zip(plan.trees, plan.paths, strict=True)
            for node in path
        )
        said = tree_sampling.answers(plan, logits)
        requests = runner.input_batch.req_ids
        self.answers = {requests[i]: tokens.astype(np.int32) for i, tokens in said.items()}
        self.attention.commit()
        return sampled

    def in_order(
        self,
        sample_states: torch.Tensor | None,
        states: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """The target's states of the rows that have logits [N, hidden], and those of all rows, with
        accepted nodes where an accepted chain would be. Ends the step."""
        plan = self.attention.plan
        self.attention.begin(None)
        if plan is None:
            return sample_states, tuple(states)
        if sample_states is not None:
            (sample_states,) = order_of(plan.kept(len(sample_states), logits=True), sample_states)
        if not states:
            return sample_states, ()
        return sample_states, order_of(plan.kept(len(states[0]), logits=False), *states)

    def _attach(self, runner: Any) -> None:
        layers: Mapping[str, Any] = runner.compilation_config.static_forward_context
        attention = [layer for layer in layers.values() if hasattr(layer, "impl")]
        self._usable = agreed(can_be_ours(attention, runner.compilation_config))
        if self._usable:
            self.attention.attach(attention)
            logger.info("vllm_specx: draft trees are verified in one forward of the target.")
        else:
            logger.warning(
                "vllm_specx: trees are not verified with this attention backend or this kind of layers yet, so "
                "the best path of each draft tree is verified as a chain."
            )


def agreed(usable: bool) -> bool:
    """Whether all ranks of the target can have trees; each is asked in its first step."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return usable
    answer = torch.tensor(int(usable))
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(answer)


def prepare_inputs(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, num_scheduled_tokens: Any
) -> Any:
    """GPUModelRunner._prepare_inputs: then the plan of the step's trees. Can go when vLLM verifies
    trees."""
    prepared = original(runner, scheduler_output, num_scheduled_tokens)
    trees: Trees | None = getattr(getattr(runner, "drafter", None), "trees", None)
    if trees is not None:
        trees.prepare(runner, scheduler_output, num_scheduled_tokens)
    return prepared
