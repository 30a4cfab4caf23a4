"""What choosing K costs: time of Controller.decide and observe at batch 1, 8 and 32.

    python -m benchmarks.control_cost [--out benchmarks/results/control_cost.json]

Requests with various acceptance rates, a proposer whose drafts vary in length, a step time that
depends on the tokens. Both calls are timed together: this is what a decode step pays. Most of the work
is done every few steps, so the mean counts. Times are CPU times of the thread: another process that
has the core is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ngram_cost import STEP_MS
from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostPrior
from vllm_specx.control.settings import ControllerConfig

STEPS = 1500


def measure(batch: int, max_k: int, varying: bool, draft_step: float = 0.0) -> dict[str, Any]:
    """Times of STEPS steps, in microseconds."""
    random = np.random.default_rng(1)
    controller = Controller(
        ControllerConfig(),
        max_k,
        max_requests=64,
        prior=CostPrior(draft_step=draft_step),
        varying=varying,
    )
    ids = [f"request-{i}" for i in range(batch)]
    rates = random.uniform(0.3, 0.95, batch)
    times = []
    verified = 0
    for index in range(STEPS + 100):
        start = time.thread_time()
        decision = controller.decide(ids, limits=np.full(batch, 200))
        took = time.thread_time() - start
        k = decision.k.astype(np.int64)
        offered = np.minimum(random.geometric(0.1, batch), k) if varying else k
        hits = np.minimum(random.geometric(1 - rates) - 1, offered)
        seconds = 1e-3 * (STEP_MS[batch] + 0.4 * int(offered.sum())) * random.lognormal(0, 0.03)
        extra = {"offered": offered, "allowed": k} if varying else {}
        start = time.thread_time()
        controller.observe(
            ids,
            drafted=offered,
            accepted=hits,
            seconds=seconds,
            draft_steps=decision.uniform_k,
            **extra,
        )
        took += time.thread_time() - start
        if index >= 100:
            times.append(1e6 * took)
            verified += int(offered.sum())
    median = float(np.median(times))
    mean = float(np.mean(times))
    return {
        "batch": batch,
        "max_k": max_k,
        "proposer": "varying" if varying else "fixed length",
        "mean_us": round(mean, 1),
        "median_us": round(median, 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
        "share_of_step": round(mean / (1000 * STEP_MS[batch]), 5),
        "verified_a_request": round(verified / STEPS / batch, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    args = parser.parse_args(arguments)
    rows = []
    for batch in STEP_MS:
        for max_k, varying, draft_step in ((32, True, 0.0), (8, False, 0.001)):
            rows.append(measure(batch, max_k, varying, draft_step))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        from benchmarks.lib.provenance import describe

        result = {**describe(), "step_ms": STEP_MS, "results": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
