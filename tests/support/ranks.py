"""Tensor parallelism on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engine import Engine, grown, ids


def check_two_ranks(folder: Path, target: str, speculation: dict[str, Any]) -> None:
    """Two ranks with drafts say what one says without; target: of tests.support.tiny."""
    prompts = [[5, 6, 7 + i] for i in range(5)]
    said = []
    for ranks in (1, 2):
        engine = Engine(
            folder / f"log{ranks}",
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            model=target,
            speculative_config=speculation if ranks == 2 else None,
            tensor_parallel_size=ranks,
            skip_tokenizer_init=True,
            max_model_len=256,
        )
        try:
            before = engine.counters()
            said.append(
                ids(engine.tokens(prompts, max_tokens=40, ignore_eos=True, detokenize=False))
            )
            drafted = grown(before, engine.counters(), "spec_decode_num_draft_tokens")
            assert (drafted > 100) == (ranks == 2)
        finally:
            engine.close()
    assert said[0] == said[1]
