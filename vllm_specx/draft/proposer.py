"""What a proposer is given each step, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.sampling import SamplingRows
from vllm_specx.draft.tree import DraftTree, IntArray


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """What the target's forward said of every token that it read in this step, for B requests.

    states: each [R, hidden], one an auxiliary layer, or the last hidden state alone. Row r is the
        state after a token was read; rows of rejected drafts are among them. Valid in this step
        only: clone what is kept.
    first: int32 [B], the row of request i's first token.
    position: int32 [B], the place of that token in token_ids.
    count: int32 [B], how many rows from there belong to committed tokens whose next token is
        committed too, so that token_ids[rows[i], position[i] + 1 : position[i] + 1 + count[i]] are
        the tokens that follow them. Known in prefill too; 0 if nothing was read.
    """

    states: tuple[torch.Tensor, ...]
    first: IntArray
    position: IntArray
    count: IntArray


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The state of one decode step after verification, for a batch of B requests.

    request_ids: B ids; one id is one request for as long as it lives (also across preemption).
    rows: int32 [B], the row of `token_ids` that holds request i.
    token_ids: int32 [rows, max_model_len], prompt and output; a view, never write to it.
    num_tokens: int32 [B], committed tokens of request i: token_ids[rows[i], :num_tokens[i]].
    num_prompt_tokens: int32 [B].
    sampled: B lists, the tokens this step committed (empty: still in prefill; draft nothing).
    budgets: int32 [B], the most tokens request i may draft now; 0 means draft nothing.
    temperatures: float32 [B]; 0 is greedy.
    pools: B names of the memory the request shares; None shares nothing.
    finished: ids of requests that have ended since the last step; a request of this step may have
        such an id again.
    vocab_size: a drafted id must be below it.
    costs: float64 [N], the time of a step of this batch that verifies 0, 1, ... N - 1 draft tokens
        in all, in any unit; None while it is not known.
    draft_cost: the time of one forward of the draft, in the unit of costs; None while it is not known.
    hidden_states: [B, hidden] of the target, at each request's last accepted row; None unless the
        proposer asks for them.
    verified: the states of all tokens of this step; None unless the proposer asks for them.
    state_keys: B names; requests of one name have the same states wherever they have the same tokens,
        and may use each other's. A request without a name shares none; None: all may.
    tokens_read: by the target's forward in this step, of all requests.
    sampling: how the requests sample; None unless drafts may be drawn at random.
    reading: places of the requests in prefill that will be drafted for; what they have said so far is in
        token_ids, also what the target has not read yet.
    chains: places of the requests whose drafts are verified as chains, whatever they are.
    answers: by request, the tokens that the target holds likeliest after the nodes that were asked about
        (DraftTree.asked), int32, fewer where the draft was cut; whom nothing was asked about is left out.
    """

    request_ids: Sequence[str]
    rows: IntArray
    token_ids: IntArray
    num_tokens: IntArray
    num_prompt_tokens: IntArray
    sampled: Sequence[Sequence[int]]
    budgets: IntArray
    temperatures: npt.NDArray[np.float32]
    pools: Sequence[str | None]
    finished: Sequence[str]
    vocab_size: int
    costs: npt.NDArray[np.float64] | None = None
    draft_cost: float | None = None
    hidden_states: torch.Tensor | None = None
    verified: VerifiedRows | None = None
    state_keys: Sequence[str | None] | None = None
    tokens_read: int = 0
    sampling: SamplingRows | None = None
    reading: Sequence[int] = ()
    chains: Collection[int] = ()
    answers: Mapping[str, IntArray] = field(default_factory=dict)

    def after(self, forwards: int) -> DraftContext:
        """With costs of the whole step, in which so many forwards of the draft have been made: what they
        took is spent, but a token brings the less per unit of time the longer the step is."""
        if self.costs is None or not self.draft_cost:
            return self
        return dataclasses.replace(self, costs=self.costs + forwards * self.draft_cost)


class Proposer(Protocol):
    """Drafts tokens. No drafts is always a correct answer."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether it reads DraftContext.hidden_states."""
        ...

    @property
    def needs_verified_rows(self) -> bool:
        """Whether it reads DraftContext.verified."""
        ...

    @property
    def draft_steps(self) -> int:
        """Forwards of a draft that the last propose() made; what costs no forward has none. Negative: it did
        other work beside them, so that the time of this step says nothing of their cost."""
        ...

    def propose(self, context: DraftContext) -> list[DraftTree]:
        """One draft a request, in the order of `context.request_ids`."""
        ...


class TrainedDrafter(Proposer, Protocol):
    """A proposer whose drafts cost forwards of its own: heads, EAGLE, a draft model."""

    @property
    def depth(self) -> int:
        """Tokens of a draft at most."""
        ...

    @property
    def acceptance(self) -> Sequence[float]:
        """Of each depth given the one before, as measured in training; may be shorter than depth."""
        ...

    @property
    def stops_early(self) -> bool:
        """Whether it makes fewer tokens than it was asked for, where they promise too little."""
        ...

    @property
    def missed(self) -> Collection[str]:
        """Requests that the last propose() was asked for and could not draft for, whatever they promise."""
        ...

    def forwards(self, depth: int) -> int:
        """How many forwards a draft of `depth` tokens takes."""
        ...
