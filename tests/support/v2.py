"""One engine on Model Runner V2, on the CPU with Triton in interpreter mode, in a process of its own.

`run` gives the tokens; the process is started, asked once and ended, as an interpreted engine is slow
and everything about it is decided before vLLM is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.support.interpreted import answer, ask, let_vllm_find_triton

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "seed": 0,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 2**27,
}


def run(
    model: str,
    prompts: Sequence[Sequence[int]],
    speculative: dict[str, Any] | None,
    *,
    batches: Sequence[int] = (1, 4),
    max_tokens: int = 16,
    env: dict[str, str] | None = None,
    asynchronous: bool = False,
    ks: Sequence[int] = (),
    params: dict[str, Any] | None = None,
    timeout: float = 500,
    **engine: Any,
) -> dict[str, Any]:
    """What the engine said: `tokens` (one list of answers for each size of batches), `counters`,
    `scheduled` (K of each step), `scheduler` and `runner` (names of classes), `synchronized` (operations
    in drafting that wait for the device).

    asynchronous: with vLLM's asynchronous scheduling, which its CPU platform switches off. ks: the
    scheduler is made to take these K in turn. Raises RuntimeError with the end of the log.
    """
    request = {
        "model": model,
        "prompts": [list(prompt) for prompt in prompts],
        "speculative": speculative,
        "batches": list(batches),
        "params": {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **(params or {}),
        },
        "asynchronous": asynchronous,
        "ks": list(ks),
        "engine": {**DEFAULTS, **engine},
    }
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", **(env or {})}
    return ask("tests.support.v2", request, variables, timeout)


def _main() -> None:
    request = json.load(sys.stdin)
    let_vllm_find_triton()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if request["asynchronous"]:
        _schedule_asynchronously()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["model"], speculative_config=request["speculative"], **request["engine"]
    )
    scheduled = _watch_k(llm, request["ks"])
    params = SamplingParams(**request["params"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    with _watch_drafting(llm) as synchronized:
        tokens = []
        for batch in request["batches"]:
            said: list[list[int]] = []
            for start in range(0, len(prompts), batch):
                part = prompts[start : start + batch]
                said += [
                    list(o.outputs[0].token_ids) for o in llm.generate(part, params, use_tqdm=False)
                ]
            tokens.append(said)
    core = llm.llm_engine.engine_core.engine_core
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    runner = core.model_executor.driver_worker.worker.model_runner
    found = {
        "tokens": tokens,
        "counters": counters,
        "scheduled": scheduled,
        "scheduler": type(core.scheduler).__name__,
        "runner": type(runner).__module__,
        "speculator": type(runner.speculator).__name__,
        "synchronized": synchronized,
    }
    answer(found)


def _schedule_asynchronously() -> None:
    """As on a GPU; vllm/platforms/cpu.py switches it off whatever was asked for."""
    from vllm_specx.engine.v2 import seams

    seams._can_be_asynchronous = lambda vllm_config: True
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def adapt_and_keep(platform: Any, vllm_config: Any) -> None:
        kept = vllm_config.scheduler_config.async_scheduling
        adapt(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = kept

    CpuPlatform.check_and_update_config = classmethod(adapt_and_keep)  # type: ignore[assignment]


def _watch_k(llm: Any, ks: list[int]) -> list[int]:
    """K of every step; ks are taken in turn instead of what the scheduler chose."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduled: list[int] = []
    steering = getattr(scheduler, "_steering", None)
    if steering is None:
        return scheduled
    decide = steering._choose

    def choose(output: Any, request_ids: list[str], *rest: Any) -> int:
        steps: int = decide(output, request_ids, *rest)
        if ks:
            k = ks[len(scheduled) % len(ks)]
            steering._chosen = dict.fromkeys(request_ids, k)
            output.num_spec_tokens_to_schedule = steps = k
        scheduled.append(int(output.num_spec_tokens_to_schedule))
        return steps

    steering._choose = choose
    return scheduled


def _watch_drafting(llm: Any) -> Any:
    """A context that counts, over all propose() calls, operations that wait for the device."""
    from contextlib import contextmanager

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique"}

    class Waiting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            if name in waits or (name.startswith("aten::index") and _masks(args)):
                found.append(name)
            return func(*args, **(kwargs or {}))

    def _masks(args: Any) -> bool:
        indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)

    found: list[str] = []

    @contextmanager
    def watching() -> Any:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        speculator = worker.model_runner.speculator
        if speculator is None or not hasattr(speculator, "draft"):
            yield found
            return
        draft = speculator.draft

        def watched(*args: Any) -> Any:
            with Waiting():
                return draft(*args)

        speculator.draft = watched
        yield found

    return watching()


if __name__ == "__main__":
    _main()
