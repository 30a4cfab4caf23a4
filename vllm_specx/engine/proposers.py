"""What vLLM's `custom_class` builds in each worker: our proposers behind vLLM's interface."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_specx import config
from vllm_specx.draft.proposer import Proposer
from vllm_specx.draft.sampling import SamplingRows, Source
from vllm_specx.engine import seams
from vllm_specx.engine.draft_probs import DraftProbs, sampling_rows
from vllm_specx.engine.guard import Guard
from vllm_specx.engine.translate import settings_of
from vllm_specx.engine.trees import GAINED, Trees

if TYPE_CHECKING:
    from vllm_specx.draft.ngram import NgramLookahead

logger = logging.getLogger(f"vllm.{__name__}")


class EngineProposer(ABC):
    """Base of the classes that `--speculative-config` names; the runner keeps one as `drafter`.

    A subclass says how its proposer is built; the step seam (engine/step.py) asks it for drafts.
    """

    name: str
    remembers: ClassVar[bool] = False
    """Whether drafts depend on earlier requests. vLLM's rejection sampler uses up a request's
    random numbers by its drafts, so a seed gives the same text again only with the same drafts:
    seeded requests at temperature > 0 get none from a proposer that remembers."""

    aux_layers: tuple[int, ...] = ()
    """Layers of the target whose input is asked for beside its last hidden state, as vLLM's
    set_aux_hidden_state_layers counts them. They change the target's compiled graph."""

    trees: Trees | None = None
    """Where drafts may be trees: how they are verified."""

    draft_probs: DraftProbs | None = None
    """Where drafts may be drawn at random: what they were drawn from."""

    def __init__(self, vllm_config: Any) -> None:
        seams.activate_worker(vllm_config)
        self.vllm_config = vllm_config
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.max_batch: int = vllm_config.scheduler_config.max_num_seqs
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.guard = Guard(self.name)
        self.requests: dict[str, Any] = {}
        # Ids that have ended; after a fault the proposer is told of them again.
        self.ended: list[str] = []
        # Forwards of the draft since the scheduler was last told; negative: see Proposer.draft_steps.
        self.draft_steps = 0
        if config.tree_of(self.specx_config()) is not None:
            self.trees = Trees()
            self.specx_counts = self.trees.counts
        self.proposer = self.build()

    def made(self, draft_steps: int) -> None:
        """The proposer's draft_steps of one step, for the scheduler."""
        untold = min(draft_steps, self.draft_steps) < 0
        self.draft_steps = -1 if untold else self.draft_steps + draft_steps

    @abstractmethod
    def build(self) -> Proposer | None:
        """The proposer; called once. None: `load_model` makes it, when the target is there."""

    def load_model(self, target_model: Any) -> None:  # noqa: B027
        """Called by the runner after the target is loaded."""

    def states(
        self, last: torch.Tensor, auxiliary: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, ...]:
        """Of what the target's forward gave, what DraftContext.verified holds: [R, hidden] each."""
        return tuple(auxiliary) if auxiliary else (last,)

    def sampling(self, params: Sequence[Any]) -> SamplingRows | None:
        """DraftContext.sampling, of the batch's SamplingParams."""
        return None if self.draft_probs is None else sampling_rows(params)

    def proposed(
        self, requests: Sequence[str], drafts: Sequence[Sequence[int]], live: Collection[str]
    ) -> None:
        """The drafts that a step has ended with, of its requests; live: all requests of the runner."""
        if self.draft_probs is not None:
            self.draft_probs.made(requests, drafts, self.sources(), live)

    def sources(self) -> Mapping[str, Source]:
        """What the last step's drafts were drawn from, of those that were drawn."""
        return {}

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own call, which our seam replaces; reached only if the seam is gone."""
        raise RuntimeError(
            "vllm_specx: the step seam is not installed; is VLLM_PLUGINS hiding the plugin?"
        )

    def lookahead(self, settings: config.NgramConfig) -> NgramLookahead:
        """An n-gram lookahead for this engine, compiled."""
        from vllm_specx.draft.ngram import NgramLookahead

        made = NgramLookahead(
            settings,
            max_batch=self.max_batch,
            max_model_len=self.max_model_len,
            max_draft=self.num_speculative_tokens,
        )
        made.warm_up()
        return made

    def specx_config(self) -> config.SpecxConfig:
        """The validated `additional_config["specx"]`."""
        return settings_of(self.vllm_config)


class NgramProposer(EngineProposer):
    """`specx:ngram`, the training-free lookahead (draft/ngram.py)."""

    name = "ngram"
    remembers = True

    def build(self) -> Proposer:
        settings = self.specx_config()
        assert isinstance(settings, config.NgramConfig)
        made = self.lookahead(settings)
        if made.lookahead is not None and self.trees is not None:
            self.specx_counts = {**self.trees.counts, GAINED: made.lookahead.gained}
        return made
