"""`vllm-specx top`: one frame, and what it says of an address that is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_specx.cli import main
from vllm_specx.config import ConfigError
from vllm_specx.metrics.export import Exporter
from vllm_specx.metrics.live import Scrape, figures, metrics_url
from vllm_specx.metrics.tally import Tally

VLLM = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'


def text(steps: int) -> str:
    registry = CollectorRegistry()
    tally = Tally()
    for _ in range(steps):
        tally.step([4, 0], [3, 0], [4, 1], ["code", "none"], 0.010, "controller")
        tally.drafting(0.002, 0.010)
    Exporter("m", [0], "specx:ngram", 4, registry).apply(tally.report(), 0)
    return generate_latest(registry).decode() + VLLM


class Server:
    """Answers every address with `body` under /metrics, else 404."""

    def __init__(self) -> None:
        self.body = text(10)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(outer.body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def test_one_frame(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (server.address, f"http://{server.address}/", f"http://{server.address}/v1"):
        assert main(["top", url, "--once"]) == 0
        said = capsys.readouterr().out
        for words in ("75.0%", "20.0%", "3 running", "specx:ngram", "4.00", "accepted by depth"):
            assert words in said, (words, said)
        assert "since the server started" in said
        assert max(map(len, said.splitlines())) <= 100


def test_between_two_looks_only_what_came_since_counts() -> None:
    before, now = Scrape(text(10)), Scrape(text(30))
    shown = figures(now, before, 2.0)
    assert dict((d, n) for d, _, n in shown.by_depth) == {1: 20, 2: 20, 3: 20, 4: 20}
    assert [share for _, share, _ in shown.by_depth] == [1, 1, 1, 0]
    idle = figures(now, now, 2.0)
    assert idle.acceptance is None and idle.tpot is None and idle.bubble is None


def test_a_server_that_was_started_anew_counts_from_zero() -> None:
    shown = figures(Scrape(text(5)), Scrape(text(50)), 2.0)
    assert shown.acceptance == pytest.approx(0.75)
    assert shown.by_depth[0][2] == 5


def test_nothing_has_happened_yet(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = text(0)
    assert main(["top", server.address, "--once"]) == 0
    assert "no traffic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        ("http://127.0.0.1:1", None, "nothing answers at http://127.0.0.1:1/metrics"),
        ("ftp://somewhere", None, "is not the address of a server"),
        ("http://", None, "is not the address of a server"),
        ("127.0.0.1:99999", None, "is not the address of a server"),
        ("no.such.host.invalid:8000", None, "nothing answers"),
        ("SERVER/elsewhere", "", "answers 404"),
        ("SERVER", VLLM, "without vllm_specx"),
        ("SERVER", "<html>Hello</html>", "no /metrics of a vLLM server"),
        ("SERVER", "", "no vLLM server answers"),
    ],
)
def test_a_wrong_address_is_one_sentence(
    server: Server, capsys: pytest.CaptureFixture[str], url: str, body: str | None, words: str
) -> None:
    server.body = body or ""
    assert main(["top", url.replace("SERVER", server.address), "--once"]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1 and said.endswith((".", "?"))
    assert "Traceback" not in said


def test_addresses() -> None:
    assert metrics_url("host:8000") == "http://host:8000/metrics"
    assert metrics_url("https://host/metrics") == "https://host/metrics"
    assert metrics_url("http://host:8000/prefix/v1/") == "http://host:8000/prefix/metrics"
    with pytest.raises(ConfigError):
        metrics_url("")
