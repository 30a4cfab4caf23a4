"""What the target says of a batch with draft trees: vLLM's own sampler for all, and walks down the trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_specx.engine.tree_plan import Longs, TreePlan
from vllm_specx.verify.tree import children

PLACEHOLDER = -1
"""vllm/v1/sample/rejection_sampler.py: PLACEHOLDER_TOKEN_ID."""


def sample(
    plan: TreePlan,
    original: Callable[..., Any],
    runner: Any,
    logits: torch.Tensor,
    metadata: Any,
) -> Any:
    """GPUModelRunner._sample of a step with trees; sets plan.paths.

    First vLLM samples as if the trees were not there: one token after the last committed one, chains
    beside them as ever. Where that token is a child, one more is drawn after it, and so on: each with the
    runner's own sampler, and with the request's own random numbers as without drafts. `sampled_token_ids`
    int32 [requests, longest], padded with -1, as the rejection sampler's.
    """
    batch = runner.input_batch
    sampling = batch.sampling_metadata
    without = _without_trees(plan, metadata)
    if sampling.spec_token_ids:
        # Penalties count a request's drafts with what it has said.
        hidden = {tree.request for tree in plan.trees}
        kept = [[] if i in hidden else ids for i, ids in enumerate(sampling.spec_token_ids)]
        batch.sampling_metadata = dataclasses.replace(sampling, spec_token_ids=kept)
    try:
        if any(without.num_draft_tokens):
            output = original(runner, logits, without)
        else:
            output = original(runner, logits[without.bonus_logits_indices], None)
    finally:
        batch.sampling_metadata = sampling
    first = output.sampled_token_ids
    said = _walk(plan, runner, logits, sampling, first[[t.request for t in plan.trees], 0])
    width = max(first.shape[1], *(len(tokens) for tokens in said))
    sampled = torch.full((len(first), width), PLACEHOLDER, dtype=torch.int32, device=first.device)
    sampled[:, : first.shape[1]] = first
    of_trees = torch.tensor([tokens + [PLACEHOLDER] * (width - len(tokens)) for tokens in said])
    sampled[[tree.request for tree in plan.trees]] = of_trees.to(sampled)
    output.sampled_token_ids = sampled
    if output.logprobs_tensors is not None:
        # Their rows are [requests, longest], too; a request that wants them has no tree.
        output.logprobs_tensors = _widened(
            output.logprobs_tensors, len(first), first.shape[1], width
        )
    return output


def _walk(
    plan: TreePlan, runner: Any, logits: torch.Tensor, sampling: Any, first: torch.Tensor
) -> list[list[int]]:
    """What each tree's request says; a draw for all that go on at a time."""
    below = [children(tree.tree) for tree in plan.trees]
    said: list[list[int]] = [[] for _ in plan.trees]
    plan.paths = [[] for _ in plan.trees]
    going, drawn = list(range(len(plan.trees))), first.tolist()
    while going:
        further: list[int] = []
        for n, token in zip(going, drawn, strict=True):
            said[n].append(token)
            path = plan.paths[n]
            child = below[n].get((path[-1] if path else -1, token))
            if child is not None:
                path.append(child)
                further.append(n)
        going = further
        if not going:
            break
        rows = [plan.trees[n].logits_row + 1 + plan.paths[n][-1] for n in going]
        requests = [plan.trees[n].request for n in going]
        output = runner.sampler(
            logits=logits[rows].to(torch.float32), sampling_metadata=_of(sampling, requests)
        )
        drawn = output.sampled_token_ids[:, 0].tolist()
    return said


def answers(plan: TreePlan, logits: torch.Tensor) -> dict[int, Longs]:
    """By place in the batch, the likeliest tokens [asked] after the nodes that are asked about
    (DraftTree.asked), int64: one argmax for all trees."""
    asked = [(tree, tree.tree.asked) for tree in plan.trees if tree.tree.asked]
    if not asked:
        return {}
    rows = [
        np.arange(tree.logits_row + tree.size - count, tree.logits_row + tree.size)
        for tree, count in asked
    ]
    said = logits[torch.from_numpy(np.concatenate(rows))].argmax(-1).cpu().numpy()
    parts = np.split(said, np.cumsum([count for _, count in asked])[:-1])
    return {tree.request: part for (tree, _), part in zip(asked, parts, strict=True)}


def _of(sampling: Any, requests: list[int]) -> Any:
    """The SamplingMetadata of these requests, which have neither penalties nor logits processors."""
    index = torch.tensor(requests)

    def part(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index.to(values.device)]

    generators = {
        n: sampling.generators[i] for n, i in enumerate(requests) if i in sampling.generators
    }
    return dataclasses.replace(
        sampling,
        temperature=part(sampling.temperature),
        top_p=part(sampling.top_p),
        top_k=part(sampling.top_k),
        generators=generators,
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        output_token_ids=[[] for _ in requests],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=type(sampling.logitsprocs)(),
        logprob_token_ids=None,
        spec_token_ids=None,
        thinking_budget_state_holder=None,
    )


def _without_trees(plan: TreePlan, metadata: Any) -> Any:
    """SpecDecodeMetadata as if requests with trees had no drafts, of the same logits."""
    counts = np.asarray(metadata.num_draft_tokens, np.int64)
    starts = np.cumsum(counts + 1) - (counts + 1)
    ends = starts + counts
    rest = counts.copy()
    request = plan.request
    rest[request] = 0
    ends[request] = starts[request]
    of_request = np.repeat(np.arange(len(counts)), counts)
    kept = torch.from_numpy(np.flatnonzero(~np.isin(of_request, request)))
    device = metadata.cu_num_draft_tokens.device

    def moved(values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)

    kept = kept.to(device, non_blocking=True)
    return dataclasses.replace(
        metadata,
        draft_token_ids=metadata.draft_token_ids[kept],
        num_draft_tokens=rest.tolist(),
        cu_num_draft_tokens=moved(np.cumsum(rest)),
        target_logits_indices=metadata.target_logits_indices[kept],
        bonus_logits_indices=moved(ends),
    )


def _widened(tensors: Any, requests: int, width: int, wider: int) -> Any:
    """LogprobsTensors of [requests * width, ...] as [requests * wider, ...]."""

    def padded(values: torch.Tensor) -> torch.Tensor:
        shaped = values.reshape(requests, width, *values.shape[1:])
        full = shaped.new_zeros(requests, wider, *values.shape[1:])
        full[:, :width] = shaped
        return full.flatten(0, 1)

    changed = [padded(x) if torch.is_tensor(x) else x for x in tensors[:3]]
    return type(tensors)(*changed, *tensors[3:])
