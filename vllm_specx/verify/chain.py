"""Verifying a chain of drawn tokens (arXiv 2211.17192, algorithm 1; 2302.01318, theorem 1).

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)). The first one that is not is
replaced by a token of the residual max(p - q, 0) over the whole vocabulary, and what was drafted after it is
thrown away; after a draft that is accepted whole comes one more token of p. Then every token has the
distribution p, given those before it, whatever q is: also a q that is certain of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[V]: with what probability each token is accepted, if it is drawn. p, q: [V], each sums to 1. A token
    that q never draws is never accepted."""
    return torch.where(q > 0, (p / q.clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1.0), 0.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[V]: what replaces a rejected token; p itself where q is p, as nothing is rejected then."""
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    return left / total if total > 0 else p


def said(
    draft: Sequence[int], p: Sequence[torch.Tensor], q: Sequence[torch.Tensor]
) -> dict[tuple[int, ...], float]:
    """The tokens that a step commits, and their probabilities, for a given draft.

    p: n + 1 times [V], of the target after each beginning of the draft; q: n times [V], what its tokens
    were drawn from.
    """
    outcomes: dict[tuple[int, ...], float] = {}

    def ends(before: tuple[int, ...], reached: float, following: torch.Tensor) -> None:
        for token, probability in enumerate(following.tolist()):
            if probability * reached > 0:
                outcomes[(*before, token)] = reached * probability

    reached = 1.0
    for i, token in enumerate(draft):
        accepted = float(acceptance(p[i], q[i])[token])
        ends(tuple(draft[:i]), reached * (1.0 - accepted), residual(p[i], q[i]))
        reached *= accepted
    ends(tuple(draft), reached, p[len(draft)])
    return outcomes
