"""The process that holds one LLM: JSON lines in on stdin, out on what was stdout.

Requests: {"op": "start", "args": EngineArgs} -> {"ready": true}
          {"op": "generate", "prompts": [messages or token ids, ...], "sampling": [{...}, ...],
           "levels": null or [int, ...], "schemas": null or [JSON schema or null, ...]}
            -> {"seconds", "before", "after": Prometheus text, "answers": [...]}
A request with a level waits until fewer than that many requests are running.
It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from prometheus_client import REGISTRY, generate_latest


class Worker:
    def __init__(self) -> None:
        self.llm: Any = None
        self.streams = 0

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        self.llm = LLM(**args, disable_log_stats=False)
        return {"ready": True}

    def generate(
        self,
        prompts: list[list[Any]],
        sampling: list[dict[str, Any]],
        levels: list[int] | None = None,
        schemas: list[Any] | None = None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        inputs = [{"prompt_token_ids": self._ids(prompt)} for prompt in prompts]
        params = [SamplingParams(**each) for each in sampling]
        for one, schema in zip(params, schemas or [], strict=schemas is not None):
            if schema is not None:
                one.structured_outputs = StructuredOutputsParams(json=schema)
        before = _metrics()
        began = time.perf_counter()
        if levels is None:
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
        else:
            outputs = self._stream(inputs, params, levels)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "before": before,
            "after": _metrics(),
            "answers": [_answer(output) for output in outputs],
        }

    def _stream(self, inputs: list[Any], params: list[Any], levels: list[int]) -> list[Any]:
        engine = self.llm.llm_engine
        self.streams += 1
        names = [f"stream-{self.streams}-{i}" for i in range(len(inputs))]
        outputs: dict[str, Any] = {}
        sent = 0
        while len(outputs) < len(names):
            while sent < len(names) and sent - len(outputs) < levels[sent]:
                engine.add_request(names[sent], inputs[sent], params[sent])
                sent += 1
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        return [outputs[name] for name in names]

    def _ids(self, prompt: list[Any]) -> list[int]:
        if isinstance(prompt[0], int):
            return prompt
        tokenizer = self.llm.get_tokenizer()
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _metrics() -> str:
    return generate_latest(REGISTRY).decode()


def _answer(output: Any) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    later = len(completion.token_ids) - 1
    decode = metrics.last_token_ts - metrics.first_token_ts
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "ttft": metrics.first_token_latency,
        "tpot": decode / later if later > 0 else None,
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("op"))(**request)
        except Exception as error:
            traceback.print_exc()
            message = str(error).strip().splitlines()
            reply = {"error": f"{type(error).__name__}: {message[0] if message else ''}"[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
