"""A real vLLM engine in a process group of its own, driven over a pipe.

One engine a process (vLLM does not take a second one after an n-gram engine), stopped with SIGSTOP
between calls so that idle engines do not spin on the cores of the one at work.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "seed": 0,
    "block_size": 32,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 2**28,
}
_PR_SET_PDEATHSIG = 1


def preload() -> str:
    """LD_PRELOAD for an engine on a CPU; empty where Intel OpenMP is not installed."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(library) if library.exists() else ""


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """os.environ with changes, for the processes started inside."""
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class Engine:
    """Starts on construction; every method runs in the engine's process."""

    def __init__(self, log: Path, env: dict[str, str] | None = None, **kwargs: Any) -> None:
        self.log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_main, args=(child, str(log), {**DEFAULTS, **kwargs}), daemon=False
        )
        changes = {
            "LD_PRELOAD": preload(),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # idle engines are stopped, so no core need be free
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "36000",  # a step may be frozen in its middle
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process fewer to start; servers keep theirs
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `patches` sends a function to the worker
            **(env or {}),
        }
        with environment(changes):
            self._process.start()
        child.close()
        self._answer()
        self._stop()

    def chat(self, texts: Sequence[str], params: Any = None, **common: Any) -> list[dict[str, Any]]:
        """Answers to one user turn each. params: one mapping of SamplingParams, or one a text."""
        return self._call("chat", texts, params, common)  # type: ignore[no-any-return]

    def tokens(self, prompts: Sequence[Sequence[int]], **common: Any) -> list[dict[str, Any]]:
        """Continuations of token ids."""
        return self._call("tokens", [list(p) for p in prompts], None, common)  # type: ignore[no-any-return]

    def each(
        self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Continuations of token ids, each with its own mapping of SamplingParams."""
        return self._call("tokens", [list(p) for p in prompts], list(params), {})  # type: ignore[no-any-return]

    def prompt_ids(self, text: str) -> list[int]:
        """The chat template's token ids for one user turn."""
        return self._call("prompt_ids", text)  # type: ignore[no-any-return]

    def stream(self, text: str, **common: Any) -> dict[str, Any]:
        """As chat for one text, put together from what each step adds."""
        return self._call("stream", text, common)  # type: ignore[no-any-return]

    def patches(self) -> dict[str, bool]:
        """Which of our changes to vLLM are in effect in the worker."""
        return self._call("patches")  # type: ignore[no-any-return]

    def come_and_go(
        self,
        texts: Sequence[str],
        lengths: Sequence[int],
        aborted: Sequence[bool],
        at_once: int,
        seed: int,
    ) -> int:
        """Requests of max_tokens `lengths`, at most `at_once` at a time; some are aborted after a few
        steps. How many came to their end."""
        return self._call("come_and_go", texts, lengths, aborted, at_once, seed)  # type: ignore[no-any-return]

    def draft_sources(self) -> dict[str, int]:
        """AutoDrafter.sources in the worker."""
        return self._call("draft_sources")  # type: ignore[no-any-return]

    def draft_counts(self) -> dict[str, dict[str, int]]:
        """EngineProposer.specx_counts in the worker."""
        return self._call("draft_counts")  # type: ignore[no-any-return]

    def draft_cache(self) -> dict[str, int]:
        """EagleDrafter.cache_use() in the worker."""
        return self._call("draft_cache")  # type: ignore[no-any-return]

    def abort_one(self, texts: Sequence[str], after: int, **common: Any) -> list[list[int] | None]:
        """As chat, but the first request is aborted after `after` steps (None in the answer)."""
        return self._call("abort_one", texts, after, common)  # type: ignore[no-any-return]

    def counters(self) -> dict[str, Any]:
        """vLLM's own counters by name, without labels."""
        return self._call("counters")  # type: ignore[no-any-return]

    def _call(self, *message: Any) -> Any:
        os.killpg(self._process.pid or 0, signal.SIGCONT)
        try:
            self._pipe.send(message)
            return self._answer()
        finally:
            self._stop()

    def _answer(self) -> Any:
        while not self._pipe.poll(1):
            if not self._process.is_alive():
                raise RuntimeError(f"the engine died:\n{self.log.read_text()[-4000:]}")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise EngineError(value)
        return value

    def _stop(self) -> None:
        if self._process.is_alive():
            os.killpg(self._process.pid or 0, signal.SIGSTOP)

    def close(self) -> None:
        """End the engine and everything it started."""
        group = self._process.pid or 0
        for kill in (signal.SIGCONT, signal.SIGTERM):
            try:
                os.killpg(group, kill)
            except ProcessLookupError:
                return
        self._process.join(15)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.join()


class EngineError(Exception):
    """What the engine's process raised, as `Type: message`."""


def ids(outputs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The token ids of every sample of every output."""
    return [sequence for output in outputs for sequence in output["ids"]]


def grown(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    """By how much vLLM's counter `name` grew."""
    return int(after.get(f"vllm:{name}", 0) - before.get(f"vllm:{name}", 0))


def _die_with_parent() -> None:
    """A test run that is killed leaves no stopped engines behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(pipe: Connection, log: str, kwargs: dict[str, Any]) -> None:
    os.setsid()
    _die_with_parent()
    # A spawned process gets its parent's sys.path, whatever PYTHONPATH says.
    first = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = [part for part in first if part not in sys.path]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        from vllm import LLM

        llm = LLM(**kwargs)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ready", None))
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("value", globals()[f"_do_{name}"](llm, *arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def _params(params: Any, common: dict[str, Any], count: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    each = params if isinstance(params, list) else [params or {}] * count
    made = []
    for one in each:
        merged = {"temperature": 0.0, "max_tokens": 64, **common, **one}
        if "json_schema" in merged:
            merged["structured_outputs"] = StructuredOutputsParams(json=merged.pop("json_schema"))
        made.append(SamplingParams(**merged))
    return made


def _plain(outputs: Any) -> list[dict[str, Any]]:
    return [
        {
            "ids": [list(o.token_ids) for o in output.outputs],
            "text": [o.text for o in output.outputs],
            "reason": [o.finish_reason for o in output.outputs],
            "logprobs": [None if o.logprobs is None else len(o.logprobs) for o in output.outputs],
        }
        for output in outputs
    ]


def _conversations(texts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def _do_chat(llm: Any, texts: list[str], params: Any, common: dict[str, Any]) -> Any:
    batch = common.pop("batch", len(texts))
    made = _params(params, common, len(texts))
    outputs = []
    for start in range(0, len(texts), batch):
        part = slice(start, start + batch)
        outputs += llm.chat(_conversations(texts[part]), made[part], use_tqdm=False)
    return _plain(outputs)


def _do_tokens(llm: Any, prompts: list[list[int]], params: Any, common: dict[str, Any]) -> Any:
    salt = common.pop("cache_salt", None)
    made = _params(params, common, len(prompts))
    inputs = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
    return _plain(llm.generate(inputs, made, use_tqdm=False))


def _do_prompt_ids(llm: Any, text: str) -> list[int]:
    ids = llm.get_tokenizer().apply_chat_template(
        _conversations([text])[0], add_generation_prompt=True, return_dict=False
    )
    return [int(i) for i in ids]


def _do_stream(llm: Any, text: str, common: dict[str, Any]) -> Any:
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    (params,) = _params(None, {**common, "output_kind": RequestOutputKind.DELTA}, 1)
    prompt = {"prompt_token_ids": _do_prompt_ids(llm, text)}
    engine.add_request(f"stream-{time.monotonic_ns()}", prompt, params)
    whole: dict[str, Any] = {"ids": [], "text": "", "logprobs": 0, "reason": None, "chunks": 0}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (delta,) = output.outputs
            whole["chunks"] += 1
            whole["ids"] += delta.token_ids
            whole["text"] += delta.text
            whole["logprobs"] += len(delta.logprobs or ())
            whole["reason"] = delta.finish_reason or whole["reason"]
    return whole


def _do_patches(llm: Any) -> dict[str, bool]:
    (found,) = llm.collective_rpc(_patches_of_worker)
    return dict(found)


def _patches_of_worker(worker: Any) -> dict[str, bool]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_specx.engine import shims
    from vllm_specx.engine.patching import MARK

    return {
        "step": hasattr(GPUModelRunner.propose_draft_token_ids, MARK),
        "fits": hasattr(GPUModelRunner._input_fits_in_drafter, MARK),
        "sampler": not shims.expand_is_wrong(),
    }


def _do_abort_one(llm: Any, texts: list[str], after: int, common: dict[str, Any]) -> Any:
    engine = llm.llm_engine
    ids = [f"abort-{time.monotonic_ns()}-{i}" for i in range(len(texts))]
    for name, text, params in zip(ids, texts, _params(None, common, len(texts)), strict=True):
        engine.add_request(name, {"prompt_token_ids": _do_prompt_ids(llm, text)}, params)
    results: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                results[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == after:
            engine.abort_request([ids[0]])
    return [results.get(name) for name in ids]


def _do_come_and_go(
    llm: Any, texts: list[str], lengths: list[int], aborted: list[bool], at_once: int, seed: int
) -> int:
    chance = random.Random(seed)
    engine = llm.llm_engine
    waiting = list(zip(texts, lengths, aborted, strict=True))
    left: dict[str, int] = {}
    finished = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and len(left) < at_once:
            text, length, abort = waiting.pop()
            (params,) = _params(None, {"max_tokens": length, "ignore_eos": True}, 1)
            name = f"go-{time.monotonic_ns()}"
            engine.add_request(name, {"prompt_token_ids": _do_prompt_ids(llm, text)}, params)
            left[name] = chance.randrange(1, 12) if abort else 10**9
        for output in engine.step():
            if output.finished and left.pop(output.request_id, None) is not None:
                finished += 1
        for name in list(left):
            left[name] -= 1
            if left[name] <= 0:
                engine.abort_request([name])
                del left[name]
    return finished


def _do_draft_sources(llm: Any) -> dict[str, int]:
    (found,) = llm.collective_rpc(_draft_sources_of_worker)
    return dict(found)


def _draft_sources_of_worker(worker: Any) -> dict[str, int]:
    return dict(worker.model_runner.drafter.proposer.sources)


def _do_draft_counts(llm: Any) -> dict[str, dict[str, int]]:
    (found,) = llm.collective_rpc(_draft_counts_of_worker)
    return dict(found)


def _draft_counts_of_worker(worker: Any) -> dict[str, dict[str, int]]:
    counts = worker.model_runner.drafter.specx_counts
    return {name: dict(labels) for name, labels in counts.items()}


def _do_draft_cache(llm: Any) -> dict[str, int]:
    (found,) = llm.collective_rpc(_draft_cache_of_worker)
    return dict(found)


def _draft_cache_of_worker(worker: Any) -> dict[str, int]:
    return dict(worker.model_runner.drafter.proposer.cache_use())


def _do_counters(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "values", None))
        if value is not None:
            found[metric.name] = value
    return found
