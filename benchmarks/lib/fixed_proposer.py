"""A custom_class proposer for cost measurements: as many wrong tokens as the prompt asks for."""

from __future__ import annotations

from typing import Any

import numpy as np

LEADS = 64
"""A prompt whose first token id is k (below this) gets drafts of k tokens, and k=0 none."""


class FixedProposer:
    """Drafts tokens that the target all but never agrees with, so a step commits one token."""

    def __init__(self, vllm_config: Any) -> None:
        vocab = vllm_config.model_config.get_vocab_size()
        self.limit = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.draft = np.random.default_rng(0).integers(LEADS, vocab, self.limit).tolist()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft a request; empty while it is in prefill and where its length ends."""
        return [
            self.draft[
                : min(int(token_ids_cpu[i, 0]), self.max_model_len - 1 - int(num_tokens_no_spec[i]))
            ]
            if sampled
            else []
            for i, sampled in enumerate(sampled_token_ids)
        ]
