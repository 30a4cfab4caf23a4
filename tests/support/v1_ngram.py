"""V1's n-gram lookahead, one request at a time: all that it would draft."""

from __future__ import annotations

import numpy as np

from vllm_specx import config
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext

DRAFT = 4


class V1:
    """A lookahead without a price of tokens. vocab: ids below it."""

    def __init__(self, settings: config.NgramConfig, vocab: int) -> None:
        self.vocab = vocab
        self.lookahead = NgramLookahead(settings, max_batch=4, max_model_len=512, max_draft=DRAFT)
        self._finished: list[str] = []

    def finish(self, request: str) -> None:
        """It has ended: what it said is shared."""
        self._finished.append(request)

    def propose(self, request: str, prompt: list[int], output: list[int]) -> list[int]:
        """The tokens predicted for a request of the default pool; DRAFT of them at most."""
        said = prompt + output
        tokens = np.zeros((1, 512), np.int32)
        tokens[0, : len(said)] = said
        found = self.lookahead.predict(
            DraftContext(
                request_ids=[request],
                rows=np.zeros(1, np.int32),
                token_ids=tokens,
                num_tokens=np.array([len(said)], np.int32),
                num_prompt_tokens=np.array([len(prompt)], np.int32),
                sampled=[[said[-1]]],
                budgets=np.full(1, DRAFT, np.int32),
                temperatures=np.zeros(1, np.float32),
                pools=["default"],
                finished=self._finished,
                vocab_size=self.vocab,
            )
        )
        self._finished = []
        return [int(token) for token in found.tokens[0, : found.lengths[0]]]
