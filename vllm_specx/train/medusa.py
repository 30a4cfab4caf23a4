"""Trains Medusa's parallel heads, or sequential (Hydra) ones, with the target frozen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from vllm_specx.draft.checkpoints import FORMAT
from vllm_specx.draft.medusa_heads import ParallelHeads, SequentialHeads
from vllm_specx.train.dataset import Batches, Corpus, Ints
from vllm_specx.train.loss import fused_cross_entropy, teacher_probabilities
from vllm_specx.train.trainer import Acceptance, BaseTrainer, TrainSettings


class MedusaSettings(TrainSettings):
    """How heads are trained."""

    conditioning: Literal["none", "hydra"] = "hydra"
    """none: Medusa's parallel heads. hydra: sequential ones, which see the tokens drafted so far."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    inner: Annotated[int, Field(ge=16)] | None = None
    """Width inside a sequential layer; unset, 8/3 of the hidden size, in 64s."""
    windows: Annotated[int, Field(ge=1)] = 32
    """Stretches of `width` positions a batch."""
    width: Annotated[int, Field(ge=8)] = 64

    def width_inside(self, hidden_size: int) -> int:
        """The inner width of sequential layers."""
        return self.inner or max(64, round(hidden_size * 8 / 3 / 64) * 64)


class Heads(nn.Module):
    """Either kind of heads behind one call."""

    def __init__(self, settings: MedusaSettings, hidden_size: int) -> None:
        super().__init__()
        self.sequential = settings.conditioning == "hydra"
        self.depth = settings.depth
        self.net: ParallelHeads | SequentialHeads
        if settings.conditioning == "hydra":
            self.net = SequentialHeads(
                hidden_size,
                layers=settings.layers,
                inner=settings.width_inside(hidden_size),
                depth=settings.depth,
            )
        else:
            # At zero every head says what the target's lm_head says of the same state.
            self.net = ParallelHeads(
                torch.zeros(settings.depth, settings.layers, hidden_size, hidden_size)
            )

    def start_at(self, scale: float) -> None:
        """Begin with outputs of the scale (root mean square) of the target's states."""
        if isinstance(self.net, SequentialHeads):
            self.net.norm.weight.data.fill_(scale)

    def forward(
        self, depth: int, state: torch.Tensor, embedding: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of this depth, state for the next), each [n, hidden]."""
        if isinstance(self.net, SequentialHeads):
            state = self.net(state, embedding)
            return state, state
        output = state
        for layer in range(self.net.weights.shape[1]):
            weight = self.net.weights[depth, layer].to(state.dtype)
            output = output + nn.functional.silu(nn.functional.linear(output, weight))
        return output, state

    def tensors(self) -> dict[str, torch.Tensor]:
        """As the checkpoint names them, bfloat16."""
        if isinstance(self.net, SequentialHeads):
            return {
                name: t.to(torch.bfloat16).contiguous() for name, t in self.net.state_dict().items()
            }
        weights = self.net.weights.detach().to(torch.bfloat16)
        return {
            f"blocks.{head}.layers.{layer}.weight": weights[head, layer].clone()
            for head in range(weights.shape[0])
            for layer in range(weights.shape[1])
        }


class Trainer(BaseTrainer[MedusaSettings]):
    """One training run of Medusa or Hydra heads."""

    heads: Heads
    average: Heads

    def _batches(self, conversations: Ints) -> Batches:
        windows = self.corpus.windows(conversations, self.settings.width)
        return self._in_batches(windows, self.settings.windows, "windows")

    def _network(self) -> Heads:
        heads = Heads(self.settings, self.corpus.hidden_size)
        heads.start_at(self._scale())
        return heads

    def _loss(self, windows: Ints) -> tuple[torch.Tensor, list[float]]:
        settings = self.settings
        rows = self.corpus.rows(windows, settings.depth)
        hidden = rows.hidden.to(self.device, self.dtype)
        tokens, end = rows.tokens.to(self.device), rows.end.to(self.device)
        at = rows.starts.to(self.device)
        teacher = teacher_probabilities(hidden, self.lm_head)
        hard = teacher.argmax(-1)
        state = hidden[at]
        loss = torch.zeros((), device=self.device)
        accuracy = []
        for depth in range(settings.depth):
            # A draft of a token that the vocabulary lacks is lost, with all that follow.
            inside = at + 2 + depth < end[at]
            drafted = tokens[(at + 2 + depth).clamp(max=len(tokens) - 1)]
            keep = inside & (self.draft_ids[drafted] >= 0)
            at, state = at[keep], state[keep]
            if not len(at):
                break
            output, state = self.heads(depth, state, self.embeddings[tokens[at + 1 + depth]])
            row = at + 1 + depth
            weight = settings.depth_weight**depth / len(at)
            weights = torch.full((len(at),), weight, device=self.device)
            part, best = fused_cross_entropy(
                output, self.lm_head, teacher[row], hard[row], settings.hard_share, weights
            )
            loss = loss + part
            right = best == hard[row]
            accuracy.append(float(right.float().mean()))
            going_on = self._going_on(right)
            at, state = at[going_on], state[going_on]
        return loss, accuracy

    def _matched(self, corpus: Corpus, begin: int, end: int) -> np.ndarray[Any, Any]:
        """How many drafted tokens are right at each position of one greedy answer."""
        size = end - begin - 2
        tokens = torch.from_numpy(corpus.tokens[begin:end].astype(np.int64)).to(self.device)
        state = corpus.hidden(begin, begin + size).to(self.device, self.dtype)
        right = torch.ones(size, dtype=torch.bool, device=self.device)
        matched = torch.zeros(size, dtype=torch.int64, device=self.device)
        ids = self.vocab.token_ids.to(self.device)
        for depth in range(self.settings.depth):
            at = torch.arange(size, device=self.device) + 1 + depth
            following = (at + 1).clamp(max=len(tokens) - 1)
            embedding = self.embeddings[tokens[at.clamp(max=len(tokens) - 1)]]
            output, state = self.average(depth, state, embedding)
            drafted = ids[(output @ self.lm_head.T).argmax(-1)]
            right &= (at + 1 < len(tokens)) & (drafted == tokens[following])
            matched += right
        return matched.cpu().numpy()

    def export(self, found: Acceptance) -> None:
        """Write the averaged heads as a checkpoint in out/heads."""
        settings, hidden = self.settings, self.corpus.hidden_size
        vocab = {} if len(self.vocab) == self.target.vocab_size else self.vocab.token_map()
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": hidden,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": len(self.vocab),
            "num_heads": settings.depth,
            "num_hidden_layers": settings.layers,
            "original_lm_head": True,
            "medusa_fc_bias": False,
            "dtype": "bfloat16",
            "specx": {
                "format": FORMAT,
                "conditioning": settings.conditioning,
                **self._specx(found),
            },
            "speculators_config": {
                "algorithm": "medusa",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": settings.depth}
                ],
                "verifier": {
                    "name_or_path": self.target.name,
                    "architectures": self.target.architectures,
                },
            },
        }
        if settings.conditioning == "hydra":
            config["intermediate_size"] = settings.width_inside(hidden)
        self._write(config, {**self.average.tensors(), **vocab})

    def _scale(self) -> float:
        spoken = self.runs[:16]
        states = torch.cat([self.corpus.hidden(int(a), int(b) - 1) for a, b in spoken]).float()
        return max(float(states.pow(2).mean().sqrt()), 1e-3)
