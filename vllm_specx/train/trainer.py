"""The training run that all draft heads share: schedule, averaging, validation, early stop, resuming."""

from __future__ import annotations

import copy
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from vllm_specx.draft.vocab import DraftVocab, count_tokens
from vllm_specx.train import run_state, shards
from vllm_specx.train.compute import fastest_dtype
from vllm_specx.train.dataset import Batches, Corpus, Ints
from vllm_specx.train.errors import TrainError
from vllm_specx.train.exclude import Excluded
from vllm_specx.train.target import TargetWeights

FREE = frozenset({"epochs", "patience", "device", "validate_every", "export_lm_head", "target"})
"""Settings that a resumed run may change (target: its folder may be named otherwise; that it is the
same one, the cached states tell)."""


class TrainSettings(BaseModel):
    """How heads of any kind are trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens drafted in a row, in training and in validation."""
    vocab: Annotated[int, Field(ge=16)] = 8192
    """Tokens of the draft vocabulary."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
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
    seed: Annotated[int, Field(ge=0)] = 0
    limit: int | None = None
    """Use only about this many tokens of the text."""
    device: str = "cpu"
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Format of the products; auto is what this machine is fastest in. Weights are float32."""


SettingsT = TypeVar("SettingsT", bound=TrainSettings)


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


