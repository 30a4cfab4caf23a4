"""A real server's /metrics: API server, engine core and worker are processes of their own.

Its proposer fails three times on the way. SPECX_TEST_API_SERVERS=2 has two API servers, whose counts are
added up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.lib import processes
from benchmarks.lib.faulty_proposer import FAULTS
from benchmarks.soak import free_port
from vllm_specx.metrics import dashboard
from vllm_specx.metrics.definitions import PREFIX
from vllm_specx.metrics.live import Scrape, figures

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

QUESTION = "Write a Python function that reverses a string."
SPECULATIVE = {
    "method": "custom_class",
    "model": "benchmarks.lib.faulty_proposer.FaultyNgram",
    "num_speculative_tokens": 6,
    "specx": {},
}


class Server:
    def __init__(self, log: Path) -> None:
        from vllm_specx.models.embedded import checkpoint

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        model = str(checkpoint("embedded:smollm2-135m-instruct"))
        command = [f"{sys.prefix}/bin/vllm", "serve", model, "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--api-server-count", os.environ.get("SPECX_TEST_API_SERVERS", "1")]
        command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--speculative-config", json.dumps(SPECULATIVE)]
        self.process = subprocess.Popen(
            command,
            env=processes.environment({FAULTS: "12,13,40"}),
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 540) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def ask(self, text: str, **more: object) -> str:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 60,
            **more,
        }
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def scrape(self) -> Scrape:
        return Scrape(httpx.get(f"{self.url}/metrics", timeout=10).text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait()
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGTERM)
            try:
                running.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


def test_what_dashboard_and_alerts_query_exists_before_any_request(server: Server) -> None:
    samples = server.scrape().samples
    rules = yaml.safe_load(dashboard.FILE.with_name("alerts.yaml").read_text())["groups"][0][
        "rules"
    ]
    asked = {name for panel in dashboard.panels() for name in panel.metrics}
    asked |= {name for rule in rules for name in dashboard.metrics_of(rule["expr"])}
    # Reasons of fallbacks are known once there are some; its help is there.
    missing = {name for name in asked if name not in samples} - {f"{PREFIX}tree_fallbacks_total"}
    assert not missing
    for labels, _ in samples[f"{PREFIX}draft_tokens_total"]:
        assert (labels["model_name"], labels["engine"]) == ("m", "0")


def test_counts_agree_with_vllms_and_faults_cost_no_request(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda i: server.ask(
                    f"{QUESTION} ({i % 3})", vllm_xargs={"specx_scenario": "code"}
                ),
                range(12),
            )
        )
    assert all(answers)
    scrape = server.scrape()
    ours = {
        name: scrape.total(f"{PREFIX}{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    for name, count in ours.items():
        assert count == scrape.total(f"vllm:spec_decode_num_{name}_total"), name
    assert ours["accepted_tokens"] > 30
    shown = figures(scrape)
    assert shown.errors == 3, "it was told to fail three times"
    assert shown.disabled == (), "three faults that are not in a row switch nothing off"
    assert [name for name, _ in shown.by_scenario] == ["code"]
    depths = scrape.by(f"{PREFIX}accepted_tokens_by_depth_total", "depth")
    assert sum(depths.values()) == ours["accepted_tokens"]
    by_position = scrape.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert {int(d) - 1: n for d, n in depths.items()} == {int(p): n for p, n in by_position.items()}
    tokens = scrape.total(f"{PREFIX}decode_tokens_total")
    generated = scrape.total("vllm:generation_tokens_total")
    assert generated - 12 == tokens, "all but each request's first token, which its prefill gives"
    assert shown.bubble is not None and 0 < shown.bubble < 0.9
    assert shown.tpot is not None and shown.step is not None and shown.tpot <= shown.step
    assert shown.speed_up is not None
    itl = scrape.total("vllm:inter_token_latency_seconds_count")
    assert itl < generated, "ITL counts chunks, and some have several tokens"


def test_vllm_bench_serve_adds_up_nothing_of_ours(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    names = {line.split("{")[0].removesuffix("_total").removesuffix("_created") for line in lines}
    assert names == {
        f"vllm:spec_decode_num_{what}"
        for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    }


def test_top_shows_it(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_specx.cli", "top", server.url, "--once"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for words in ("acceptance", "TPOT", "bubble", "accepted by depth", "custom_class", "errors"):
        assert words in done.stdout
    assert done.stderr == ""
