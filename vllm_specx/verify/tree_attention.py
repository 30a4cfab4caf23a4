"""Attention of a draft tree's rows, in plain PyTorch: what the kernels are compared with."""

from __future__ import annotations

import torch


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The answer [rows, heads, head_dim] in the dtype of q; computed in float32 or, of float64, in that.

    q [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim], of the tree's rows; context_k, context_v
    [kv_heads, length, head_dim], of the committed tokens before them, which all rows see; visible:
    bool [rows, rows].
    """
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = q.to(work).reshape(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    keys = torch.cat((context_k, k.transpose(0, 1)), 1).to(work)
    values = torch.cat((context_v, v.transpose(0, 1)), 1).to(work)
    scores = torch.einsum("hgrd,hnd->hgrn", groups, keys) * scale
    scores[..., context_k.shape[1] :].masked_fill_(~visible, -torch.inf)
    answer = torch.einsum("hgrn,hnd->hgrd", scores.softmax(-1), values)
    return answer.permute(2, 0, 1, 3).reshape(rows, heads, size).to(q.dtype)
