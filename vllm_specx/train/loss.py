"""Cross-entropy through lm_head without keeping the logits."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 512
"""Rows whose logits exist at one time."""


class _FusedCrossEntropy(torch.autograd.Function):
    """The autograd function of fused_cross_entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        teacher: torch.Tensor,
        hard: torch.Tensor,
        alpha: float,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(states)
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        loss = torch.zeros((), device=states.device)
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = (states[part] @ lm_head.T).float()
            best[part] = logits.argmax(-1)
            total = torch.logsumexp(logits, -1, keepdim=True)
            wanted = teacher[part].float() * (1.0 - alpha)
            wanted.scatter_add_(-1, hard[part, None], torch.full_like(total, alpha))
            each = total[:, 0] - (wanted * logits).sum(-1)
            loss += (each * weights[part]).sum()
            delta = logits.sub_(total).exp_().sub_(wanted).mul_(weights[part, None])
            gradient[part] = delta.to(lm_head.dtype) @ lm_head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def fused_cross_entropy(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    teacher: torch.Tensor,
    hard: torch.Tensor,
    alpha: float,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_i weight_i * H(target_i, softmax(states_i @ lm_head.T)), its gradient made on the way.

    The vocabulary's softmax is most of training: logits, probabilities and the gradient are made
    for CHUNK rows, used and dropped, as Liger Kernel's fused linear cross entropy does
    (arXiv 2410.10989). lm_head gets no gradient.

    states: [n, hidden]; lm_head: [N, hidden]; teacher: [n, N] probabilities; hard: int64 [n], the
    teacher's argmax; alpha: the share of the hard label in the target; weights: float32 [n].
    Returns (loss, argmax int64 [n]).
    """
    apply: Any = _FusedCrossEntropy.apply
    loss, best = apply(states, lm_head, teacher, hard, alpha, weights)
    return loss, best


@torch.no_grad()
def teacher_probabilities(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """What the target says over the draft vocabulary: [n, hidden] -> [n, N] in hidden's dtype."""
    parts = [
        torch.softmax((hidden[i : i + CHUNK] @ lm_head.T).float(), -1).to(hidden.dtype)
        for i in range(0, len(hidden), CHUNK)
    ]
    return torch.cat(parts)


class _SparseCrossEntropy(torch.autograd.Function):
    """The autograd function of sparse_cross_entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        ids: torch.Tensor,
        wanted: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        rows = torch.zeros_like(lm_head) if ctx.needs_input_grad[1] else None
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        loss = torch.zeros((), device=states.device)
        for begin in range(0, len(states), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = (states[part] @ lm_head.T).float()
            top, best[part] = logits.max(-1)
            said = logits.gather(-1, ids[part])
            delta = torch.softmax(logits, -1)
            total = top - delta.gather(-1, best[part, None])[:, 0].log()
            loss += ((total - (said * wanted[part]).sum(-1)) * weights[part]).sum()
            delta = delta.scatter_add_(-1, ids[part], -wanted[part]).to(lm_head.dtype)
            weight = weights[part, None].to(lm_head.dtype)
            if gradient is not None:
                gradient[part] = (delta @ lm_head).mul_(weight)
            if rows is not None:
                rows.addmm_(delta.T, states[part] * weight)
        ctx.save_for_backward(gradient, rows)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = [None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors]
        return *made, None, None, None


def sparse_cross_entropy(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    ids: torch.Tensor,
    wanted: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_cross_entropy of a distribution that is zero but at a few tokens; lm_head may be trained.

    states: [n, hidden]; lm_head: [N, hidden]; ids: int64 [n, k], distinct where wanted is not 0;
    wanted: float32 [n, k] probabilities that add up to 1; weights: float32 [n].
    Returns (loss, argmax int64 [n]).
    """
    apply: Any = _SparseCrossEntropy.apply
    loss, best = apply(states, lm_head, ids, wanted, weights)
    return loss, best
