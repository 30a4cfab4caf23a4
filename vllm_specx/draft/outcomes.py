"""What became of the drafts: the calibration of a proposer learns from every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_specx.draft.depth_calibration import DepthCalibration
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree, IntArray


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft whose outcome is not known yet.

    tree: what the next tokens are compared with; it may be longer than what was proposed: what is
        not believed is still watched.
    depths, probabilities: [n], of its nodes. at: committed tokens when it was made.
    """

    tree: DraftTree
    depths: IntArray
    probabilities: npt.NDArray[np.float32]
    at: int


class Outcomes:
    """Compares the guesses of each request with what was committed next.

    calibration: is taught the outcomes. guesses: those that wait, by request.
    """

    def __init__(self, calibration: DepthCalibration) -> None:
        self._calibration = calibration
        self.guesses: dict[str, Guess] = {}

    def expect(self, request: str, guess: Guess) -> None:
        """Remember a guess until the request's next tokens are known."""
        self.guesses[request] = guess

    def learn(self, context: DraftContext) -> dict[str, int]:
        """Judge the guesses about this step's tokens and forget those of ended requests.

        Returns how many drafted tokens in a row were right, by request whose guess was judged.
        """
        depths: list[int] = []
        probabilities: list[float] = []
        right: list[bool] = []
        judged: dict[str, int] = {}
        for i, request in enumerate(context.request_ids):
            sampled = context.sampled[i]
            if not sampled or (guess := self.guesses.pop(request, None)) is None:
                continue
            if guess.at != int(context.num_tokens[i]) - len(sampled):
                continue
            judged[request] = 0
            for node, agreed in outcomes(guess.tree, sampled):
                depths.append(int(guess.depths[node]))
                probabilities.append(float(guess.probabilities[node]))
                right.append(agreed)
                judged[request] += agreed
        if depths:
            self._calibration.learn(
                np.array(depths), np.array(probabilities), np.array(right, dtype=bool)
            )
        for request in context.finished:
            self.guesses.pop(request, None)
        return judged


def outcomes(tree: DraftTree, sampled: Iterable[int]) -> Iterable[tuple[int, bool]]:
    """(node, whether it was right) for every child of a node that was accepted."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    node = -1
    for truth in sampled:
        following = None
        for child in range(node + 1, len(tokens)):
            if parents[child] == node:
                agreed = tokens[child] == truth
                yield child, agreed
                if agreed:
                    following = child
        if following is None:
            return
        node = following


def to_host(
    tokens: torch.Tensor, probabilities: torch.Tensor
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Both in one transfer: ids below 2**24 are exact in float32."""
    if tokens.device.type == "cpu":
        return tokens.to(torch.int32).numpy(), probabilities.float().numpy()
    both = torch.stack((tokens.float(), probabilities.float())).cpu().numpy()
    return both[0].astype(np.int32), both[1]
