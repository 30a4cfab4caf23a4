"""Processes that end with their starter, which is killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import subprocess, sys, time
from vllm_specx.train import tether
tether.hold()
engine = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(f"{engine.pid}\\n")
time.sleep(600)
"""
STARTER = """
import os, signal, sys, time
from vllm_specx.train.tether import Child
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
child = Child([sys.executable, "-c", sys.argv[2], sys.argv[1]], os.environ)
if sys.argv[3] == "end":
    while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
        time.sleep(0.05)
    child.end()
    print(child.status())
else:
    time.sleep(600)
"""


def _running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return status not in "ZX"


def _written(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(path.read_text())


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _running(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_all_end_with_a_starter_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "pid"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(path), CHILD, "wait"])
    engine = _written(path)
    child = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    assert _running(engine) and _running(child)
    starter.send_signal(number)
    starter.wait(20)
    assert _gone(child) and _gone(engine)


def test_all_end_when_the_starter_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    command = [sys.executable, "-c", STARTER, str(path), CHILD, "end"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == str(-signal.SIGTERM), said.stderr
    assert _gone(int(path.read_text()))


def test_a_process_of_its_own_holds_on_to_nobody(tmp_path: Path) -> None:
    """As a stage that is started by hand, even with such a variable in its environment."""
    code = "from vllm_specx.train import tether; tether.hold(); import time; time.sleep(0.3)"
    reader, writer = os.pipe()
    os.close(writer)
    environ = {**os.environ, "VLLM_SPECX_TETHER": str(reader)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, pass_fds=(reader,))
    os.close(reader)
    assert done.returncode == 0
