"""What needs Triton's interpreter: in processes of their own, as Triton decides when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.engine import preload

ROOT = Path(__file__).resolve().parents[2]


def ask(
    module: str, request: dict[str, Any], env: dict[str, str], timeout: float
) -> dict[str, Any]:
    """What `python -m module` answers to a request: both are JSON, on its standard input and in a line that
    begins with ANSWER; and its `log`. Raises RuntimeError with the end of the log."""
    variables = {
        **os.environ,
        "LD_PRELOAD": preload(),
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(request),
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    log = done.stdout + done.stderr
    if done.returncode or not lines:
        raise RuntimeError(log[-6000:])
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWER "))
    return {**answer, "log": log}


def answer(found: dict[str, Any]) -> None:
    """Of the process that is asked."""
    print("ANSWER " + json.dumps(found), flush=True)


def check_tests(*files: str) -> None:
    """Run the tests of these files with Triton interpreted: some pass, and none fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def let_vllm_find_triton() -> None:
    """vllm/triton_utils/importing.py looks for a backend of this name; the interpreter needs none."""
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # type: ignore[assignment]
