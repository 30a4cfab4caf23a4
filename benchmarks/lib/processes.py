"""Starting, stopping for a while, and ending the processes of one configuration."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_specx.setup import cpu

ROOT = Path(__file__).parents[2]


def environment(*layers: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with what a CPU engine needs; later layers win."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    for layer in layers:
        env.update(layer)
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM 0.32's ahead-of-time cache cannot be loaded on the CPU ("'function' object has no attribute
    # 'finalize_loading'"), so every start compiles again; without it Inductor's own cache is used.
    env.setdefault("VLLM_USE_AOT_COMPILE", "0")
    added, _ = cpu.environment(env) if cpu.is_cpu_vllm() else ({}, [])
    return {**env, **added}


class ProcessGroup:
    """A child and its descendants, in a process group of their own.

    The group stays in this session: if this process dies while the group is stopped, the kernel
    sends the group SIGHUP and SIGCONT, so nothing stays behind.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, *, pipes: bool
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                command,
                env=dict(env),
                stdin=pipe,
                stdout=subprocess.PIPE if pipes else file,
                stderr=file,
                process_group=0,
            )

    def _signal(self, number: signal.Signals) -> bool:
        try:
            os.killpg(self.child.pid, number)
        except ProcessLookupError:
            return False
        return True

    def freeze(self) -> None:
        """Stop every process of the group: OpenMP threads that spin would slow the others."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """CPU time the group's living processes have used."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.child.pid and fields[0] != "Z":
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_rss_mib(self) -> float:
        """The most memory its living processes have held, MiB: the sum of each one's own peak.

        Pages that processes share count in each; configurations share the same ones, so the
        difference of two holds.
        """
        kib = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rpartition(")")[2].split()[2]) != self.child.pid:
                    continue
                status = (stat.parent / "status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    kib += int(line.split()[1])
        return kib / 1024

    def close(self, patience: float = 20.0) -> None:
        """End the group: politely, then for good. Safe to call twice."""
        self.thaw()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                stream.close()
        if self.child.stdin is None:
            self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(patience)
        self._signal(signal.SIGKILL)
        self.child.wait()
        deadline = time.monotonic() + 5.0
        while self.cpu_seconds() > 0.0 and time.monotonic() < deadline:
            time.sleep(0.05)

    def last_error(self) -> str:
        """The line of the log that most likely says why the child ended."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        errors = [line for line in lines if "Error: " in line and "See root cause" not in line]
        text = (errors or lines or ["nothing in its log"])[-1]
        return text.rpartition("] ")[2][:300] or text[:300]
