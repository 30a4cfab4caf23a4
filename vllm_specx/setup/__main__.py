"""`python -m vllm_specx.setup VENV [EXTRA ...]`: make a virtual environment ready, once.

launch.sh and tests/run.sh call it with the machine's own Python; all output goes to stderr. A stamp
in the environment says what is installed and for which pyproject.toml. It is taken away before
anything is changed and written after everything has been checked, so that an interrupted set-up is
taken up again and never believed. Where pip itself was cut off, the environment is made anew.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_specx.setup import steps
from vllm_specx.setup.stamp import Stamp
from vllm_specx.setup.steps import SetupError


def main() -> int:
    """Set up; 0 when ready, 1 when a step failed, 2 when the caller must change something."""
    venv, extras = Path(sys.argv[1]).absolute(), set(sys.argv[2:])
    try:
        device = wanted_device()
        wanted = Stamp.of_checkout(extras | {device})
        if Stamp.read(venv).covers(wanted):
            return 0
        with _alone(venv):
            present = Stamp.read(venv)
            if not present.covers(wanted):
                set_up(venv, device, wanted.with_extras_of(present))
        return 0
    except SetupError as error:
        print(f"vllm_specx: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"vllm_specx: set-up of {venv} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm_specx: set-up interrupted; the next start takes it up again.", file=sys.stderr)
        return 130


def wanted_device() -> str:
    """`gpu` where nvidia-smi finds one, else `cpu`; VLLM_SPECX_DEVICE overrides."""
    chosen = os.environ.get("VLLM_SPECX_DEVICE")
    if chosen is None:
        found = shutil.which("nvidia-smi") and subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True
        )
        return "gpu" if found and found.returncode == 0 and "GPU" in found.stdout else "cpu"
    if chosen not in ("cpu", "gpu"):
        raise SetupError(f"VLLM_SPECX_DEVICE is '{chosen}'; it must be cpu or gpu.", status=2)
    return chosen


def set_up(venv: Path, device: str, target: Stamp) -> None:
    """Run every step; pip passes quickly over what is there already."""
    started = time.monotonic()
    Stamp.remove(venv)
    plan = steps.plan(venv, device, sorted(target.extras))
    for number, (title, step) in enumerate(plan, start=1):
        _say(f"set-up {number}/{len(plan)}: {title}")
        step()
    target.write(venv)
    _say(f"set-up done in {time.monotonic() - started:.0f} s")


@contextmanager
def _alone(venv: Path) -> Iterator[None]:
    """Wait until no other process sets up the same environment."""
    venv.mkdir(exist_ok=True)
    folder = os.open(venv, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say("another set-up of this environment is running; waiting for it")
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(folder)


def _say(text: str) -> None:
    print(f"vllm_specx: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
