"""The chains of a batch: one forward of the draft a depth, each request's as long as it pays."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.outcomes import to_host
from vllm_specx.draft.tree import IntArray

Probabilities = npt.NDArray[np.float32]
ChainSteps = Generator[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None, None]
"""Each depth's tokens and probabilities, [n] of the n requests that are left. It is sent the rows
int64 [m] of these that go on, or None for all of them, and must not end before the depth asked for."""
GoesOn = Callable[[Probabilities, IntArray], npt.NDArray[np.bool_]]
"""probabilities [B, d] of all so far, made int32 [B] -> which of the B requests want one more token."""


@dataclass(frozen=True, slots=True)
class Chains:
    """tokens int32 [B, depth] and the draft's probabilities of them [B, depth]; made: int32 [B], how
    many of each row; steps: forwards of the draft, the one that gave the first token among them."""

    tokens: IntArray
    probabilities: Probabilities
    made: IntArray
    steps: int


def draw(steps: ChainSteps, batch: int, depth: int, goes_on: GoesOn | None) -> Chains:
    """Draft `depth` tokens for each of `batch` requests, or fewer where goes_on ends a chain.

    goes_on: None where the host must not wait for the device in between: all depths are drafted, and
        there is one transfer.
    """
    if goes_on is None:
        every = [next(steps) for _ in range(depth)]
        tokens, probabilities = to_host(
            torch.stack([token for token, _ in every], 1),
            torch.stack([probability for _, probability in every], 1),
        )
        return Chains(tokens, probabilities, np.full(batch, depth, np.int32), depth)
    tokens = np.zeros((batch, depth), np.int32)
    probabilities = np.zeros((batch, depth), np.float32)
    made = np.zeros(batch, np.int32)
    going = np.arange(batch)
    keep: torch.Tensor | None = None
    for d in range(depth):
        token, probability = next(steps) if not d else steps.send(keep)
        tokens[going, d], probabilities[going, d] = token.numpy(), probability.float().numpy()
        made[going] = d + 1
        if d + 1 == depth:
            break
        stay = goes_on(probabilities[:, : d + 1], made)[going]
        if not stay.any():
            break
        keep = None
        # A smaller batch must save more than choosing its rows costs.
        if stay.sum() <= 0.75 * len(going):
            keep = torch.from_numpy(np.flatnonzero(stay))
            going = going[stay]
    return Chains(tokens, probabilities, made, int(made.max()))
