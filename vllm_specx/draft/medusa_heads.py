"""The networks of draft heads: Medusa's parallel ones and sequential (Hydra) ones.

Both end in the space of the target's last hidden state, after its final norm, so that the target's
lm_head turns their answers into logits. Row t of the target's states is where it has read token t
and will say token t+1; when the heads run, token t+1 is committed, and depth d drafts token t+2+d.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vllm_specx.draft.dense import Dense


class ParallelHeads(nn.Module):
    """Medusa (arXiv 2401.10774): head d sees the hidden state only.

    weights: [heads, layers, hidden, hidden]; biases: [heads, layers, hidden] or None.
    """

    def __init__(self, weights: torch.Tensor, biases: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)
        self.biases = None if biases is None else nn.Parameter(biases)
        self._first: Dense | None = None

    @property
    def depth(self) -> int:
        """Tokens that can be drafted."""
        return self.weights.shape[0]

    def pack(self) -> None:
        """Make ready for inference."""
        self.requires_grad_(False)
        self._first = Dense(self.weights[:, 0].reshape(-1, self.weights.shape[-1]))
        self._first.pack()

    def forward(self, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """hidden [B, hidden] -> [heads, B, hidden], the first `heads` heads (default all)."""
        weights = self.weights[:heads].to(hidden.dtype)
        count, layers, size, _ = weights.shape
        state = hidden.expand(count, *hidden.shape)
        for layer in range(layers):
            if layer == 0 and self._first is not None and count == self.depth:
                moved = self._first(hidden).view(-1, count, size).transpose(0, 1)
            else:
                moved = torch.matmul(state, weights[:, layer].transpose(1, 2))
            if self.biases is not None:
                moved = moved + self.biases[:count, layer, None].to(hidden.dtype)
            state = state + functional.silu(moved)
        return state


class Scale(nn.Module):
    """RMS normalization with a gain per channel."""

    def __init__(self, gain: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape; the mean of squares is taken in float32."""
        size = (x.shape[-1],)
        return functional.rms_norm(x.float(), size, self.weight.float(), 1e-6).to(x.dtype)


class GatedLayer(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm = Scale(torch.ones(size))
        self.gate_up = Dense(torch.randn(2 * inner, size) / size**0.5, trained=True)
        self.down = Dense(torch.randn(size, inner) * (0.1 / inner**0.5), trained=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        moved: torch.Tensor = self.down(functional.silu(gate) * up)
        return x + moved


class SequentialHeads(nn.Module):
    """Hydra's idea (arXiv 2402.05109) with one network for every depth: each drafted token's
    embedding goes into the next state.

    state_0 is the target's hidden state; state_{d+1} = net(state_d, embedding of token t+1+d), and
    lm_head of state_{d+1} drafts token t+2+d.
    """

    def __init__(self, size: int, *, layers: int, inner: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.embedding_norm = Scale(torch.ones(size))
        self.state_norm = Scale(torch.ones(size))
        # At first the state passes through, so that training begins near what the target says.
        through = torch.cat((torch.randn(size, size) * (0.1 / size**0.5), torch.eye(size)), 1)
        self.fc = Dense(through, trained=True)
        self.layers = nn.ModuleList([GatedLayer(size, inner) for _ in range(layers)])
        self.norm = Scale(torch.ones(size))

    def pack(self) -> None:
        """Make ready for inference."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Dense):
                module.pack()

    def forward(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """state, embedding [..., size] -> the next state, same shape."""
        x = self.fc(torch.cat((self.embedding_norm(embedding), self.state_norm(state)), -1))
        for layer in self.layers:
            x = layer(x)
        following: torch.Tensor = self.norm(x)
        return following


def sequential_shapes(size: int, *, layers: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of SequentialHeads."""
    with torch.device("meta"):
        net = SequentialHeads(size, layers=layers, inner=inner, depth=1)
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def sequential_from(
    tensors: dict[str, torch.Tensor], *, depth: int, dtype: torch.dtype
) -> SequentialHeads:
    """The network of checked tensors (checkpoints.py)."""
    inner, size = tensors["layers.0.gate_up.weight"].shape
    layers = sum(name.endswith(".gate_up.weight") for name in tensors)
    net = SequentialHeads(size, layers=layers, inner=inner // 2, depth=depth)
    net.load_state_dict(tensors)
    return net.to(dtype)
