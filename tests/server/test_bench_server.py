"""`vllm-specx bench` on real servers, and vLLM's own benchmark client against ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_comparison_on_two_servers(tmp_path: Path) -> None:
    """In float32, where speculation must not change a token; with structured output, and a stream."""
    command = [
        sys.executable, "-m", "vllm_specx.cli", "bench", "--recipes", "smollm2-135m-ngram", "--baseline", "none",
        "--scenarios", "code,tools", "--batch", "1,2", "--prompts", "2", "--max-tokens", "16", "--repeat", "1",
        "--exact", "--mixed", "--slo", "ttft=60000,tpot=60000", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "smollm2-135m-instruct.json").read_text())
    rows = {(r["group"], r["batch_size"], r["configuration"]): r for r in result["results"]}
    for group in ("code", "tools"):
        for batch in (1, 2):
            row = rows[group, batch, "smollm2-135m-ngram"]
            assert row["equal_to_baseline"] == {"equal": 2, "of": 2}
            assert row["agreement"]["min"] == 1.0
            assert row["goodput"]["good"] == row["requests"] == 2
            assert 0 < row["itl_ms"]["median"] < row["ttft_ms"]["max"] * 10
    assert rows["mixed stream", 1, "none"]["requests"] == 16
    assert ("mixed stream", 2, "none") not in rows
    assert result["memory"]["none"]["extra_mib"] == 0.0
    assert result["memory"]["none"]["peak_mib"] > 300
    steps = result["steps"]["smollm2-135m-ngram"]
    assert steps["curve"] and steps["k"] and len(steps["timeline"]) > 3
    texts = [
        json.loads(line)
        for line in (tmp_path / "smollm2-135m-instruct.logs/texts.jsonl").read_text().splitlines()
    ]
    answers = next(each for each in texts if each["group"] == "tools")["answers"]["first seen"]
    assert answers["none"] == answers["smollm2-135m-ngram"]
    assert all(answer.lstrip().startswith("{") for answer in answers["none"])
    page = (tmp_path / "report.html").read_text()
    assert "goodput" in page and "K on the mixed stream" in page
    assert (tmp_path / "report.csv").exists() and str(tmp_path) not in json.dumps(
        result["scenario"]
    )


def test_vllm_bench_serve_works_unchanged(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = shutil.which("vllm", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert program
    log = tmp_path / "log"
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm_specx.cli", "serve", "smollm2-135m-ngram", "--",
         "--enforce-eager", "--max-model-len", "1024", "--port", str(port)],
        cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        served = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]
        done = subprocess.run(
            [program, "bench", "serve", "--port", str(port), "--model", served["id"], "--tokenizer", served["root"],
             "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "48",
             "--num-prompts", "4", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"],
            capture_output=True, text=True, timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        result = json.loads((tmp_path / "r.json").read_text())
        assert result["completed"] == 4 and result["output_throughput"] > 0
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert re.search(r"Acceptance (rate|length)", done.stdout), done.stdout[-1500:]
    drafted = sum(
        map(
            float,
            re.findall(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", metrics, re.M),
        )
    )
    assert result.get("spec_decode_num_draft_tokens", drafted) == drafted
