"""The server as launch.sh starts it, and the openai client against it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError, OpenAI

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "not-a-secret"
NAME = "smollm2-135m-instruct"
COPY = "Write a Python function that reverses a string."


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "vllm_specx.cli", "serve", "smollm2-135m-ngram", "--"]
        command += [
            "--enforce-eager",
            "--dtype",
            "float32",
            "--max-model-len",
            "1024",
            "--api-key",
            KEY,
        ]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "PORT": str(self.port),
                "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            },
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()[-4000:]}")

    def metric(self, name: str) -> float:
        """vLLM's metric `name`, over all its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no vllm:{name}"
        return sum(float(value) for value in found)

    def accepted(self) -> float:
        return self.metric("spec_decode_num_accepted_tokens_total")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait()
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120, max_retries=0)


def ask(client: OpenAI, text: str, **more: object) -> str:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=80,
        **more,  # type: ignore[arg-type]
    )
    return answer.choices[0].message.content or ""


def test_an_answer_and_its_stream_are_the_same_and_drafts_are_accepted(
    server: Server, client: OpenAI
) -> None:
    before = server.accepted()
    whole = ask(client, COPY)
    assert len(whole) > 40
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": COPY}],
        temperature=0,
        max_tokens=80,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole
    assert server.accepted() > before + 10


def test_eight_at_once(server: Server, client: OpenAI) -> None:
    questions = [f"{COPY} ({i})" for i in range(8)]
    alone = [ask(client, question) for question in questions]
    before = server.accepted()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda question: ask(client, question), questions)) == alone
    assert server.accepted() > before


def test_a_stop_string_in_a_stream_with_logprobs(client: OpenAI) -> None:
    stop = ask(client, COPY)[30:34]
    whole = ask(client, COPY, stop=[stop])
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": COPY}],
        temperature=0,
        max_tokens=80,
        stop=[stop],
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, logprobs, reason, tokens = "", 0, None, 0
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            if choice.logprobs and choice.logprobs.content:
                logprobs += len(choice.logprobs.content)
    assert reason == "stop"
    assert stop not in text
    assert text == whole
    assert logprobs == tokens


def test_a_client_that_goes_away(server: Server, client: OpenAI) -> None:
    before = server.metric("generation_tokens_total")
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {KEY}"},
        json={
            "model": NAME,
            "messages": [{"role": "user", "content": COPY}],
            "max_tokens": 900,
            "stream": True,
            "ignore_eos": True,
            "vllm_xargs": {"specx_k": 0},  # with drafts it may be done before we look
        },
        timeout=60,
    ) as response:
        lines = response.iter_lines()  # kept: an iterator that is dropped closes the connection
        next(lines)
        appears = time.monotonic() + 10
        while not server.metric("num_requests_running") and time.monotonic() < appears:
            time.sleep(0.1)
        assert server.metric("num_requests_running") == 1
    deadline = time.monotonic() + 30
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("generation_tokens_total") < before + 900, "it was not made to the end"
    assert len(ask(client, "Tell me about the sea.")) > 20


def test_a_request_with_top_k_and_one_at_a_high_temperature(client: OpenAI) -> None:
    for sampling in ({"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9, "seed": 3}):
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Tell me about the sea."}],
            temperature=0.9,
            max_tokens=30,
            extra_body=sampling,
        )
        assert answer.usage is not None
        assert 1 < answer.usage.completion_tokens <= 30


def test_pools_are_chosen_in_the_request(server: Server, client: OpenAI) -> None:
    def accepted(**more: object) -> float:
        before = server.accepted()
        ask(client, "Write a limerick about a lighthouse keeper.", extra_body=more)
        return server.accepted() - before

    mine = {"vllm_xargs": {"specx_pool": "mine"}}
    first = accepted(**mine)
    again = accepted(**mine)
    assert again > first + 20, "a pool remembers"
    assert accepted(vllm_xargs={"specx_pool": "yours"}) < again - 20
    assert accepted(vllm_xargs={"specx_pool": "off"}) < again - 20
    assert accepted(**mine, cache_salt="salt") < again - 20
    assert accepted(**mine, cache_salt="salt") > first + 20


def test_the_key_is_asked_for(server: Server) -> None:
    stranger = OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(AuthenticationError):
        ask(stranger, "Hello")


def test_only_this_machine_is_listened_to(server: Server) -> None:
    sockets = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{server.port:04X}" in sockets
    assert f"00000000:{server.port:04X}" not in sockets


def test_ctrl_c_stops_everything(server: Server) -> None:
    """The last test of this module: it ends the server."""
    session = server.process.pid
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and of_session(session):
        time.sleep(0.5)
    assert of_session(session) == []


def of_session(session: int) -> list[str]:
    """Command lines of the processes that are left of a session."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                left.append((folder / "cmdline").read_text().replace("\0", " "))
        except (OSError, IndexError):
            continue
    return left


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"method": "specx:ngrm"}', "did you mean 'specx:ngram'"),
        ('{"method": "specx:ngram", "pol": "off"}', "did you mean 'pool'"),
        ('{"method": "specx:ngram", "num_speculative_tokens": 0}', "'num_speculative_tokens' is 0"),
        ('{"method": "specx:draft_model"}', "'draft' in specx is missing"),
        ('{"method": "specx:medusa"}', "'heads' in specx is missing"),
        ('{"method": "specx:medusa", "model": "no/such/heads"}', "no checkpoint"),
        ('{"method": "ngram", "specx": {"pol": 1}}', "unknown key 'pol'"),
    ],
)
def test_vllm_serve_refuses_with_one_sentence(config: str, words: str) -> None:
    from vllm_specx.models.embedded import checkpoint

    model = str(checkpoint("embedded:smollm2-135m-instruct"))
    done = subprocess.run(
        [f"{sys.prefix}/bin/vllm", "serve", model, "--speculative-config", config],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
