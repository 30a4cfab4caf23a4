"""vLLM's real scheduler with ours in it, and a made-up model: drafts, acceptance and time are scripted.

A clock that only the model moves takes the place of time.perf_counter, so runs repeat exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specx.engine.plan import DRAFT_STEPS, PLAN

STEP = 0.010
MAX_MODEL_LEN = 512


def step_seconds(requests: int, tokens: int, draft_steps: int) -> float:
    """A step that is bound by memory until some 16 tokens, and by arithmetic from there."""
    return STEP * (
        1.0 + 0.004 * requests + max(0.012 * tokens, 0.06 * (tokens - 12)) + 0.04 * draft_steps
    )


@dataclass
class Stream:
    """A request: how likely each draft token is accepted, given that those before it were."""

    acceptance: Callable[[int], float]
    """Of how many tokens it has said."""
    prompt: int = 16
    tokens: int = 64
    extra: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0


@dataclass
class Step:
    """What one step was."""

    requests: int
    k: int
    """Draft tokens asked for, for the next step."""
    drafted: dict[str, int]
    prefill: bool
    preempted: int


class World:
    """A scheduler and its requests. `step` runs one; `run` all until nothing is left to do."""

    def __init__(
        self,
        model: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        asynchronous: bool,
        method: dict[str, Any] | None = None,
        max_k: int = 6,
        blocks: int = 1000,
        max_num_seqs: int = 32,
        batched_tokens: int = 512,
        seed: int = 0,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from vllm_specx.engine import scheduler, seams, steering

        seams.install_entry_seams()
        method = method or {"method": "draft_model", "model": model}
        config = {**method, "num_speculative_tokens": max_k}
        keys: dict[str, Any] = (
            {} if str(config["method"]).startswith("specx:") else {"specx": {"controller": {}}}
        )
        vllm_config = EngineArgs(
            model=model,
            speculative_config={**config, **keys},
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            enable_prefix_caching=False,
            async_scheduling=False,
            dtype="float32",
            skip_tokenizer_init=True,
        ).create_engine_config()
        vllm_config.scheduler_config.async_scheduling = asynchronous
        vllm_config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kind = scheduler.SpecxAsyncScheduler if asynchronous else scheduler.SpecxScheduler
        self.scheduler: Any = kind(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["x"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=16,
            log_stats=True,
        )
        self.asynchronous = asynchronous
        self.method = vllm_config.speculative_config.method
        self.max_k = max_k
        self.now = 1.0
        for module in (steering, scheduler):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.random = np.random.default_rng(seed)
        self.streams: dict[str, Stream] = {}
        self.said: dict[str, int] = {}
        self.steps: list[Step] = []
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._drafting = 0
        self._forwards = self.method == "custom_class" and method["method"] != "specx:ngram"
        self._lengths: dict[str, int] = {}
        self.reading = (
            0.0  # the share of steps in which our draft reads prompts too, which takes long
        )
        self._reads = False

    @property
    def controller(self) -> Any:
        """The controller; fails if a fault switched it off."""
        assert self.scheduler._steering is not None, "choosing K was switched off by a fault"
        return self.scheduler._steering.controller

    def add(self, name: str, stream: Stream) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=stream.tokens,
            ignore_eos=True,
            temperature=stream.temperature,
            extra_args=stream.extra or None,
        )
        prompt = self.random.integers(0, 1000, stream.prompt).tolist()
        self.streams[name] = stream
        self.said[name] = 0
        self.scheduler.add_request(Request(name, prompt, params, None))

    def step(self) -> None:
        """Schedule and run one step; with asynchronous scheduling its output arrives a step later."""
        before = set(self.running())
        output = self.scheduler.schedule()
        ran = output.total_num_scheduled_tokens > 0
        if ran:
            self._ahead.append((output, self._execute(output, before)))
        if self._ahead and not (ran and self.asynchronous and len(self._ahead) == 1):
            self._deliver()

    def _deliver(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        output, result = self._ahead.popleft()
        for each in self.scheduler.update_from_output(output, result).values():
            for answer in each.outputs:
                self.said[answer.request_id] += len(answer.new_token_ids)
        if not self.asynchronous and output.num_spec_tokens_to_schedule:
            lengths = self._lengths or {i: self._draft_length(i, output) for i in result.req_ids}
            drafts = [self.random.integers(0, 1000, lengths[i]).tolist() for i in result.req_ids]
            taken = DraftTokenIds(list(result.req_ids), drafts)
            if self._forwards:
                made = max(lengths.values(), default=0)
                setattr(taken, DRAFT_STEPS, -1 if self._reads else made)
            self.scheduler.update_draft_token_ids(taken)

    def _draft_length(self, name: str, output: Any) -> int:
        """As many as are asked for where each costs a forward, else some."""
        most = output.num_spec_tokens_to_schedule
        if self.method == "draft_model":
            return most
        plan = getattr(output, PLAN, None)
        most = most if plan is None else plan.limits.get(name, 0)
        return int(self.random.integers(0, most + 1))

    def _execute(self, output: Any, running: set[str]) -> Any:
        """What the runner would answer; moves the clock by what the step takes."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        spec = output.scheduled_spec_decode_tokens
        sampled: list[list[int]] = []
        prefill = False
        for name in names:
            request = self.scheduler.requests[name]
            if request.is_prefill_chunk:
                sampled.append([])
                prefill = True
                continue
            chance = self.streams[name].acceptance(self.said[name])
            drafted = len(spec.get(name, ()))
            hits = 0
            while hits < drafted and self.random.random() < chance:
                hits += 1
            sampled.append(self.random.integers(0, 1000, hits + 1).tolist())
            prefill |= output.num_scheduled_tokens[name] != drafted + 1
        asked = output.num_spec_tokens_to_schedule
        if self._forwards:
            self._lengths = {name: self._draft_length(name, output) for name in names}
            self._drafting = max(self._lengths.values(), default=0)
        self._reads = self.reading > 0 and bool(self.random.random() < self.reading)
        self.now += 3 * STEP * self._reads
        self.now += step_seconds(
            len(names), sum(output.num_scheduled_tokens.values()),
            self._drafting if self._forwards or self.method == "draft_model" else 0,
        ) * float(self.random.lognormal(0.0, 0.02))  # fmt: skip
        self._drafting = max(asked, 1)  # vLLM runs a draft model's first forward at K=0 too
        drafted_now = {name: len(spec.get(name, ())) for name in names}
        preempted = len(running - set(self.running()))
        self.steps.append(Step(len(names), asked, drafted_now, prefill, preempted))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def work(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.work() and not self._ahead:
                return
            self.step()
        raise AssertionError(f"{most} steps did not finish the requests")
