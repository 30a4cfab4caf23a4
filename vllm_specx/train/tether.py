"""Processes that end when the one that started them does, however that ends, with all they started.

Nothing that dies of SIGKILL can clean up, and vLLM's engine processes do not watch who started them.
So the starter holds one end of a pipe; its child, the leader of a process group, reads the other end,
finds it closed once the starter is gone, and ends the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "VLLM_SPECX_TETHER"
"""Where a child finds the number of its end of the pipe."""
_GRACE_S = 10.0


class Child:
    """A process that calls hold() first of all.

    command, env, stderr: as subprocess.Popen takes them.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stderr: Any = None) -> None:
        theirs, self._mine = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env={**env, VARIABLE: str(theirs)},
                stderr=stderr,
                pass_fds=(theirs,),
                process_group=0,
            )
        finally:
            os.close(theirs)

    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it and all that it has started; whoever has ended already, is not harmed."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._mine)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def hold() -> None:
    """In a Child: from now on it ends with its starter. In any other process nothing happens."""
    given = os.environ.pop(VARIABLE, None)
    if given is not None and os.getpgrp() == os.getpid():
        threading.Thread(target=_watch, args=(int(given),), daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
