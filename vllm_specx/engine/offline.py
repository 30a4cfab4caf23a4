"""The target as a generator of text, without a server: what `vllm-specx train` needs of vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; max_tokens counts generated tokens."""

    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """token_ids: with the end-of-sequence token, if the model came to its end (finished)."""

    token_ids: list[int]
    text: str
    finished: bool


class OfflineTarget:
    """A vLLM engine without speculation that generates for lists of token ids."""

    def __init__(self, model: str, *, batch: int, max_model_len: int, **engine_args: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        from vllm import LLM

        self._llm = LLM(
            model=model,
            max_num_seqs=batch,
            max_model_len=max_model_len,
            disable_log_stats=True,
            **engine_args,
        )

    def tokenizer(self) -> Any:
        """The target's tokenizer, a transformers one."""
        return self._llm.get_tokenizer()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
    ) -> list[Completion]:
        """One completion a prompt, in order; all prompts are given to the engine at once."""
        from vllm import SamplingParams

        if not prompts:
            return []
        params = [
            SamplingParams(temperature=s.temperature, max_tokens=s.max_tokens) for s in sampling
        ]
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return [Completion(list(a.token_ids), a.text, a.finish_reason == "stop") for a in answers]
