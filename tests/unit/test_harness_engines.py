"""The pipe to a worker process, with a worker that counts instead of generating."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.engines import WorkerEngine
from benchmarks.lib.errors import BenchError
from benchmarks.lib.prompts import Prompt
from benchmarks.lib.scenario import Configuration, Group, Sampling, Scenario

WORKER = """
import json, os, sys, time
print("a log line with ValueError: in it", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "start":
        if request["args"].get("revision") == "bad":
            raise SystemExit("KeyError: no such revision")
        reply = {"error": "no room"} if request["args"].get("revision") == "full" else {}
    else:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        drafts = "# TYPE vllm:spec_decode_num_drafts_total counter\\n" \\
                 "vllm:spec_decode_num_drafts_total %d\\n"
        answer = {"token_ids": [7] * request["sampling"][0]["max_tokens"],
                  "text": request["prompts"][0][0]["content"], "ttft": 0.1, "tpot": 0.01}
        reply = {"seconds": 0.3, "before": drafts % 2, "after": drafts % 5,
                 "answers": [answer] * len(request["prompts"])}
    print(json.dumps(reply), flush=True)
"""


class CountingEngine(WorkerEngine):
    def _command(self) -> list[str]:
        return [sys.executable, "-c", WORKER]


def engine(folder: Path, **args: str) -> CountingEngine:
    configuration = Configuration(name="c", engine_args=args)
    scenario = Scenario(
        name="s",
        model="m",
        baseline="c",
        groups=(Group(name="g", prompts="p"),),
        configurations=(configuration,),
    )
    return CountingEngine(scenario, configuration, "m", folder / "c.log")


def test_a_batch_comes_back_with_its_counters_and_cpu_time(tmp_path: Path) -> None:
    one = engine(tmp_path)
    try:
        assert one.start() < 30
        one.group.freeze()
        for _ in range(2):
            prompts = [Prompt("a", "t", ({"role": "user", "content": "hello"},))] * 3
            batch = one.generate(prompts, Sampling(max_tokens=5))
            assert [answer.text for answer in batch.answers] == ["hello"] * 3
            assert [len(answer.token_ids) for answer in batch.answers] == [5] * 3
            assert batch.counters.drafts == 3
            assert batch.cpu_seconds is not None and 0.1 < batch.cpu_seconds < 3
    finally:
        one.close()
    assert one.group.child.poll() is not None


@pytest.mark.parametrize(
    ("revision", "complaint"),
    [("bad", "'c' ended: KeyError: no such revision"), ("full", "'c': no room")],
)
def test_a_worker_that_fails_is_one_sentence(tmp_path: Path, revision: str, complaint: str) -> None:
    one = engine(tmp_path, revision=revision)
    try:
        with pytest.raises(BenchError, match=complaint):
            one.start()
    finally:
        one.close()
