"""What an EAGLE draft is made of, whatever the layout of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vllm_specx.draft.vocab import DraftVocab


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a Llama or Qwen2 decoder layer.

    rope: `rope_parameters` as transformers writes them (rope_type, rope_theta, factor, ...).
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. in: hidden, or 2 * hidden for the first layer of EAGLE-3.

    qkv: [(heads + 2 * kv_heads) * head_dim, in], q above k above v; qkv_bias: [...] or None.
    out: [hidden, heads * head_dim].
    gate_up: [2 * intermediate, hidden], gate above up; down: [hidden, intermediate].
    input_norm: [hidden]; None where EAGLE-1's first layer has none. EAGLE-3's norms the embeddings.
    hidden_norm: [hidden], EAGLE-3's norm of the features; None elsewhere.
    post_norm: [hidden], before the MLP.
    q_norm, k_norm: [head_dim], Qwen3's norms of each head's query and key; None elsewhere.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor | None
    hidden_norm: torch.Tensor | None
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class EagleWeights:
    """A draft that follows the target's hidden states, in the target's dtype.

    version: 1 (arXiv 2401.15077): fc joins [embedding of the next token, hidden]; no norms around
        the layer. 3 (arXiv 2503.01840): fc joins the auxiliary states, the first layer reads
        [norm(embedding), norm(feature)].
    fc: [hidden, 2 * hidden] for 1, [hidden, aux * target_hidden] for 3; None if a version 3 draft
        takes the target's last hidden state as it is. fc_bias: [hidden] or None.
    fc_norms: one [target_hidden] an auxiliary state (vLLM's `fc_norm`), or empty.
    input_norm: [aux * target_hidden], vLLM's `norm_before_fc`; or None.
    layers: at least one.
    norm: [hidden] before lm_head; None for 1.
    lm_head: [N, hidden] logits of the draft vocabulary; None: the target's rows.
    embeddings: [V, hidden]; None: the target's.
    vocab: the draft vocabulary; None is all of the target's.
    aux_layers: the target's layers whose input is an auxiliary state, as vLLM's
        set_aux_hidden_state_layers counts them; empty: the state after the final norm.
    norm_before_residual, norm_output, logit_scale: vLLM's keys (llama_eagle3.py).
    acceptance: by depth, given the one before was accepted, in training; empty if unknown.
    """

    version: Literal[1, 3]
    shape: DecoderShape
    fc: torch.Tensor | None
    fc_bias: torch.Tensor | None
    fc_norms: tuple[torch.Tensor, ...]
    input_norm: torch.Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor | None
    lm_head: torch.Tensor | None
    embeddings: torch.Tensor | None
    vocab: DraftVocab | None
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    acceptance: tuple[float, ...] = field(default=())
