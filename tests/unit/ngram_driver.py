"""Drives NgramLookahead as a runner would: requests in rows, tokens committed step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specx.config import NgramConfig
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext

VOCABULARY = 1000


@dataclass
class Request:
    name: str
    prompt: int
    tokens: list[int]
    pool: str | None = "default"
    sampled: list[int] = field(default_factory=list)
    temperature: float = 0.0


class Runner:
    """A batch in rows of one array; `step` proposes for some requests and returns their drafts."""

    def __init__(
        self,
        lookahead: NgramLookahead,
        rows: int = 8,
        width: int = 512,
        costs: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.lookahead = lookahead
        self.costs = costs
        self.token_ids = np.zeros((rows, width), np.int32)
        self.finished: list[str] = []

    def step(
        self,
        requests: Sequence[Request],
        budget: int | Sequence[int] = 16,
        rows: Sequence[int] | None = None,
        vocab_size: int = VOCABULARY,
    ) -> list[list[int]]:
        size = len(requests)
        places = np.asarray(range(size) if rows is None else rows, np.int32)
        for row, request in zip(places, requests, strict=True):
            self.token_ids[row] = 999
            self.token_ids[row, : len(request.tokens)] = request.tokens
        before = self.token_ids.copy()
        trees = self.lookahead.propose(
            DraftContext(
                request_ids=[r.name for r in requests],
                rows=places,
                token_ids=self.token_ids,
                num_tokens=np.array([len(r.tokens) for r in requests], np.int32),
                num_prompt_tokens=np.array([r.prompt for r in requests], np.int32),
                sampled=[r.sampled for r in requests],
                budgets=np.broadcast_to(np.asarray(budget, np.int32), (size,)),
                temperatures=np.array([r.temperature for r in requests], np.float32),
                pools=[r.pool for r in requests],
                finished=self.finished,
                vocab_size=vocab_size,
                costs=self.costs,
            )
        )
        self.finished = []
        assert np.array_equal(before, self.token_ids)
        assert len(trees) == size
        assert all(tree.is_chain for tree in trees)
        return [tree.tokens.tolist() for tree in trees]

    def serve(self, request: Request, output: Sequence[int], budget: int = 16) -> list[list[int]]:
        """Generate `output`, accepting what agrees; returns every draft. The request finishes."""
        drafts: list[list[int]] = []
        done = 0
        agreed = 0
        while done < len(output):
            request.sampled = list(output[done : done + agreed + 1])
            request.tokens += request.sampled
            done += len(request.sampled)
            (draft,) = self.step([request], budget)
            drafts.append(draft)
            agreed = 0
            while agreed < len(draft) and output[done : done + agreed + 1] == draft[: agreed + 1]:
                agreed += 1
        self.finished.append(request.name)
        return drafts


def lookahead(max_draft: int = 16, max_batch: int = 8, **keys: object) -> NgramLookahead:
    return NgramLookahead(NgramConfig.model_validate(keys), max_batch, 512, max_draft)


def request(name: str, tokens: Sequence[int], prompt: int = 1, **keys: object) -> Request:
    """A request whose last token was just sampled."""
    return Request(name, prompt, list(tokens), sampled=[tokens[-1]], **keys)  # type: ignore[arg-type]
