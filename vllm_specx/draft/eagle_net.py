"""The network of an EAGLE draft, without its cache.

As vLLM 0.32's llama_eagle.py and llama_eagle3.py. At position i it reads the embedding of token i + 1
and the feature of position i, and its logits are those of token i + 2; drafting on, its own output is
the next position's feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specx.draft.decoder import DecoderLayer, Rotary, rms_norm
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.eagle_weights import EagleWeights


class EagleNet:
    """weights: of the draft. lm_head: [N, hidden], logits of the draft vocabulary. embeddings: [V,
    hidden]. positions: how many places the rotary table has."""

    def __init__(
        self,
        weights: EagleWeights,
        *,
        lm_head: torch.Tensor,
        embeddings: torch.Tensor,
        positions: int,
        device: torch.device,
    ) -> None:
        def dense(weight: torch.Tensor) -> Dense:
            layer = Dense(weight.detach().to(device).contiguous())
            layer.pack()
            return layer

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.detach().to(device)

        self.version = weights.version
        self._eps = weights.shape.rms_norm_eps
        self._fc = None if weights.fc is None else dense(weights.fc)
        self._fc_bias = moved(weights.fc_bias)
        self._fc_norms = (
            torch.stack([norm.detach().to(device).float() for norm in weights.fc_norms])
            if weights.fc_norms
            else None
        )
        self._input_norm, self._norm = moved(weights.input_norm), moved(weights.norm)
        self._norm_output = weights.norm_output
        self._norm_before_residual = weights.norm_before_residual
        self._scale = weights.logit_scale
        self._lm_head = dense(lm_head)
        self._embeddings = embeddings
        self._device, self._dtype = device, lm_head.dtype
        self.rotary = Rotary(weights.shape, positions, dtype=lm_head.dtype, device=device)
        self.layers = [
            DecoderLayer(layer, weights.shape, self.rotary, device) for layer in weights.layers
        ]
        norms = (self._fc_bias, self._fc_norms, self._input_norm, self._norm)
        self.bytes = (
            sum(layer.bytes for layer in self.layers)
            + sum(part.bytes for part in (self._fc, self._lm_head) if part is not None)
            + sum(norm.nbytes for norm in norms if norm is not None)
            + self.rotary.bytes
            + (0 if weights.embeddings is None else embeddings.nbytes)
        )

    def features(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's states, [R, size] each or joined [R, sum of sizes] -> [R, hidden]."""
        joined = states[0] if len(states) == 1 else torch.cat(tuple(states), -1)
        joined = joined.to(self._dtype)
        if self.version == 1:
            return joined
        if self._input_norm is not None:
            joined = rms_norm(joined, self._input_norm, self._eps)
        if self._fc_norms is not None:
            count, size = self._fc_norms.shape
            parts = rms_norm_each(joined.view(-1, count, size), self._fc_norms, self._eps)
            joined = parts.view(-1, count * size)
        return joined if self._fc is None else self._joined(joined)

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        assert self._fc is not None
        x = self._fc(x)
        return x if self._fc_bias is None else x + self._fc_bias

    def enter(
        self, tokens: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64 [R], those after the features [R, hidden] -> what the first layer reads, and
        the residual [R, hidden]."""
        rows = self._embeddings.index_select(0, tokens.to(self._embeddings.device))
        embedded = rows.to(self._device, self._dtype)
        first = self.layers[0]
        if self.version == 1:
            residual = self._joined(torch.cat((embedded, features), -1))
            return self._normed(residual, first.input_norm), residual
        residual, normed = features, self._normed(features, first.hidden_norm)
        if self._norm_before_residual:
            residual = normed
        return torch.cat((self._normed(embedded, first.input_norm), normed), -1), residual

    def between(
        self, layer: int, moved: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What layer `layer` reads of the answer of the one below, and the residual."""
        residual = residual + moved
        return self._normed(residual, self.layers[layer].input_norm), residual

    def leave(
        self, moved: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The top layer's answer -> logits [R, N], and the next position's feature [R, hidden]."""
        output = residual + moved
        normed = self._normed(output, self._norm)
        logits = self._lm_head(normed)
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits, normed if self._norm_output else output

    def _normed(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        return x if gain is None else rms_norm(x, gain, self._eps)


def rms_norm_each(x: torch.Tensor, gains: torch.Tensor, eps: float) -> torch.Tensor:
    """x [R, count, size], gains float32 [count, size]: each part over its own root mean square."""
    whole = x.float()
    scale = torch.rsqrt(whole.square().mean(-1, keepdim=True) + eps)
    return (whole * scale).mul_(gains).to(x.dtype)