class BaseTrainer(ABC, Generic[SettingsT]):
    """One training run in `out`; constructing it resumes what is there.

    A kind of heads says what its windows, network and loss are, how it matches an answer, and how
    its checkpoint looks.
    """

    def __init__(
        self,
        settings: SettingsT,
        corpus: Corpus,
        target: TargetWeights,
        out: Path,
        excluded: Excluded | None = None,
    ) -> None:
        self.settings, self.corpus, self.target, self.out = settings, corpus, target, out
        self.device = torch.device(settings.device)
        torch.manual_seed(settings.seed)
        for folder in (out, out / "heads"):
            shards.remove_leftovers(folder)
        before = run_state.read(out / run_state.NAME, self.device, settings, FREE)
        self.excluded = excluded or Excluded()
        if "excluded" in before:
            self.excluded.require_same(before["excluded"], out / run_state.NAME)
        self.split_by = before.get("split_by", 64) if before else None
        left_out = self.excluded.conversations
        train, self.validation = corpus.split(settings.validation, left_out, self.split_by)
        self.runs = corpus.greedy_runs(self.validation)
        if not len(self.runs):
            raise TrainError("there is no greedy answer to validate with; generate more tokens.")
        self.batches = self._batches(train)
        self.tokens = int((corpus.source > 0).sum())
        counts = count_tokens((corpus.spoken(i) for i in train), target.vocab_size)
        size = min(settings.vocab, target.vocab_size)
        self.vocab = DraftVocab.most_frequent(counts, size)
        if before:  # more text may have come since
            self.vocab = DraftVocab(before["vocab"].cpu(), target.vocab_size)
        ids = self.vocab.token_ids
        self.dtype = self._dtype(before.get("compute"))
        self.lm_head = target.lm_head[ids].to(self.device, self.dtype).contiguous()
        self.embeddings = target.embeddings.to(self.device, self.dtype)
        draft_ids = torch.full((target.vocab_size,), -1)
        draft_ids[ids] = torch.arange(len(ids))
        self.draft_ids = draft_ids.to(self.device)
        self.heads = self._network().to(self.device)
        self.average = copy.deepcopy(self.heads)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.best: float = 0.0
        self.stale = 0
        self.random = torch.Generator().manual_seed(settings.seed)
        if before:
            self._resume(before)

    @abstractmethod
    def _batches(self, conversations: Ints) -> Batches:
        """The windows of the training text."""

    def _in_batches(self, windows: Ints, size: int, name: str) -> Batches:
        """`size` of the windows a batch; name: what they are called. Raises TrainError."""
        if len(windows) < size:
            raise TrainError(
                f"the text has {len(windows)} {name} to train on, fewer than one batch of "
                f"{size}; generate more tokens."
            )
        return Batches(windows, size, self.settings.seed)

    @abstractmethod
    def _network(self) -> nn.Module:
        """New heads."""

    @abstractmethod
    def _loss(self, windows: Ints) -> tuple[torch.Tensor, list[float]]:
        """The loss of a batch and, by depth, the share of drafts that are right."""

    @abstractmethod
    def _matched(self, corpus: Corpus, begin: int, end: int) -> np.ndarray[Any, Any]:
        """How many tokens drafted by the averaged heads are right at each position of one greedy
        answer (Corpus.greedy_runs), but its last two."""

    @abstractmethod
    def export(self, found: Acceptance) -> None:
        """Write the averaged heads as a checkpoint in out/heads."""

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
            loss, right = self._step(next(batches))
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

    def _step(self, windows: Ints) -> tuple[float, list[float]]:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss, accuracy = self._loss(windows)
        if not loss.requires_grad:  # the draft vocabulary has none of the batch's tokens
            return 0.0, accuracy
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        decay = min(self.settings.averaging, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.heads.parameters(), strict=True):
                mean.lerp_(new, 1.0 - decay)
        return float(loss.detach()), accuracy

    def _going_on(self, right: torch.Tensor) -> torch.Tensor:
        """Which rows train the next depth: those that are right, and keep_wrong of the others."""
        chance = torch.rand(len(right), generator=self.random).to(self.device)
        return right | (chance < self.settings.keep_wrong)

    def _chosen_runs(self) -> Ints:
        """As many held-out greedy answers as validation_tokens asks for."""
        lengths = np.cumsum(self.runs[:, 1] - self.runs[:, 0])
        return self.runs[: int(np.searchsorted(lengths, self.settings.validation_tokens)) + 1]

    def validate(self) -> Acceptance:
        """Greedy acceptance of the averaged heads on held-out greedy answers."""
        return self.acceptance(self.corpus, self._chosen_runs())

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

    def coverage(self) -> float:
        """Share of the tokens of the held-out greedy answers that the draft vocabulary has."""
        spoken = [self.corpus.tokens[begin + 1 : end] for begin, end in self.runs]
        return self.vocab.coverage(np.concatenate(spoken))

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
            "compute": str(self.dtype).removeprefix("torch."),
            "vocab": self.vocab.token_ids,
            "split_by": self.split_by,
            "excluded": dict(self.excluded.files),
            "tokens": self.tokens,
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
        run_state.write(self.out / run_state.NAME, self.settings, state)
        with shards.atomic(self.out / "history.json") as file:
            file.write(json.dumps(self.history, indent=1).encode())

    def _dtype(self, before: str | None) -> torch.dtype:
        """As the settings say; a resumed run keeps what it began with."""
        asked = self.settings.compute
        name = before or asked if asked == "auto" else asked
        return fastest_dtype(self.settings.device) if name == "auto" else getattr(torch, name)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.heads.load_state_dict(state["heads"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"].cpu())
        self.step, self.seconds = state["step"], state["seconds"]
        self.batches.epoch, self.batches.place = state["place"]
        self.history = json.loads(state["history"])
        self.best, self.stale = state["best"], state["stale"]
        if self.tokens > state.get(
            "tokens", self.tokens
        ):  # what had stopped getting better may again
            self.stale = 0

    def _specx(self, found: Acceptance) -> dict[str, Any]:
        """What a checkpoint says about its training."""
        return {
            "acceptance": [round(a, 4) for a in found.conditional()],
            "training": {
                "tokens": self.tokens,
                "epochs": round(self.step / self.batches.per_epoch, 2),
                "seconds": round(self.seconds),
                "validation_acceptance_length": round(found.length, 4),
                "validation_coverage": round(self.coverage(), 4),
            },
        }

    def _write(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """out/heads/model.safetensors and config.json."""
        from safetensors.torch import save

        folder = self.out / "heads"
        with shards.atomic(folder / "model.safetensors") as file:
            file.write(save(dict(tensors), {"format": "pt"}))
        with shards.atomic(folder / "config.json") as file:
            file.write(json.dumps(config, indent=2).encode() + b"\n")
