"""One Llama, Qwen2 or Qwen3 decoder layer for inference; attention and its cache are the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from vllm_specx.draft.checkpoints import CheckpointError
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.eagle_weights import DecoderShape, LayerWeights

Rotation = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries [R, heads, head_dim], keys above values [R, 2 * kv_heads, head_dim]), both rotated, ->
attention [S, heads * head_dim] of S rows; it also stores the keys and values."""


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] over its root mean square, times gain [size]; the mean is taken in float32."""
    return functional.rms_norm(x, (x.shape[-1],), gain, eps)


class Rotary:
    """Rotary position embedding, with the scaling that the checkpoint asks for (transformers'
    modeling_rope_utils), as a table of `positions` places.

    Raises CheckpointError for a scaling that is not known or that leaves dimensions unrotated.
    """

    def __init__(
        self,
        shape: DecoderShape,
        positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        frequencies, scale = _frequencies(shape)
        if 2 * len(frequencies) != shape.head_dim:
            raise CheckpointError(
                f"the draft rotates {2 * len(frequencies)} of {shape.head_dim} dimensions of a head; "
                "only layers that rotate all of them can be drafted with."
            )
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # A half turn of the dimensions turns with this sign: x * cos + roll(x) * sin.
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self._table = table.to(device, dtype)
        self._half = shape.head_dim // 2

    @property
    def bytes(self) -> int:
        """Of the table."""
        return self._table.nbytes

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions int64 [R] -> what rotate() takes."""
        rows = self._table.index_select(0, positions)[:, None]
        return rows[..., : 2 * self._half], rows[..., 2 * self._half :]

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> None:
        """Rotates x [R, heads, head_dim] in place."""
        cos, sin = rotation
        turned = x.roll(self._half, -1)
        x.mul_(cos).addcmul_(turned, sin)


def _frequencies(shape: DecoderShape) -> tuple[torch.Tensor, float]:
    rope: Mapping[str, Any] = shape.rope
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind == "default":
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        return 1.0 / (float(rope.get("rope_theta", 10000.0)) ** powers), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise CheckpointError(
            f"the draft's rope_type '{kind}' is not known; known are: {known}; "
            "correct it in its config.json."
        )
    keys: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    theta = float(rope.get("rope_theta", 10000.0))
    scaling = {**rope, "rope_type": kind}
    if hasattr(LlamaConfig, "standardize_rope_params"):
        keys |= {"rope_parameters": {**scaling, "rope_theta": theta}}
    else:  # transformers 4
        scaling.pop("rope_theta", None)
        keys |= {"rope_theta": theta, "rope_scaling": scaling}
    try:
        config = LlamaConfig(**keys)
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the draft's rope_type '{kind}' lacks {error}; add it in its config.json."
        ) from None
    return frequencies.float(), float(scale)


class DecoderLayer:
    """Attention and MLP with their residuals.

    The caller norms the layer's input; what comes back is the MLP's answer and the residual, not
    yet added, so that the next norm can take the sum.
    """

    def __init__(
        self,
        weights: LayerWeights,
        shape: DecoderShape,
        rotary: Rotary,
        device: torch.device | None = None,
    ) -> None:
        def dense(weight: torch.Tensor) -> Dense:
            layer = Dense(weight.detach().to(device).contiguous())
            layer.pack()
            return layer

        def moved(gain: torch.Tensor | None) -> torch.Tensor | None:
            return None if gain is None else gain.detach().to(device)

        self._heads, self._kv_heads, self._size = shape.heads, shape.kv_heads, shape.head_dim
        self._eps = shape.rms_norm_eps
        self._rotary = rotary
        self._qkv, self._out = dense(weights.qkv), dense(weights.out)
        self._gate_up, self._down = dense(weights.gate_up), dense(weights.down)
        self._bias = moved(weights.qkv_bias)
        self._q_norm, self._k_norm = moved(weights.q_norm), moved(weights.k_norm)
        self.input_norm, self.hidden_norm = moved(weights.input_norm), moved(weights.hidden_norm)
        post_norm = moved(weights.post_norm)
        assert post_norm is not None
        self._post_norm = post_norm

    @property
    def bytes(self) -> int:
        """Of the weights and their packed copies."""
        products = (self._qkv, self._out, self._gate_up, self._down)
        gains = (self._bias, self._q_norm, self._k_norm, self.input_norm, self.hidden_norm)
        small = sum(gain.nbytes for gain in (*gains, self._post_norm) if gain is not None)
        return small + sum(product.bytes for product in products)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, in] normed, residual [R, hidden] -> (MLP, residual), each [S, hidden].

        rows: int64 [S], the rows that attend() answers; None is all of them.
        """
        heads = self._qkv(x)
        if self._bias is not None:
            heads = heads + self._bias
        heads = heads.view(x.shape[0], -1, self._size)
        self._norm_heads(heads[:, : self._heads], self._q_norm)
        self._norm_heads(heads[:, self._heads : -self._kv_heads], self._k_norm)
        self._rotary.rotate(heads[:, : -self._kv_heads], rotation)
        moved = self._out(attend(heads[:, : self._heads], heads[:, self._heads :]))
        if rows is not None:
            residual = residual.index_select(0, rows)
        residual = residual + moved
        gate, up = self._gate_up(rms_norm(residual, self._post_norm, self._eps)).chunk(2, -1)
        return self._down(functional.silu(gate).mul_(up)), residual

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [R, in] normed -> rotated keys above values [R, 2 * kv_heads, head_dim], no queries."""
        first = self._heads * self._size
        both = self._qkv.tail(x, first)
        if self._bias is not None:
            both = both + self._bias[first:]
        both = both.view(x.shape[0], -1, self._size)
        self._norm_heads(both[:, : self._kv_heads], self._k_norm)
        self._rotary.rotate(both[:, : self._kv_heads], rotation)
        return both

    def _norm_heads(self, heads: torch.Tensor, gain: torch.Tensor | None) -> None:
        """In place, each head by itself."""
        if gain is not None:
            heads.copy_(rms_norm(heads, gain, self._eps))
