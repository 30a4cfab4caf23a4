"""One step: the runner's state -> DraftContext -> proposer -> drafts in vLLM's lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_specx.config import ConfigError
from vllm_specx.control.policy import opts_out
from vllm_specx.draft.proposer import DraftContext, VerifiedRows
from vllm_specx.draft.tree import DraftTree, IntArray
from vllm_specx.engine.plan import DRAFT_STEPS, PLAN, WINDOW_ROWS, DraftPlan
from vllm_specx.engine.pools import pool_of, state_key
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.engine.tree_requests import why_a_chain


@dataclass(frozen=True, slots=True)
class _Known:
    """What does not change while a request lives, or until a session of streamed input gets its next
    chunk, which makes all before it the prompt. `state` is the runner's object for it; a last_length
    of 0: it is never drafted for. chain: it can have no trees."""

    state: Any
    num_prompt_tokens: int
    pool: str | None
    state_key: str | None
    last_length: int
    chain: bool = True


def propose_draft_token_ids(
    original: Callable[..., Any],
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
    aux_hidden_states: Any,
    spec_decode_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """GPUModelRunner.propose_draft_token_ids: with one of our proposers, ours; else vLLM's own.

    vLLM's `custom_class` passes neither request ids, K nor hidden states, hence this seam; it can
    go when it does.
    """
    drafter = runner.drafter
    if not isinstance(drafter, EngineProposer):
        return original(
            runner,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            *args,
            **kwargs,
        )
    runner._draft_probs = None
    runner._draft_prob_req_ids = None
    proposer = drafter.proposer
    assert proposer is not None, "load_model was not called"
    sample_states = sample_hidden_states
    states = drafter.states(hidden_states, aux_hidden_states)
    if drafter.trees is not None:
        sample_states, states = drafter.trees.in_order(sample_states, states)

    def step() -> list[list[int]]:
        context = build_context(
            drafter,
            runner,
            scheduler_output,
            sampled_token_ids,
            sample_states,
            spec_decode_metadata,
            states,
        )
        drafts = lists_of(drafter, proposer.propose(context), context)
        drafter.made(proposer.draft_steps)
        drafter.ended.clear()
        return drafts

    nothing: list[list[int]] = [[] for _ in sampled_token_ids]
    drafts = drafter.guard.run(step, nothing)
    drafter.proposed(runner.input_batch.req_ids[: len(drafts)], drafts, runner.requests)
    return drafts


def setup_auxiliary_states(original: Callable[..., None], runner: Any) -> None:
    """GPUModelRunner._setup_eagle3_aux_hidden_state_outputs, after the target is loaded: the
    auxiliary states of our proposers, which vLLM only gives to its own. Can go when custom_class can
    ask for them."""
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, EngineProposer):
        return original(runner)
    if not drafter.aux_layers:
        return None
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(runner.get_model()):
        raise ConfigError(
            f"{type(runner.get_model()).__name__} gives no states of its inner layers in this vLLM, and "
            f"'{drafter.name}' needs them; use an EAGLE-1 or Medusa draft, or specx:ngram."
        )
    runner.use_aux_hidden_state_outputs = True
    runner.model.set_aux_hidden_state_layers(drafter.aux_layers)
    return None


def take_draft_token_ids(original: Callable[..., Any], runner: Any) -> Any:
    """GPUModelRunner.take_draft_token_ids, what the scheduler is given of a step's drafts: with how
    many forwards they took, so that their cost can be told from that of verifying, and which of their
    tokens are rows of windows, which cost as much and are not there to be accepted."""
    taken = original(runner)
    drafter = getattr(runner, "drafter", None)
    if taken is not None and isinstance(drafter, EngineProposer):
        setattr(taken, DRAFT_STEPS, drafter.draft_steps)
        drafter.draft_steps = 0
        if drafter.trees is not None:
            setattr(taken, WINDOW_ROWS, drafter.trees.beyond)
            drafter.trees.beyond = {}
    return taken


def input_fits_in_drafter(
    original: Callable[..., bool], runner: Any, common_attn_metadata: Any
) -> bool:
    """GPUModelRunner._input_fits_in_drafter: our budgets respect max_model_len request by request,
    where vLLM stops drafting (and verifies zeros) for the whole batch once one request is near it."""
    if isinstance(getattr(runner, "drafter", None), EngineProposer):
        return common_attn_metadata is not None
    return original(runner, common_attn_metadata)


def build_context(
    drafter: EngineProposer,
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Sequence[Sequence[int]],
    sample_hidden_states: torch.Tensor,
    spec_decode_metadata: Any,
    states: tuple[torch.Tensor, ...],
) -> DraftContext:
    """The DraftContext of this step; see its docstring for shapes. states: of all rows."""
    batch = runner.input_batch
    proposer = drafter.proposer
    assert proposer is not None
    size = len(sampled_token_ids)
    request_ids = batch.req_ids[:size]
    num_tokens = batch.num_tokens_no_spec[:size]
    known, finished = _follow(drafter, runner, request_ids)
    most = np.fromiter((k.last_length for k in known), np.int64, size) - num_tokens - 1
    budgets = np.clip(most, 0, scheduler_output.num_spec_tokens_to_schedule).astype(np.int32)
    plan: DraftPlan | None = getattr(scheduler_output, PLAN, None)
    reading: list[int] = []
    for i, sampled in enumerate(sampled_token_ids):
        if not sampled:
            if budgets[i]:
                reading.append(i)
            budgets[i] = 0
        elif plan is not None:
            budgets[i] = min(budgets[i], plan.limits.get(request_ids[i], budgets[i]))
    return DraftContext(
        request_ids=request_ids,
        rows=np.arange(size, dtype=np.int32),
        token_ids=batch.token_ids_cpu,
        num_tokens=num_tokens,
        num_prompt_tokens=batch.num_prompt_tokens[:size],
        sampled=sampled_token_ids,
        budgets=budgets,
        temperatures=batch.temperature_cpu[:size],
        pools=[k.pool for k in known],
        finished=finished,
        vocab_size=drafter.vocab_size,
        costs=None if plan is None else plan.costs,
        draft_cost=None if plan is None else plan.draft_cost,
        hidden_states=(
            _last_accepted_rows(sampled_token_ids, sample_hidden_states, spec_decode_metadata)
            if proposer.needs_hidden_states
            else None
        ),
        verified=(
            _verified_rows(batch, scheduler_output, request_ids, num_tokens, known, states)
            if proposer.needs_verified_rows
            else None
        ),
        state_keys=[k.state_key for k in known],
        tokens_read=scheduler_output.total_num_scheduled_tokens,
        sampling=drafter.sampling([k.state.sampling_params for k in known]),
        reading=reading,
        chains=_chains(drafter, known),
        answers={} if drafter.trees is None else drafter.trees.answers,
    )


def _chains(drafter: EngineProposer, known: Sequence[_Known]) -> Collection[int]:
    """Places of the requests that can have no trees."""
    if drafter.trees is None or not drafter.trees.usable:
        return range(len(known))
    return {i for i, k in enumerate(known) if k.chain}


def _verified_rows(
    batch: Any,
    scheduler_output: Any,
    request_ids: Sequence[str],
    num_tokens: IntArray,
    known: Sequence[_Known],
    states: tuple[torch.Tensor, ...],
) -> VerifiedRows:
    """Which rows of this step's forward belong to committed tokens: the first ones of each request
    (a rejected draft and what was drafted after it are the last); none of those that are never
    drafted for."""
    size = len(request_ids)
    scheduled = scheduler_output.num_scheduled_tokens
    read = np.fromiter((scheduled.get(request, 0) for request in request_ids), np.int32, size)
    position = batch.num_computed_tokens_cpu[:size].astype(np.int32)
    drafted = np.fromiter((k.last_length > 0 for k in known), np.bool_, size)
    count = (np.clip(num_tokens - 1 - position, 0, read) * drafted).astype(np.int32)
    return VerifiedRows(states, (np.cumsum(read) - read).astype(np.int32), position, count)


def _follow(
    drafter: EngineProposer, runner: Any, request_ids: Sequence[str]
) -> tuple[list[_Known], list[str]]:
    """What is known of the batch's requests, and which of the earlier ones have ended, also those
    whose id was given to another one."""
    live = runner.requests
    mine: dict[str, _Known] = drafter.requests
    gone = [request_id for request_id, k in mine.items() if live.get(request_id) is not k.state]
    for request_id in gone:
        del mine[request_id]
    drafter.ended += gone
    known = []
    for request_id in request_ids:
        entry = mine.get(request_id)
        if entry is None:
            entry = mine[request_id] = _first_sight(live[request_id], drafter)
        elif entry.num_prompt_tokens != entry.state.num_prompt_tokens:
            entry = mine[request_id] = _next_chunk(entry, request_id, drafter)
        known.append(entry)
    return known, list(drafter.ended)


def _next_chunk(before: _Known, request_id: str, drafter: EngineProposer) -> _Known:
    """A session of streamed input goes on (vLLM's GPUModelRunner._update_streaming_request): without
    the last token that it said, and with new sampling parameters.

    What is kept of the target's states stays right; to what is kept of the tokens it is a new request.
    """
    now = _first_sight(before.state, drafter)
    assert drafter.proposer is not None
    same = (now.pool, now.state_key) == (before.pool, before.state_key)
    if not (same and drafter.proposer.needs_verified_rows):
        drafter.ended.append(request_id)
    return now


def _first_sight(state: Any, drafter: EngineProposer) -> _Known:
    params, prompt = state.sampling_params, state.num_prompt_tokens
    if params is None:
        return _Known(state, prompt, pool_of(None), None, drafter.max_model_len)
    if state.prompt_embeds is not None:
        # What stands in token_ids for such a prompt is what another request had there.
        return _Known(state, prompt, None, None, 0)
    last = drafter.max_model_len
    if params.max_tokens is not None:
        last = min(last, prompt + params.max_tokens)
    seeded = drafter.remembers and params.seed is not None and params.temperature > 0
    seeded = seeded and drafter.trees is None
    if seeded or opts_out(params.extra_args):
        last = 0
    pool = pool_of(params.extra_args)
    chain = why_a_chain(params) is not None
    return _Known(state, prompt, pool, state_key(pool, state), last, chain)


def _last_accepted_rows(
    sampled: Sequence[Sequence[int]], sample_hidden_states: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """[batch, hidden]: the target's hidden state that produced each request's last committed token.

    As the medusa branch of vLLM 0.32's propose_draft_token_ids; requests in prefill get the first row.
    """
    if metadata is None or sample_hidden_states.shape[0] == len(sampled):
        return sample_hidden_states
    drafts = np.asarray(metadata.num_draft_tokens)
    starts = np.cumsum(drafts + 1) - (drafts + 1)
    accepted = np.fromiter((max(len(tokens) - 1, 0) for tokens in sampled), np.int64, len(sampled))
    rows = torch.from_numpy(starts + accepted).to(sample_hidden_states.device, non_blocking=True)
    return sample_hidden_states[rows]


def lists_of(
    drafter: EngineProposer, drafts: Sequence[DraftTree], context: DraftContext
) -> list[list[int]]:
    """vLLM's drafts; trees among them where they can be verified."""
    if drafter.trees is None:
        return to_lists(drafts, context)
    _check_number(drafts, context)
    return drafter.trees.lists(
        drafts,
        context.request_ids,
        context.budgets.tolist(),
        lambda request: drafter.requests[request].state.sampling_params,
        context.vocab_size,
    )


def _check_number(drafts: Sequence[DraftTree], context: DraftContext) -> None:
    if len(drafts) != len(context.request_ids):
        raise ValueError(
            f"the proposer answered {len(drafts)} drafts for {len(context.request_ids)} requests"
        )


def to_lists(trees: Sequence[DraftTree], context: DraftContext) -> list[list[int]]:
    """vLLM's drafts: within budget, and cut before the first id outside the vocabulary."""
    _check_number(trees, context)
    return [
        _valid(tree, int(budget), context.vocab_size)
        for tree, budget in zip(trees, context.budgets, strict=True)
    ]


def _valid(tree: DraftTree, budget: int, vocab_size: int) -> list[int]:
    if budget <= 0 or len(tree.tokens) == 0:
        return []
    tokens: list[int] = tree.best_path().prefix(budget).known(vocab_size).tokens.tolist()
    return tokens
