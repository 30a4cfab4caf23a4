"""Draft heads whose chains stay on the device: MedusaDrafter without probabilities and lists."""

from __future__ import annotations

import torch

from vllm_specx.draft.medusa import MedusaDrafter


class DeviceHeads(MedusaDrafter):
    """No step waits for the host, and shapes follow from the batch and the depth alone."""

    @property
    def network(self) -> torch.nn.Module:
        """The heads without the lm_head."""
        network = self._parallel if self._parallel is not None else self._sequential
        assert network is not None
        return network

    def chains(self, hidden: torch.Tensor, last: torch.Tensor, depth: int) -> torch.Tensor:
        """int64 [B, depth], the likeliest tokens. hidden: [B, hidden] at the last accepted rows; last:
        int64 [B], the token that follows; depth: at most the number of heads."""
        state = hidden.to(self._dtype)
        if self._parallel is not None:
            return self._targets(self.logits(state, depth).argmax(-1)).T
        assert self._sequential is not None
        tokens, token = [], last
        for _ in range(depth):
            state = self._sequential(state, self._embed(token))
            token = self._targets(self._logits(state).argmax(-1))
            tokens.append(token)
        return torch.stack(tokens, 1)
