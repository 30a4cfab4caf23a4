"""The network of a draft model, without its cache: embeddings, layers, the head's draftable rows."""

from __future__ import annotations

import torch

from vllm_specx.draft.decoder import DecoderLayer, Rotary, rms_norm
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.draft_model_checkpoint import DraftModelWeights
from vllm_specx.draft.vocabularies import Draftable


class DraftModelNet:
    """weights: in the dtype that it runs in. draftable: ids that may have logits. positions: how many
    places the rotary table has."""

    def __init__(
        self,
        weights: DraftModelWeights,
        draftable: Draftable,
        *,
        positions: int,
        device: torch.device,
    ) -> None:
        self._eps = weights.shape.rms_norm_eps
        self._embeddings = weights.embeddings.detach().to(device)
        rows = self._embeddings if weights.tied else weights.lm_head.detach().to(device)
        self._head = Dense(rows[: draftable.size].contiguous())
        self._head.pack()
        self._norm = weights.norm.detach().to(device)
        self._never = None
        if draftable.never:
            self._never = torch.tensor(draftable.never, dtype=torch.int64, device=device)
        self.rotary = Rotary(
            weights.shape, positions, dtype=weights.embeddings.dtype, device=device
        )
        self.layers = [
            DecoderLayer(layer, weights.shape, self.rotary, device) for layer in weights.layers
        ]
        # Of an untied lm_head the rows of other ids stay, as part of one tensor.
        whole = 0 if weights.tied else rows.nbytes - self._head.weight.nbytes
        shared = self._head.weight.nbytes if weights.tied else 0
        self.bytes = (
            sum(layer.bytes for layer in self.layers)
            + (self._head.bytes - shared)
            + whole
            + self._embeddings.nbytes
            + self._norm.nbytes
            + self.rotary.bytes
        )

    def enter(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64 [R] -> what the first layer reads, and the residual [R, hidden]."""
        embedded = self._embeddings.index_select(0, tokens)
        return self._normed(embedded, self.layers[0].input_norm), embedded

    def between(
        self, layer: int, moved: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What layer `layer` reads of the answer of the one below, and the residual."""
        residual = residual + moved
        return self._normed(residual, self.layers[layer].input_norm), residual

    def leave(self, moved: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The top layer's answer -> logits [R, draftable ids]."""
        logits: torch.Tensor = self._head(self._normed(residual + moved, self._norm))
        if self._never is not None:
            logits.index_fill_(1, self._never, -torch.inf)
        return logits

    def _normed(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        assert gain is not None
        return rms_norm(x, gain, self._eps)
