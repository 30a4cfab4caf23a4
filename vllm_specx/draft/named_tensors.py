"""The tensors of a checkpoint by name, and the decoder layers that they make."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from vllm_specx.draft.checkpoint_files import CheckpointError, Tensors
from vllm_specx.draft.eagle_weights import DecoderShape, LayerWeights

_UNUSED = "rotary_emb."
_OTHERS = (
    ("experts", "a mixture of experts"),
    ("mlp.gate.weight", "a mixture of experts"),
    ("kv_a_proj", "multi-head latent attention"),
    ("kv_b_proj", "multi-head latent attention"),
    ("q_norm", "norms of queries and keys"),
    ("k_norm", "norms of queries and keys"),
    ("mask_hidden", "parallel drafting"),
    ("layernorm", "further norms"),
)
"""Parts of names, and what has them."""


@dataclass
class NamedTensors:
    """tensors: under the names that are asked for; written: what the files call them. dtype: that they
    come back in. needs: whose shapes they must have, for messages, such as `its config.json needs`.
    used: names that were asked for.

    Tensors without values (on the device `meta`) have their names and shapes checked alone.
    """

    tensors: Tensors
    written: dict[str, str]
    path: Path
    dtype: torch.dtype
    needs: str
    used: set[str] = field(default_factory=set, kw_only=True)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as it was written. Raises CheckpointError."""
        self.used.add(name)
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path} has no '{self._as_written(name)}'; it may be incomplete, copy it again."
            )
        return self.tensors[name]

    def rows(self, name: str) -> int:
        """The tensor's first dimension; 0 for a number."""
        shape = self.raw(name).shape
        return int(shape[0]) if shape else 0

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, which must have this shape. Raises CheckpointError."""
        tensor = self.raw(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.path}: '{self.written[name]}' has shape {list(tensor.shape)}, but {self.needs} "
                f"{list(shape)}."
            )
        return tensor.to(self.dtype)

    def get_if_there(self, name: str, *shape: int) -> torch.Tensor | None:
        """As get(); None if there is no such tensor."""
        return self.get(name, *shape) if name in self.tensors else None

    def refuse_the_rest(self, kind: str, *, but: re.Pattern[str] | None = None) -> None:
        """Refuse tensors that were not asked for: they would change what the network says.

        kind: what is read, for messages. but: names that are of no use. Raises CheckpointError.
        """
        rest = sorted(
            name
            for name in self.tensors
            if name not in self.used and _UNUSED not in name and not (but and but.search(name))
        )
        if rest:
            what = next((said for part, said in _OTHERS if part in rest[0]), "something else")
            raise CheckpointError(
                f"{self.path} has '{self.written[rest[0]]}' ({what}), which {kind} has no place for; "
                "this draft cannot be used."
            )

    def _as_written(self, name: str) -> str:
        """A name that is not there, with the prefix that the file has for the first layer."""
        for there, written in self.written.items():
            inside = there.removeprefix("layers.0.")
            if inside != there and name.startswith("layers.0."):
                return written.removesuffix(inside) + name.removeprefix("layers.0.")
        return name


def read_layer(
    named: NamedTensors,
    at: str,
    shape: DecoderShape,
    *,
    doubled: bool = False,
    input_norm: Literal["always", "if there"] = "always",
    head_norms: bool = False,
) -> LayerWeights:
    """The decoder layer whose tensors begin with `at`.

    doubled: EAGLE-3's first layer, which reads two vectors and norms the second by a hidden_norm.
    head_norms: norms of queries and keys are read, as Qwen3 has them. Raises CheckpointError.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    wide = 2 * hidden if doubled else hidden
    rows = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    rows = {name: heads * shape.head_dim for name, heads in rows.items()}
    biases = [f"{at}self_attn.{name}_proj.bias" for name in rows]
    biased = any(name in named for name in biases)
    for name in (
        f"{at}self_attn.o_proj.bias",
        *(f"{at}mlp.{p}_proj.bias" for p in ("gate", "up", "down")),
    ):
        if name in named and not (bias := named.raw(name)).is_meta and bool(bias.any()):
            raise CheckpointError(
                f"{named.path}: '{named.written[name]}' is not supported; only q, k and v may have a bias."
            )
    norm = f"{at}input_layernorm.weight"
    return LayerWeights(
        qkv=torch.cat(
            [named.get(f"{at}self_attn.{n}_proj.weight", size, wide) for n, size in rows.items()]
        ),
        qkv_bias=torch.cat(
            [named.get(name, size) for name, size in zip(biases, rows.values(), strict=True)]
        )
        if biased
        else None,
        out=named.get(f"{at}self_attn.o_proj.weight", hidden, rows["q"]),
        gate_up=torch.cat(
            [named.get(f"{at}mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")]
        ),
        down=named.get(f"{at}mlp.down_proj.weight", hidden, inner),
        input_norm=named.get_if_there(norm, hidden)
        if input_norm == "if there"
        else named.get(norm, hidden),
        hidden_norm=named.get(f"{at}hidden_norm.weight", hidden) if doubled else None,
        post_norm=named.get(f"{at}post_attention_layernorm.weight", hidden),
        q_norm=named.get(f"{at}self_attn.q_norm.weight", shape.head_dim) if head_norms else None,
        k_norm=named.get(f"{at}self_attn.k_norm.weight", shape.head_dim) if head_norms else None,
    )
