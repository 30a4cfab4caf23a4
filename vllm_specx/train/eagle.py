"""Trains EAGLE-1 and EAGLE-3 drafts with the target frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional

from vllm_specx.draft.checkpoints import FORMAT
from vllm_specx.train import teacher
from vllm_specx.train.dataset import Batches, Corpus, Ints
from vllm_specx.train.eagle_net import (
    Eagle1Net,
    Eagle3Net,
    EagleNet,
    layer_config,
    target_layers,
    written,
)
from vllm_specx.train.errors import TrainError
from vllm_specx.train.exclude import Excluded
from vllm_specx.train.hidden import AUX
from vllm_specx.train.loss import CHUNK, sparse_cross_entropy
from vllm_specx.train.target import TargetWeights
from vllm_specx.train.trainer import Acceptance, BaseTrainer, TrainSettings
from vllm_specx.train.unroll import Unroll


class EagleSettings(TrainSettings):
    """How a draft is trained."""

    version: Literal[1, 3] = 3
    target: str
    """The target's checkpoint folder."""
    aux_layers: tuple[int, ...] = ()
    """Of EAGLE-3; as in HiddenSettings."""
    vocab: Annotated[int, Field(ge=16)] = 12288
    train_lm_head: bool = False
    """EAGLE-3: lm_head's rows are trained too; otherwise they stay the target's."""
    export_lm_head: bool = True
    """EAGLE-3: the checkpoint has the target's rows too, which stock vLLM needs and ours does not."""
    norm_before_residual: bool = False
    """EAGLE-3: vLLM's option of that name."""
    bias: bool | None = None
    """Of q, k and v; None: EAGLE-1 as the target has it, EAGLE-3 none, as published drafts."""
    sequences: Annotated[int, Field(ge=1)] = 8
    """Conversations, or parts of long ones, a batch."""
    width: Annotated[int, Field(ge=16)] = 512
    """Positions of one conversation that are drafted from at a time; the context is always whole."""
    unroll_at: tuple[float, ...] = (0.25, 0.4, 0.5)
    """Shares of the training after which one more step is unrolled."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """EAGLE-1: weight of the smooth L1 distance to the target's state (of mean square 1)."""
    token_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the cross-entropy with the target's distribution."""


