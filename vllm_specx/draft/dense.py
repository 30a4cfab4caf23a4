"""Matrix products of a draft step, which has few rows: on a CPU the weights are packed once."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_PACK_ROWS = 4
"""Rows that the packed layout is made for."""
_WIDE_ROWS = 48
"""From here on float32 is faster on CPUs that do not multiply bfloat16 (1.7 times at 128 rows; those that do
take a third of its time)."""


class Dense(nn.Module):
    """`x @ weight.T`; weight [out, in].

    pack() fits the weights to this CPU once. Unpacked, PyTorch rearranges bfloat16 weights at every
    call, which is half the time of a product with one to four rows.
    """

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, *, trained: bool = False) -> None:
        super().__init__()
        if trained:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight, persistent=False)
        self._packed: torch.Tensor | None = None
        self._wide: torch.Tensor | None = None

    def pack(self) -> None:
        """Pack for inference, where this build of PyTorch can and it pays (bfloat16 on a CPU)."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)
            self._product(weight.new_zeros(1, weight.shape[1]), packed)
        except (RuntimeError, AttributeError):
            return
        self._packed = packed
        if not multiplies_bfloat16():
            self._wide = weight.detach().float()

    @property
    def bytes(self) -> int:
        """Of the weights and their packed copies."""
        copies = (self.weight, self._packed, self._wide)
        return sum(copy.numel() * copy.element_size() for copy in copies if copy is not None)

    @staticmethod
    def _product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if self._wide is not None and x.numel() >= _WIDE_ROWS * x.shape[-1]:
            return functional.linear(x.float(), self._wide).to(x.dtype)
        if self._packed is not None:
            return self._product(x, self._packed)
        weight = self.weight
        return functional.linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype))

    def tail(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """x [..., in] -> [..., out - first]: the outputs from `first` on, for many rows."""
        if self._wide is not None and x.numel() >= _WIDE_ROWS * x.shape[-1]:
            return functional.linear(x.float(), self._wide[first:]).to(x.dtype)
        return functional.linear(x, self.weight[first:].to(x.dtype))


def multiplies_bfloat16() -> bool:
    """Whether this CPU does, by AMX or AVX512-BF16, as far as PyTorch can tell."""
    names = "_is_amx_tile_supported", "_is_avx512_bf16_supported"
    known = [ask for name in names if (ask := getattr(torch.cpu, name, None)) is not None]
    return not known or any(ask() for ask in known)
