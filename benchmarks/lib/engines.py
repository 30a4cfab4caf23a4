"""One configuration that is loaded and waits: an LLM in a worker process, or a server."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.counters import Counters
from benchmarks.lib.errors import BenchError
from benchmarks.lib.models import resolve, resolve_draft
from benchmarks.lib.processes import ProcessGroup, environment
from benchmarks.lib.prompts import Prompt
from benchmarks.lib.scenario import Configuration, Sampling, Scenario

START_TIMEOUT_S = 1800.0
BATCH_TIMEOUT_S = 3600.0
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "enable_prefix_caching": False,
    "seed": 0,
}
"""The same for every configuration unless the scenario says otherwise."""


@dataclass(frozen=True)
class Answer:
    """One request. ttft, tpot: seconds; tpot (after the first token) is None for one token."""

    token_ids: list[int]
    text: str
    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...] = ()
    """Seconds between the chunks of a stream, of a server: with speculation a chunk has several tokens."""


@dataclass(frozen=True)
class Batch:
    """Requests that were sent together. seconds: wall clock until the last one was done."""

    seconds: float
    answers: list[Answer]
    counters: Counters
    """Growth during the batch."""
    cpu_seconds: float | None = None
    """CPU time of the configuration's processes meanwhile."""


class Engine(ABC):
    """Loaded once, then frozen and thawed around every batch."""

    def __init__(self, scenario: Scenario, configuration: Configuration, model: str, log: Path):
        self.name = configuration.name
        self.env = environment(scenario.env, configuration.env)
        args = {**ENGINE_ARGS, **scenario.engine_args, **configuration.engine_args}
        if "model" in args:
            model = resolve(args.pop("model"))
        self.trace: Path | None = None
        if configuration.speculative_config is not None:
            speculative = resolve_draft(configuration.speculative_config, model)
            if scenario.trace and str(speculative.get("method", "")).startswith("specx:"):
                self.trace = log.with_suffix(".trace.jsonl").absolute()
                controller = speculative.get("controller", {})
                if isinstance(controller, Mapping):
                    speculative["controller"] = {**controller, "trace": str(self.trace)}
            args["speculative_config"] = speculative
        self.args = args
        self.model = model
        self.group = ProcessGroup(self._command(), self.env, log, pipes=scenario.mode == "engine")

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def wait_ready(self) -> None: ...

    @abstractmethod
    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sequence[Sampling], levels: Sequence[int] | None
    ) -> Batch: ...

    def start(self) -> float:
        """Wait until it can serve; the seconds that took. Raises BenchError if it cannot."""
        began = time.monotonic()
        self.wait_ready()
        return time.monotonic() - began

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        levels: Sequence[int] | None = None,
    ) -> Batch:
        """Run one batch with every other engine frozen, and freeze this one again.

        sampling: for all, or one for each prompt. levels: a request waits until fewer than this
        many are running; None: all are sent at once.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        return self.thawed(lambda: self._generate(prompts, each, levels))

    def thawed(self, work: Callable[[], Batch]) -> Batch:
        """Do the work of one batch while this engine may run."""
        before = self.group.cpu_seconds()
        self.group.thaw()
        try:
            batch = work()
        finally:
            self.group.freeze()
        return replace(batch, cpu_seconds=round(self.group.cpu_seconds() - before, 2))

    def close(self) -> None:
        self.group.close()

    def _failed(self, what: str) -> BenchError:
        return BenchError(
            f"configuration '{self.name}' {what}: {self.group.last_error()} "
            f"(its log: {self.group.log})"
        )


class WorkerEngine(Engine):
    """`LLM.generate` in a worker process that talks JSON lines over pipes."""

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.lib.worker"]

    def _ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        pipe_in, pipe_out = self.group.child.stdin, self.group.child.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps(request).encode() + b"\n")
            pipe_in.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe_out, selectors.EVENT_READ)
            while not selector.select(1.0):
                if self.group.child.poll() is not None:
                    raise self._failed("ended")
                if time.monotonic() > deadline:
                    raise self._failed(f"gave no answer in {timeout:.0f} s")
        line = pipe_out.readline()
        if not line:
            raise self._failed("ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            reason = reply["error"]
            if "See root cause above" in reason:
                reason = self.group.last_error()
            raise BenchError(f"configuration '{self.name}': {reason} (its log: {self.group.log})")
        return reply

    def wait_ready(self) -> None:
        self._ask({"op": "start", "args": {"model": self.model, **self.args}}, START_TIMEOUT_S)

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sequence[Sampling], levels: Sequence[int] | None
    ) -> Batch:
        return self._batch(
            [[dict(each) for each in prompt.messages] for prompt in prompts],
            sampling,
            levels,
            [prompt.schema for prompt in prompts],
        )

    def generate_ids(self, prompts: Sequence[list[int]], sampling: Sampling) -> Batch:
        """`generate` for prompts of token ids."""
        return self.thawed(lambda: self._batch(prompts, [sampling] * len(prompts), None))

    def _batch(
        self,
        prompts: Sequence[list[Any]],
        sampling: Sequence[Sampling],
        levels: Sequence[int] | None,
        schemas: Sequence[Any] | None = None,
    ) -> Batch:
        request = {
            "op": "generate",
            "prompts": list(prompts),
            "sampling": [each.model_dump() for each in sampling],
            "levels": levels,
            "schemas": schemas,
        }
        reply = self._ask(request, BATCH_TIMEOUT_S)
        return Batch(
            seconds=reply["seconds"],
            answers=[Answer(**answer) for answer in reply["answers"]],
            counters=Counters.parse(reply["after"]) - Counters.parse(reply["before"]),
        )


class ServerEngine(Engine):
    """The OpenAI-compatible server and a streaming client; ttft and tpot are the client's."""

    def _command(self) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=BATCH_TIMEOUT_S)
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
            "--port", str(port), "--model", self.model, "--served-model-name", "model",
            *flags(self.args),
        ]  # fmt: skip

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.group.child.poll() is not None:
                raise self._failed("did not start")
            try:
                if self.client.get("/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise self._failed(f"was not ready after {START_TIMEOUT_S:.0f} s")

    def _counters(self) -> Counters:
        return Counters.parse(self.client.get("/metrics").raise_for_status().text)

    def _one(self, prompt: Prompt, sampling: Sampling) -> Answer:
        body = {
            "model": "model",
            "messages": [dict(message) for message in prompt.messages],
            "stream": True,
            "return_token_ids": True,
            **sampling.model_dump(exclude_none=True),
        }
        if prompt.schema is not None:
            form = {"name": "answer", "schema": dict(prompt.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        began = time.perf_counter()
        first = last = None
        gaps: list[float] = []
        token_ids: list[int] = []
        texts: list[str] = []
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                reason = response.read().decode(errors="replace")[:200]
                raise BenchError(f"configuration '{self.name}' refused a request: {reason}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                for choice in json.loads(line[6:]).get("choices", []):
                    texts.append(choice["delta"].get("content") or "")
                    if new := choice.get("token_ids"):
                        now = time.perf_counter()
                        if first is None:
                            first, first_count = now, len(new)
                        elif last is not None:
                            gaps.append(now - last)
                        last = now
                        token_ids.extend(new)
        if first is None or last is None:
            return Answer([], "", None, None)
        later = len(token_ids) - first_count
        tpot = (last - first) / later if later else None
        return Answer(token_ids, "".join(texts), first - began, tpot, tuple(gaps))

    def _generate(
        self, prompts: Sequence[Prompt], sampling: Sequence[Sampling], levels: Sequence[int] | None
    ) -> Batch:
        try:
            before = self._counters()
            began = time.perf_counter()
            with ThreadPoolExecutor(len(prompts)) as pool:
                if levels is None:
                    answers = list(pool.map(self._one, prompts, sampling))
                else:
                    answers = self._stream(pool, prompts, sampling, levels)
            seconds = time.perf_counter() - began
            return Batch(seconds, answers, self._counters() - before)
        except httpx.HTTPError:
            raise self._failed("stopped answering") from None

    def _stream(
        self,
        pool: ThreadPoolExecutor,
        prompts: Sequence[Prompt],
        sampling: Sequence[Sampling],
        levels: Sequence[int],
    ) -> list[Answer]:
        """A request is sent once fewer than its level are running."""
        sent: list[Future[Answer]] = []
        for prompt, how, level in zip(prompts, sampling, levels, strict=True):
            while len(running := [future for future in sent if not future.done()]) >= level:
                wait(running, return_when=FIRST_COMPLETED)
            sent.append(pool.submit(self._one, prompt, how))
        return [future.result() for future in sent]

    def close(self) -> None:
        self.client.close()
        super().close()


def flags(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as command line flags: booleans as --x / --no-x, mappings as JSON."""
    words: list[str] = []
    for key, value in args.items():
        flag = key.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


ENGINES: dict[str, type[Engine]] = {"engine": WorkerEngine, "server": ServerEngine}
