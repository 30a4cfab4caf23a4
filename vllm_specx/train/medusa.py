"""Trains draft heads with the target frozen: Medusa's parallel heads, or sequential (Hydra) ones."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from vllm_specx.draft.checkpoints import FORMAT
from vllm_specx.draft.medusa_heads import ParallelHeads, SequentialHeads
from vllm_specx.draft.vocab import DraftVocab, count_tokens
from vllm_specx.train import shards
from vllm_specx.train.compute import fastest_dtype
from vllm_specx.train.dataset import Batches, Corpus, Ints, Rows
from vllm_specx.train.errors import TrainError
from vllm_specx.train.loss import fused_cross_entropy, teacher_probabilities
from vllm_specx.train.target import TargetWeights

STATE = "state.pt"


class MedusaSettings(BaseModel):
    """How heads are trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    conditioning: Literal["none", "hydra"] = "hydra"
    """none: Medusa's parallel heads. hydra: sequential ones, which see the tokens drafted so far."""
    depth: Annotated[int, Field(ge=1, le=16)] = 4
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    inner: Annotated[int, Field(ge=16)] | None = None
    """Width inside a sequential layer; unset, 8/3 of the hidden size, in 64s."""
    vocab: Annotated[int, Field(ge=16)] = 8192
    """Tokens of the draft vocabulary."""
    epochs: Annotated[float, Field(gt=0)] = 10.0
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    windows: Annotated[int, Field(ge=1)] = 32
    """Stretches of `width` positions a batch."""
    width: Annotated[int, Field(ge=8)] = 64
    hard_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Weight of the target's argmax against its whole distribution."""
    keep_wrong: Annotated[float, Field(ge=0, le=1)] = 0.15
    """Of positions whose draft is wrong at one depth, the share that trains the next depth: it will
    not be used there, but costs as much."""
    depth_weight: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Each depth's loss weighs this much of the one before."""
    averaging: Annotated[float, Field(ge=0, lt=1)] = 0.998
    """The heads kept are an exponential average of the trained ones."""
    validation: Annotated[float, Field(gt=0, lt=0.5)] = 0.03
    patience: Annotated[int, Field(ge=1)] = 6
    """Validations without a better acceptance length before training stops."""
    validate_every: Annotated[int, Field(ge=1)] = 400
    """Steps."""
    validation_tokens: Annotated[int, Field(ge=100)] = 20_000
    seed: int = 0
    limit: int | None = None
    """Use only about this many tokens of the text."""
    device: str = "cpu"
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of the products; auto is what this machine is fastest in. Weights are float32."""

    def width_inside(self, hidden_size: int) -> int:
        """The inner width of sequential layers."""
        return self.inner or max(64, round(hidden_size * 8 / 3 / 64) * 64)


@dataclass(frozen=True)
class Acceptance:
    """by_depth: share of positions at which depths 0..d are all right; length: tokens a step of the
    target makes when the answers are decoded with these drafts, bonus token included."""

    by_depth: tuple[float, ...]
    length: float

    def conditional(self) -> tuple[float, ...]:
        """By depth, given that all before was right."""
        before = (1.0, *self.by_depth[:-1])
        return tuple(a / b if b else 0.0 for a, b in zip(self.by_depth, before, strict=True))


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


class Trainer:
    """One training run in `out`; constructing it resumes what is there."""

    def __init__(
        self,
        settings: MedusaSettings,
        corpus: Corpus,
        target: TargetWeights,
        out: Path,
        excluded: set[int] | None = None,
    ) -> None:
        self.settings, self.corpus, self.out = settings, corpus, out
        self.device = torch.device(settings.device)
        torch.manual_seed(settings.seed)
        train, self.validation = corpus.split(settings.validation, excluded or set())
        self.runs = corpus.greedy_runs(self.validation)
        if not len(self.runs):
            raise TrainError("there is no greedy answer to validate with; generate more tokens.")
        windows = corpus.windows(train, settings.width)
        if len(windows) < settings.windows:
            raise TrainError(
                f"the text has {len(windows)} windows to train on, fewer than one batch of "
                f"{settings.windows}; generate more tokens."
            )
        self.batches = Batches(windows, settings.windows, settings.seed)
        counts = _counts(corpus, train, target.vocab_size)
        size = min(settings.vocab, target.vocab_size)
        self.vocab = DraftVocab.most_frequent(counts, size)
        self.counts = counts
        self.target = target
        ids = self.vocab.token_ids
        self.dtype = self._dtype()
        self.lm_head = target.lm_head[ids].to(self.device, self.dtype).contiguous()
        self.embeddings = target.embeddings.to(self.device, self.dtype)
        draft_ids = torch.full((target.vocab_size,), -1)
        draft_ids[ids] = torch.arange(len(ids))
        self.draft_ids = draft_ids.to(self.device)
        self.heads = Heads(settings, corpus.hidden_size).to(self.device)
        self.heads.start_at(self._scale())
        self.average = Heads(settings, corpus.hidden_size).to(self.device)
        self.average.load_state_dict(self.heads.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.best: float = 0.0
        self.stale = 0
        self.random = torch.Generator().manual_seed(settings.seed)
        self._resume()

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return max(1, math.ceil(self.settings.epochs * self.batches.per_epoch))

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.step >= self.steps or self.stale >= self.settings.patience

    def train(
        self, report: Callable[[int, int, str], None], save_every_s: float = 120.0
    ) -> Acceptance | None:
        """Train to the end or until validation stops getting better; the last acceptance."""
        settings = self.settings
        losses: list[float] = []
        accuracy: list[list[float]] = []
        saved = mark = time.monotonic()
        last = None
        batches = iter(self.batches)
        while not self.done:
            loss, right = self._step(self.corpus.rows(next(batches), settings.depth))
            losses.append(loss)
            accuracy.append(right)
            self.step += 1
            now = time.monotonic()
            self.seconds += now - mark
            mark = now
            if self.step % settings.validate_every == 0 or self.step == self.steps:
                last = self.validate()
                self._note(last, losses, accuracy)
                losses, accuracy = [], []
                self.save()
                saved = mark = time.monotonic()
            elif now - saved > save_every_s:
                self.save()
                saved = mark = time.monotonic()
            report(self.step, self.steps, self._said(losses))
        return last

    def _said(self, losses: Sequence[float]) -> str:
        length = f"acceptance length {self.history[-1]['length']:.3f}" if self.history else ""
        return f"loss {np.mean(losses[-50:]):.3f} {length}" if losses else length

    def _rate(self) -> float:
        progress = self.step / self.steps
        warm = min(1.0, (self.step + 1) / 100)
        return (
            self.settings.learning_rate
            * warm
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        )

    def _step(self, rows: Rows) -> tuple[float, list[float]]:
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        hidden = rows.hidden.to(self.device, self.dtype)
        tokens, end = rows.tokens.to(self.device), rows.end.to(self.device)
        at = rows.starts.to(self.device)
        teacher = teacher_probabilities(hidden, self.lm_head)
        hard = teacher.argmax(-1)
        state = hidden[at]
        loss = torch.zeros((), device=self.device)
        accuracy = []
        self.optimizer.zero_grad(set_to_none=True)
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
            chance = torch.rand(len(at), generator=self.random).to(self.device)
            going_on = right | (chance < settings.keep_wrong)
            at, state = at[going_on], state[going_on]
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        decay = min(settings.averaging, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.heads.parameters(), strict=True):
                mean.lerp_(new, 1.0 - decay)
        return float(loss.detach()), accuracy

    def validate(self) -> Acceptance:
        """Greedy acceptance of the averaged heads on held-out greedy answers."""
        chosen: list[Any] = []
        total = 0
        for run in self.runs:
            chosen.append(run)
            total += int(run[1] - run[0])
            if total >= self.settings.validation_tokens:
                break
        return self.acceptance(self.corpus, np.array(chosen, np.int64))

    @torch.inference_mode()
    def acceptance(self, corpus: Corpus, runs: Ints) -> Acceptance:
        """Of the averaged heads on `runs` (Corpus.greedy_runs), chains of full depth."""
        right = np.zeros(self.settings.depth)
        positions = steps = made = 0
        for begin, end in runs:
            matched = self._matched(corpus, int(begin), int(end))
            positions += len(matched)
            right += [(matched > d).sum() for d in range(self.settings.depth)]
            at = 0
            while at < len(matched):
                steps += 1
                at += int(matched[at]) + 1
            made += at
        by_depth = tuple(float(r / max(positions, 1)) for r in right)
        return Acceptance(by_depth, made / max(steps, 1))

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

    def _note(self, found: Acceptance, losses: Sequence[float], accuracy: Any) -> None:
        depths = range(self.settings.depth)
        self.history.append(
            {
                "step": self.step,
                "epoch": round(self.step / self.batches.per_epoch, 3),
                "seconds": round(self.seconds, 1),
                "loss": round(float(np.mean(losses)), 4) if losses else None,
                "accuracy": [
                    round(float(np.mean([a[d] for a in accuracy if len(a) > d] or [0.0])), 4)
                    for d in depths
                ],
                "by_depth": [round(a, 4) for a in found.by_depth],
                "length": round(found.length, 4),
            }
        )
        if found.length > self.best:
            self.best, self.stale = found.length, 0
            self.export(found)
        else:
            self.stale += 1

    def save(self) -> None:
        """Write everything that resuming needs, whole or not at all."""
        state = {
            "settings": self.settings.model_dump_json(),
            "compute": str(self.dtype).removeprefix("torch."),
            "heads": self.heads.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "place": [self.batches.epoch, self.batches.place],
            "history": json.dumps(self.history),
            "best": self.best,
            "stale": self.stale,
        }
        with shards.atomic(self.out / STATE) as file:
            torch.save(state, file)
        with shards.atomic(self.out / "history.json") as file:
            file.write(json.dumps(self.history, indent=1).encode())

    def _dtype(self) -> torch.dtype:
        """As the settings say; a resumed run keeps what it began with."""
        name = self.settings.compute
        path = self.out / STATE
        if name == "auto" and path.exists():
            with contextlib.suppress(Exception):  # _resume says what is wrong with it
                name = torch.load(path, map_location="cpu", weights_only=True)["compute"]
        return fastest_dtype(self.settings.device) if name == "auto" else getattr(torch, name)

    def _resume(self) -> None:
        path = self.out / STATE
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            settings = MedusaSettings.model_validate_json(state["settings"])
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise TrainError(
                f"{path} cannot be read ({reason}); delete it to train from the start."
            ) from None
        same = {"epochs", "patience", "device", "validate_every"}
        if settings.model_dump(exclude=same) != self.settings.model_dump(exclude=same):
            raise TrainError(
                f"{path} is of a run with other settings; use the same ones or another --out."
            )
        self.heads.load_state_dict(state["heads"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"].cpu())
        self.step, self.seconds = state["step"], state["seconds"]
        self.batches.epoch, self.batches.place = state["place"]
        self.history = json.loads(state["history"])
        self.best, self.stale = state["best"], state["stale"]

    def export(self, found: Acceptance) -> None:
        """Write the averaged heads as a checkpoint in out/heads."""
        from safetensors.torch import save

        settings, hidden = self.settings, self.corpus.hidden_size
        folder = self.out / "heads"
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
                "acceptance": [round(a, 4) for a in found.conditional()],
                "training": {
                    "tokens": int((self.corpus.source > 0).sum()),
                    "epochs": round(self.step / self.batches.per_epoch, 2),
                    "seconds": round(self.seconds),
                    "validation_acceptance_length": round(found.length, 4),
                },
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
        with shards.atomic(folder / "model.safetensors") as file:
            file.write(save({**self.average.tensors(), **vocab}, {"format": "pt"}))
        with shards.atomic(folder / "config.json") as file:
            file.write(json.dumps(config, indent=2).encode() + b"\n")

    def _scale(self) -> float:
        spoken = self.runs[:16]
        states = torch.cat([self.corpus.hidden(int(a), int(b) - 1) for a, b in spoken]).float()
        return max(float(states.pow(2).mean().sqrt()), 1e-3)


def _counts(corpus: Corpus, conversations: Ints, vocab_size: int) -> Any:
    def spoken(i: int) -> Any:
        part = slice(int(corpus.offsets[i]), int(corpus.offsets[i + 1]))
        return corpus.tokens[part][corpus.source[part] > 0]

    return count_tokens((spoken(i) for i in conversations), vocab_size)