@dataclass(frozen=True)
class Texts:
    """Beginnings of conversations end to end, T tokens, that drafts may start from anywhere in.

    states: bfloat16 [T, ...], what the draft reads; last: bfloat16 [T, hidden] for EAGLE-1's loss.
    tokens: int64 [T]; speaks: bool [T], whether the target said it; end: int64 [T], of its text.
    rows: int64 [P] ascending, positions to draft from; lengths: tokens of each text.
    ids int64 [T, TOP], probabilities float32 [T, TOP]: teacher.py.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    speaks: torch.Tensor
    end: torch.Tensor
    rows: torch.Tensor
    lengths: list[int]
    ids: torch.Tensor
    probabilities: torch.Tensor


class EagleTrainer(BaseTrainer[EagleSettings]):
    """One training run of an EAGLE draft."""

    heads: EagleNet
    average: EagleNet

    def __init__(
        self,
        settings: EagleSettings,
        corpus: Corpus,
        target: TargetWeights,
        out: Path,
        excluded: Excluded | None = None,
    ) -> None:
        bias = False if settings.bias is None and settings.version == 3 else settings.bias
        self.config = layer_config(settings.target, bias)
        for kind in (teacher.KIND, *([AUX] if settings.version == 3 else [])):
            corpus.require(kind)
        super().__init__(settings, corpus, target, out, excluded)

    def _batches(self, conversations: Ints) -> Batches:
        windows = self.corpus.stretches(conversations, self.settings.width)
        return self._in_batches(windows, self.settings.sequences, "stretches")

    def _network(self) -> EagleNet:
        settings = self.settings
        spoken = self.runs[:16]
        states = torch.cat([self.corpus.hidden(int(a), int(b) - 1) for a, b in spoken])
        scale = max(_root_mean_square(states), 1e-3)
        if settings.version == 1:
            return Eagle1Net(
                self.config, scale=scale, embedding_scale=_root_mean_square(self.embeddings)
            )
        return Eagle3Net(
            self.config,
            aux=len(settings.aux_layers),
            norm_before_residual=settings.norm_before_residual,
            lm_head=self.lm_head.float() if settings.train_lm_head else None,
            scale=scale,
        )

    @property
    def unrolled(self) -> int:
        """Steps that are unrolled now."""
        progress = self.step / self.steps
        return min(self.settings.depth, 1 + sum(progress >= at for at in self.settings.unroll_at))

    def _note(self, found: Acceptance, losses: Sequence[float], accuracy: Any) -> None:
        super()._note(found, losses, accuracy)
        if self.unrolled < min(self.settings.depth, 1 + len(self.settings.unroll_at)):
            # Further steps are still to be learned.
            self.stale = 0

    def texts(self, stretches: Ints) -> Texts:
        """Those stretches (Corpus.stretches), each with all before it, on the device."""
        corpus, depth = self.corpus, self.settings.depth
        spans = [(int(a), min(int(end) + depth + 1, int(to))) for a, _, end, to in stretches]
        lengths = [end - begin for begin, end in spans]
        firsts = np.cumsum([0, *lengths])
        rows = np.concatenate(
            [
                first + np.arange(begin - start, end - start)
                for first, (start, begin, end, _) in zip(firsts, stretches, strict=False)
            ]
        )
        tokens = np.concatenate([corpus.tokens[slice(*span)] for span in spans])
        speaks = np.concatenate([corpus.source[slice(*span)] > 0 for span in spans])
        rows = rows[rows + 2 < firsts[-1]]
        rows = rows[speaks[rows + 1] & speaks[rows + 2]]
        ids = np.concatenate([corpus.cached(teacher.KIND, "ids", *span) for span in spans])
        probabilities = np.concatenate(
            [corpus.cached(teacher.KIND, "probabilities", *span) for span in spans]
        )
        device = self.device
        return Texts(
            states=torch.cat([self._states(*span) for span in spans]).to(device, self.dtype),
            tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
            speaks=torch.from_numpy(speaks).to(device),
            end=torch.from_numpy(np.repeat(firsts[1:], lengths)).to(device),
            rows=torch.from_numpy(rows).to(device),
            lengths=lengths,
            ids=torch.from_numpy(ids.astype(np.int64)).to(device),
            probabilities=torch.from_numpy(probabilities).to(device),
        )

    def _states(self, begin: int, end: int) -> torch.Tensor:
        if self.settings.version == 1:
            return self.corpus.hidden(begin, end)
        layers = self.settings.aux_layers
        return torch.cat([self.corpus.auxiliary(n, begin, end) for n in layers], -1)

    def unroll(self, net: EagleNet, texts: Texts) -> Unroll:
        """Drafts of `net` from anywhere in `texts`."""
        following = self.embeddings[texts.tokens.roll(-1)]
        return Unroll(net, texts.states, following, texts.lengths)

    def _rows_of_lm_head(self, net: EagleNet) -> torch.Tensor:
        if isinstance(net, Eagle3Net) and net.lm_head is not None:
            return net.lm_head.weight.to(self.dtype)
        return self.lm_head

    def _loss(self, windows: Ints) -> tuple[torch.Tensor, list[float]]:
        settings = self.settings
        texts = self.texts(windows)
        unroll = self.unroll(self.heads, texts)
        lm_head = self._rows_of_lm_head(self.heads)
        loss = texts.states.new_zeros((), dtype=torch.float32)
        accuracy: list[float] = []
        at, feature = texts.rows, None
        for depth in range(self.unrolled):
            # A draft of a token that the vocabulary lacks is lost, with all that follow.
            drafted = (at + 2 + depth).clamp(max=len(texts.tokens) - 1)
            labels = self.draft_ids[texts.tokens[drafted]]
            keep = (at + 2 + depth < texts.end[at]) & texts.speaks[drafted] & (labels >= 0)
            at, labels = at[keep], labels[keep]
            if not len(at):
                break
            if feature is None:
                feature = unroll.start(at)
            else:
                unroll.keep(keep)
                feature = unroll.step(feature[keep], self.embeddings[texts.tokens[at + 1 + depth]])
            weight = settings.depth_weight**depth / len(at)
            ids, wanted = self._wanted(texts, at + 1 + depth)
            part, best = sparse_cross_entropy(
                self.heads.leave(feature), lm_head, ids, wanted, wanted.sum(-1) * weight
            )
            loss = loss + settings.token_weight * part
            if isinstance(self.heads, Eagle1Net) and settings.feature_weight:
                aim = self.heads.feature(texts.states[at + 1 + depth])
                far = functional.smooth_l1_loss(feature.float(), aim.float(), reduction="sum")
                loss = loss + settings.feature_weight * weight / aim.shape[-1] * far
            right = best == labels
            accuracy.append(float(right.float().mean()))
            going_on = self._going_on(right)
            unroll.keep(going_on)
            at, feature = at[going_on], feature[going_on]
        return loss, accuracy

    def _wanted(self, texts: Texts, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher over the draft vocabulary: ids and probabilities [n, TOP] that add up to 1, or
        to 0 where it names none of these tokens."""
        ids = self.draft_ids[texts.ids[row]]
        known = ids >= 0
        share = texts.probabilities[row] * known
        soft = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
        hard = functional.one_hot(share.argmax(-1), share.shape[-1])
        alpha = self.settings.hard_share
        wanted = (soft * (1 - alpha) + hard * alpha) * known.any(-1, keepdim=True)
        return ids.clamp(min=0), wanted

    def _matched(self, corpus: Corpus, begin: int, end: int) -> np.ndarray[Any, Any]:
        start = int(corpus.offsets[np.searchsorted(corpus.offsets, begin, side="right") - 1])
        size = end - begin - 2
        tokens = torch.from_numpy(corpus.tokens[start:end].astype(np.int64)).to(self.device)
        unroll = Unroll(
            self.average,
            self._states(start, end).to(self.device, self.dtype),
            self.embeddings[tokens.roll(-1)],
            [end - start],
        )
        at = torch.arange(size, device=self.device) + (begin - start)
        matched = torch.zeros(size, dtype=torch.int64, device=self.device)
        lm_head = self._rows_of_lm_head(self.average)
        ids = self.vocab.token_ids.to(self.device)
        feature = unroll.start(at)
        for depth in range(self.settings.depth):
            drafted = ids[_best(self.average.leave(feature), lm_head)]
            right = at + 2 + depth < len(tokens)
            right &= drafted == tokens[(at + 2 + depth).clamp(max=len(tokens) - 1)]
            matched[at[right] - (begin - start)] += 1
            if depth + 1 == self.settings.depth or not bool(right.any()):
                break
            unroll.keep(right)
            at = at[right]
            feature = unroll.step(feature[right], self.embeddings[drafted[right]])
        return matched.cpu().numpy()

    def export(self, found: Acceptance) -> None:
        """Write the averaged draft in vLLM's layout in out/heads."""
        settings = self.settings
        config = written(self.config)
        config["specx"] = {"format": FORMAT, "version": settings.version, **self._specx(found)}
        config["specx"]["training"]["target"] = self.target.name
        tensors = self.average.tensors()
        whole = len(self.vocab) == self.target.vocab_size
        if settings.version == 1:
            config["architectures"] = ["LlamaForCausalLM"]
            # Stock vLLM knows no draft vocabulary here: eagle_export.save_for_vllm leaves it out.
            tensors |= {} if whole else self.vocab.token_map()
        else:
            config |= {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": len(self.vocab),
                "fc_norm": True,
                "norm_before_residual": settings.norm_before_residual,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": list(settings.aux_layers),
                    "use_aux_hidden_state": True,
                },
            }
            if settings.export_lm_head and not settings.train_lm_head:
                tensors["lm_head.weight"] = self.lm_head.to("cpu", torch.bfloat16)
            if self.config.attention_bias:  # stock vLLM has one there too
                size = self.config.hidden_size
                tensors["midlayer.self_attn.o_proj.bias"] = torch.zeros(size, dtype=torch.bfloat16)
            tensors |= {} if whole else self.vocab.d2t()
        self._write(config, {name: tensor.cpu() for name, tensor in tensors.items()})


def aux_layers_of(target: str, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The layers asked for in ascending order; if none are, EAGLE-3's choice of low, middle and high:
    layers 2, L/2 and L-3 of L. Raises TrainError where the target has no such layer."""
    layers = target_layers(target)
    if bad := [number for number in asked if not 0 <= number < layers]:
        raise TrainError(
            f"--aux-layers names layer {bad[0]}, but the target has layers 0 to {layers - 1}."
        )
    chosen = asked or (min(2, layers - 1), layers // 2, max(layers - 3, 0))
    return tuple(sorted(set(chosen)))


def _best(states: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    parts = torch.split(states, CHUNK)
    return torch.cat([(part @ lm_head.T).argmax(-1) for part in parts])


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.float().pow(2).mean().sqrt())
