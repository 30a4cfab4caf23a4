"""One engine on Model Runner V1 with draft trees as on a GPU, on the CPU: vLLM's Triton attention and our kernel,
both interpreted, in a process of its own.

`run` gives what was said for each script; the first drafts nothing, and its answers are those of the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.interpreted import answer, ask, let_vllm_find_triton

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 384,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "seed": 0,
    "kv_cache_memory_bytes": 2**24,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}


def run(
    model: str,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    scripts: Sequence[dict[str, Any]],
    max_tokens: int,
    timeout: float = 500,
    **engine: Any,
) -> dict[str, Any]:
    """Of each script `tokens`, and `accepted`, the nodes of trees; and the `log`. Raises RuntimeError with the
    end of the log.

    scripts: as tree_watched.py takes them, with the key `batch`.
    """
    request = {
        "model": model,
        "prompts": [list(prompt) for prompt in prompts],
        "scripts": [{"mode": "nothing", "batch": len(prompts)}, *scripts],
        "max_tokens": max_tokens,
        "engine": {**DEFAULTS, **engine},
    }
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "SPECX_TEST_SCRIPT": str(folder / "script.json"),
        "SPECX_TEST_COUNTS": str(folder / "counts.json"),
    }
    return ask("tests.support.tree_gpu", request, variables, timeout)


def like_a_gpu() -> None:
    """vLLM takes its Triton attention here, and we take this device for a GPU. Before vLLM is imported."""
    let_vllm_find_triton()
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from vllm_specx.engine import tree_gpu

    path = ".".join(TritonAttentionBackend.full_cls_name())
    CpuPlatform.get_attn_backend_cls = classmethod(  # type: ignore[method-assign,assignment]
        lambda *arguments, **keywords: path
    )
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    tree_gpu.DEVICE = "cpu"
    tree_gpu.processors_of = lambda device: 16


def _main() -> None:
    request = json.load(sys.stdin)
    like_a_gpu()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm import LLM, SamplingParams

    script, counts = (Path(os.environ[f"SPECX_TEST_{n}"]) for n in ("SCRIPT", "COUNTS"))
    script.write_text(json.dumps({"mode": "nothing"}))
    llm = LLM(
        model=request["model"],
        speculative_config={
            "method": "custom_class",
            "model": "tests.support.tree_watched.WatchedTrees",
            "num_speculative_tokens": 32,
        },
        **request["engine"],
    )
    prompts = request["prompts"]
    params = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
    )
    answers: dict[str, list[int]] = {}
    found: dict[str, Any] = {"tokens": [], "accepted": []}
    accepted = 0
    for number, each in enumerate(request["scripts"]):
        script.write_text(json.dumps({**each, "answers": answers}))
        os.utime(script, ns=(number, number))
        said: list[list[int]] = []
        for start in range(0, len(prompts), each["batch"]):
            part = [
                {"prompt_token_ids": ids, "cache_salt": each.get("left_out", "shared")}
                for ids in prompts[start : start + each["batch"]]
            ]
            outputs = llm.generate(part, params, use_tqdm=False)
            said += [list(output.outputs[0].token_ids) for output in outputs]
        if not answers:
            answers = {json.dumps(p): ids for p, ids in zip(prompts, said, strict=True)}
        before = accepted
        if counts.exists():
            accepted = json.loads(counts.read_text())["tree_accepted"].get("", 0)
        found["tokens"].append(said)
        found["accepted"].append(accepted - before)
    answer(found)


if __name__ == "__main__":
    _main()
