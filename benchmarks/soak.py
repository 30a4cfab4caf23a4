"""A real server under mixed load for a while: no error, no growth of memory, no loss of speed.

    python -m benchmarks.soak --minutes 30 [--fault-every 2000] [--out RESULT.json]

Starts `vllm serve` with the embedded model, and sends it requests of all scenarios: short and long prompts,
streamed, one in ten left in the middle, 1 to 32 at a time. The number at a time goes up and down once in
each sixth of the run. The second sixth (minutes 5 to 10 of 30) is compared with the last. Exit status 1 if
a request failed, if memory grew by more than 2% after the second sixth, or if acceptance or tokens a
second of the last sixth are more than 5% under those of the second. With --fault-every the proposer raises in
every so manieth step (benchmarks/lib/faulty_proposer.py), which must cost no request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib import processes
from benchmarks.lib.faulty_proposer import FAULTS
from benchmarks.lib.prompts import make_prompts
from vllm_specx.metrics import live

PROMPTS = Path(__file__).with_name("prompts") / "workloads.jsonl"
PARTS = 6
LEVELS = (1, 4, 16, 32, 8, 2)
"""Requests at a time within a part."""
SCENARIO = {
    "code": "code",
    "tools": "tool_calling",
    "reasoning": "reasoning",
    "creative": "creative",
}


@dataclass
class Record:
    """What happened. samples: (seconds, output tokens, draft tokens, accepted tokens, KiB)."""

    sent: int = 0
    finished: int = 0
    aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, float, float, float, int]] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory(group: int) -> int:
    """KiB that the processes of a group hold, shared pages once (PSS)."""
    held = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) != group:
                continue
            lines = (stat.parent / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        held += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return held


def start(port: int, fault_every: int, flags: Sequence[str], log: Path) -> processes.ProcessGroup:
    """The server, in a process group of its own."""
    from vllm_specx.models.embedded import checkpoint

    speculative: dict[str, Any] = {"method": "specx:ngram", "num_speculative_tokens": 16}
    if fault_every:
        speculative = {
            "method": "custom_class",
            "model": "benchmarks.lib.faulty_proposer.FaultyNgram",
            "num_speculative_tokens": 16,
            "specx": {},
        }
    command = [f"{sys.prefix}/bin/vllm", "serve", str(checkpoint("embedded:smollm2-135m-instruct"))]
    command += ["--served-model-name", "soak", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "32"]
    command += ["--speculative-config", json.dumps(speculative), *flags]
    layers = {FAULTS: f"*{fault_every}"} if fault_every else {}
    return processes.ProcessGroup(command, processes.environment(layers), log, pipes=False)


def requests(seed: int) -> list[dict[str, Any]]:
    """Bodies of a few hundred requests; they repeat."""
    dice = random.Random(seed)
    prompts = make_prompts(PROMPTS, seed=seed, cell="soak", round_index=0, count=96)
    bodies = []
    for prompt in prompts:
        messages = [dict(message) for message in prompt.messages]
        if dice.random() < 0.25:
            notes = " ".join(
                f"Note {i}: {dice.choice(prompts).messages[-1]['content']}" for i in range(12)
            )
            messages[-1]["content"] = f"{notes}\n\n{messages[-1]['content']}"[:4000]
        body: dict[str, Any] = {
            "model": "soak",
            "messages": messages,
            "stream": True,
            "max_tokens": dice.choice((8, 32, 64, 128)),
            "temperature": 1.0 if prompt.task == "creative" else 0.0,
        }
        if scenario := SCENARIO.get(prompt.task):
            body["vllm_xargs"] = {"specx_scenario": scenario}
        bodies.append(body)
    return bodies


async def one(client: httpx.AsyncClient, url: str, body: Any, leave: int, record: Record) -> None:
    """A request; `leave`: chunks after which it is left, 0: none."""
    record.sent += 1
    chunks, reason = 0, None
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                record.errors[f"status {answer.status_code}"] += 1
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    record.errors[str(chunk["error"])[:100]] += 1
                    return
                chunks += 1
                for choice in chunk.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                if leave and chunks > leave:
                    record.aborted += 1
                    return
    except httpx.HTTPError as error:
        record.errors[f"{type(error).__name__}: {error}"[:100]] += 1
        return
    if reason in ("stop", "length"):
        record.finished += 1
    else:
        record.errors[f"ended with {reason}"] += 1


async def drive(url: str, group: int, seconds: float, seed: int, record: Record) -> None:
    """Send requests for so long, and look at the server now and then."""
    dice = random.Random(seed)
    bodies = requests(seed)
    begun = time.monotonic()
    level_seconds = seconds / PARTS / len(LEVELS)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def sample() -> None:
            text = (await client.get(f"{url}/metrics")).text
            scrape = live.Scrape(text)
            record.samples.append(
                (
                    time.monotonic() - begun,
                    scrape.total("vllm:generation_tokens_total"),
                    scrape.total("vllm_specx:draft_tokens_total"),
                    scrape.total("vllm_specx:accepted_tokens_total"),
                    memory(group),
                )
            )

        running: set[asyncio.Task[None]] = set()
        sampled = -1e9
        while (elapsed := time.monotonic() - begun) < seconds:
            if elapsed - sampled >= max(min(seconds / 60, 15.0), 2.0):
                sampled = elapsed
                await sample()
            level = LEVELS[int(elapsed / level_seconds) % len(LEVELS)]
            while len(running) < level:
                leave = dice.randint(1, 10) if dice.random() < 0.1 else 0
                task = asyncio.create_task(one(client, url, dice.choice(bodies), leave, record))
                running.add(task)
            _, running = await asyncio.wait(
                running, timeout=0.5, return_when=asyncio.FIRST_COMPLETED
            )
        await asyncio.gather(*running)
        await sample()


def window(record: Record, seconds: float, part: int) -> dict[str, float]:
    """Of one sixth of the run: tokens a second, acceptance, and MiB (median)."""
    low, high = part * seconds / PARTS, (part + 1) * seconds / PARTS
    inside = [s for s in record.samples if low <= s[0] <= high + 1.0]
    first, last = inside[0], inside[-1]
    held = sorted(s[4] for s in inside)
    return {
        "tokens_per_second": (last[1] - first[1]) / (last[0] - first[0]),
        "acceptance": (last[3] - first[3]) / max(last[2] - first[2], 1.0),
        "mebibytes": held[len(held) // 2] / 1024,
    }


def verdict(result: dict[str, Any], tolerance: float, growth: float) -> list[str]:
    """What is not as it should be, a sentence each."""
    early, late = result["second"], result["last"]
    said = [f"{count} requests: {what}" for what, count in result["errors"].items()]
    if late["mebibytes"] > early["mebibytes"] * (1 + growth):
        said.append(f"memory grew from {early['mebibytes']:.0f} to {late['mebibytes']:.0f} MiB")
    for name in ("tokens_per_second", "acceptance"):
        if late[name] < early[name] * (1 - tolerance):
            said.append(f"{name} fell from {early[name]:.3f} to {late[name]:.3f}")
    if result["fault_every"] and not result["proposer_errors"]:
        said.append("the proposer never failed, though it should have")
    return said


def run(
    minutes: float, fault_every: int, seed: int, flags: Sequence[str], log: Path
) -> dict[str, Any]:
    """Serve, drive, and put together what was seen."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = start(port, fault_every, flags, log)
    record = Record()
    try:
        deadline = time.monotonic() + 900
        while True:
            if server.child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not come up: {server.last_error()}")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        asyncio.run(drive(url, server.child.pid, 60 * minutes, seed, record))
        end = live.figures(live.Scrape(live.fetch(live.metrics_url(url))))
        alive = server.child.poll() is None
    finally:
        server.close()
    seconds = 60 * minutes
    return {
        "minutes": minutes,
        "fault_every": fault_every,
        "sent": record.sent,
        "finished": record.finished,
        "aborted": record.aborted,
        "errors": dict(record.errors) if alive else {**record.errors, "the server has ended": 1},
        "proposer_errors": end.errors,
        "switched_off": list(end.disabled),
        "second": window(record, seconds, 1),
        "last": window(record, seconds, PARTS - 1),
        "samples": [[round(value, 1) for value in sample] for sample in record.samples],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--fault-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of speed and acceptance")
    parser.add_argument("--growth", type=float, default=0.02, help="of memory")
    parser.add_argument("--log", type=Path, help="the server's output")
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    parser.add_argument("flags", nargs="*", help="after --: flags for vllm serve")
    args = parser.parse_args(arguments)
    log = args.log or Path(tempfile.mkdtemp(prefix="soak-")) / "server.log"
    result = run(args.minutes, args.fault_every, args.seed, args.flags, log)
    said = verdict(result, args.tolerance, args.growth)
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))
    for sentence in said:
        print(f"soak: {sentence}.", file=sys.stderr)
    if args.out:
        from benchmarks.lib.provenance import describe

        args.out.write_text(json.dumps({**describe(), **result, "verdict": said}, indent=1) + "\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
