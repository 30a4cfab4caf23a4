"""The networks of EAGLE drafts as they are trained; parameters have the names of vLLM's checkpoints.

Row i reads the embedding of token i+1 and the target's state(s) after token i; its output is turned
into logits of token i+2. Both kinds have one decoder layer (vLLM's llama_eagle3.py, llama_eagle.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_specx.train.errors import TrainError

_KEPT = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
)  # fmt: skip


def _text_config(target: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TrainError(f"the configuration of {target} cannot be read: {first}") from None
    return config.get_text_config()


def target_layers(target: str) -> int:
    """How many decoder layers the target has. Raises TrainError."""
    return int(_text_config(target).num_hidden_layers)


def hidden_size(target: str) -> int:
    """The width of the target's hidden states. Raises TrainError."""
    return int(_text_config(target).hidden_size)


def layer_config(target: str, bias: bool | None) -> Any:
    """A LlamaConfig of one layer in the sizes, RoPE and vocabulary of the target's.

    bias: of q, k and v; None: as the target has it. Raises TrainError.
    """
    from transformers import LlamaConfig

    config = _text_config(target)
    kept = {name: getattr(config, name) for name in _KEPT if hasattr(config, name)}
    if "num_key_value_heads" not in kept or "rms_norm_eps" not in kept:
        raise TrainError(
            f"EAGLE drafts are made of Llama's layer, and the target is of type "
            f"{config.model_type}; train Medusa heads for it (vllm-specx train medusa)."
        )
    # The draft's layer turns all of a head, and by one rule, whatever the target's layers do.
    for rope in ("rope_parameters", "rope_scaling"):
        if isinstance(kept.get(rope), dict):
            kept[rope] = {
                name: value
                for name, value in kept[rope].items()
                if name != "partial_rotary_factor" and not isinstance(value, dict)
            } or None
    if bias is None:
        bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
    return LlamaConfig(
        **kept, num_hidden_layers=1, attention_bias=bias, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip


def written(config: Any) -> dict[str, Any]:
    """What a checkpoint says of layer_config's."""
    said = config.to_dict()
    names = (
        "model_type", *_KEPT, "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias",
        "tie_word_embeddings", "dtype", "transformers_version",
    )  # fmt: skip
    return {name: said[name] for name in names if said.get(name) is not None}


class Linear(nn.Linear):
    """Multiplies in the format of its input, whatever that of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root mean square normalization in float32 with a gain per channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        size = (x.shape[-1],)
        return functional.rms_norm(x.float(), size, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections of grouped query attention."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        heads, kv, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.head_dim: int = dim
        bias = config.attention_bias
        self.q_proj = Linear(size, heads * dim, bias=bias)
        self.k_proj = Linear(size, kv * dim, bias=bias)
        self.v_proj = Linear(size, kv * dim, bias=bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, bias=False)


class Mlp(nn.Module):
    """Llama's gated feed forward layer."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        moved: torch.Tensor = self.down_proj(inner)
        return moved


class Layer(nn.Module):
    """A decoder layer: attention and feed forward, and the norms that its kind has."""

    def __init__(self, config: Any, *, wide: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * size if wide else size)
        self.mlp = Mlp(size, config.intermediate_size)
        if wide:
            self.input_layernorm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def heads(self, x: torch.Tensor, projection: str) -> torch.Tensor:
        """x [n, in] -> [n, heads of that projection, head_dim]."""
        projected: torch.Tensor = getattr(self.self_attn, projection)(x)
        return projected.view(len(x), -1, self.self_attn.head_dim)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """residual [n, hidden], attended [n, heads * head_dim] -> the layer's output [n, hidden]."""
        residual = residual + self.self_attn.o_proj(attended)
        moved: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return moved


class EagleNet(ABC, nn.Module):
    """Either kind; sizes in rows [n, ...], dtype that of the inputs."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        self.config = config
        self._rotary = LlamaRotaryEmbedding(config)

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The decoder layer."""

    @abstractmethod
    def feature(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [n, ...] -> the feature [n, hidden] that the layer reads first."""

    @abstractmethod
    def enter(
        self, embedding: torch.Tensor, feature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what attention reads [n, in], residual [n, hidden]) of embedding and feature [n, hidden]."""

    @abstractmethod
    def leave(self, feature: torch.Tensor) -> torch.Tensor:
        """The layer's output [n, hidden] -> what lm_head multiplies, same shape."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """As the checkpoint names them, bfloat16."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [n, heads, head_dim] at positions int64 [n]."""
        cos, sin = self._rotary(x, positions[None])
        low, high = x.chunk(2, -1)
        turned: torch.Tensor = x * cos[0, :, None] + torch.cat((-high, low), -1) * sin[0, :, None]
        return turned


def _normal(module: nn.Module, small: tuple[str, ...], factor: float = 0.1) -> None:
    """Weights of variance 1 / inputs; those whose name is in `small` shrunk, so that at first the
    residual passes through the layer."""
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            if name.rsplit(".", 1)[-1] in small:
                linear.weight.data *= factor
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class Eagle3Net(EagleNet):
    """EAGLE-3 (arXiv 2503.01840). lm_head: rows to begin with if they are trained, or None.

    scale: root mean square of the states that the target's lm_head multiplies.
    """

    def __init__(
        self,
        config: Any,
        *,
        aux: int,
        norm_before_residual: bool,
        lm_head: torch.Tensor | None,
        scale: float,
    ) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.fc_norm = nn.ModuleList([RMSNorm(size, eps) for _ in range(aux)])
        self.fc = Linear(aux * size, size, bias=False)
        self.midlayer = Layer(config, wide=True)
        self.norm = RMSNorm(size, eps)
        _normal(self, ("o_proj", "down_proj"))
        self.norm.weight.data.fill_(scale)
        self.lm_head = None
        if lm_head is not None:
            self.lm_head = Linear(lm_head.shape[1], lm_head.shape[0], bias=False)
            self.lm_head.weight.data.copy_(lm_head)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    def feature(self, states: torch.Tensor) -> torch.Tensor:
        parts = states.chunk(len(self.fc_norm), -1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        joined: torch.Tensor = self.fc(torch.cat(normed, -1))
        return joined

    def enter(
        self, embedding: torch.Tensor, feature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.midlayer.hidden_norm(feature)
        joined = torch.cat((self.midlayer.input_layernorm(embedding), normed), -1)
        return joined, normed if self.norm_before_residual else feature

    def leave(self, feature: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(feature)
        return normed

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: t.to(torch.bfloat16).contiguous() for n, t in self.state_dict().items()}


class Eagle1Net(EagleNet):
    """EAGLE-1 (arXiv 2401.15077).

    Trained in a space where the target's states and the embeddings have a mean square of 1, which the
    layer itself, having no norm, does not provide; tensors() folds the two scales into the weights.
    """

    def __init__(self, config: Any, *, scale: float, embedding_scale: float) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.scale, self.embedding_scale = scale, embedding_scale
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config, wide=False)])
        _normal(self, ("o_proj", "down_proj"))
        with torch.no_grad():
            self.fc.weight[:, size:] *= 0.1
            self.fc.weight[:, size:] += torch.eye(size)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def feature(self, states: torch.Tensor) -> torch.Tensor:
        return states / self.scale

    def enter(
        self, embedding: torch.Tensor, feature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((embedding / self.embedding_scale, feature), -1))
        return x, x

    def leave(self, feature: torch.Tensor) -> torch.Tensor:
        return feature * self.scale

    def tensors(self) -> dict[str, torch.Tensor]:
        size, scale = self.config.hidden_size, self.scale
        found = {name: t.clone() for name, t in self.state_dict().items()}
        found["fc.weight"][:, :size] *= scale / self.embedding_scale
        for name in ("q_proj", "k_proj"):
            found[f"layers.0.self_attn.{name}.weight"] /= scale
        if "layers.0.self_attn.v_proj.bias" in found:
            found["layers.0.self_attn.v_proj.bias"] *= scale
        found["layers.0.mlp.down_proj.weight"] *= scale
        return {name: t.to(torch.bfloat16).contiguous() for name, t in found.items()}
