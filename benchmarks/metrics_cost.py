"""What metrics cost a decode step: counting it, reporting it, and exporting the report.

    python -m benchmarks.metrics_cost [--out benchmarks/results/metrics_cost.json]

Times are CPU times of the thread, with vLLM's own SchedulerStats and its encoder and decoder between
the two processes. Steps are counted in the engine core, each of them; a report is made at most every
0.2 s, and exported in the API server. `share_of_step` is all of it, a report counted by its share of the
steps; `share_if_reported` is what a step costs that has a report.
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

STEPS = 2000
MAX_K = 32


def measure(batch: int) -> dict[str, Any]:
    """Times of STEPS steps of `batch` requests, in microseconds."""
    from prometheus_client import CollectorRegistry
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from vllm_specx.control.controller import Controller
    from vllm_specx.control.settings import ControllerConfig
    from vllm_specx.engine.metrics import EVERY_SECONDS, Meter, take_report
    from vllm_specx.metrics.export import Exporter

    random = np.random.default_rng(1)
    controller = Controller(ControllerConfig(), MAX_K, max_requests=64)
    meter = Meter()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    exporter = Exporter("model", [0], "specx:ngram", MAX_K, CollectorRegistry())
    ids = [f"request-{i}" for i in range(batch)]
    for request in ids:
        meter.add(request, "code")
    every = max(round(1000 * EVERY_SECONDS / STEP_MS[batch]), 1)
    counting, reporting, exporting, plain = [], [], [], []
    for index in range(STEPS):
        lengths = np.minimum(random.geometric(0.2, batch) - 1, MAX_K)
        hits = np.minimum(random.geometric(0.3, batch) - 1, lengths)
        drafted, accepted, kept = lengths.tolist(), hits.tolist(), (hits + 1).tolist()
        seconds = 1e-3 * STEP_MS[batch]
        controller.observe(ids, drafted=drafted, accepted=accepted, seconds=seconds)
        start = time.thread_time()
        meter.step(ids, drafted, accepted, kept, seconds, "proposer")
        meter.worker({"seconds": 0.0005})
        meter.learned(controller, batch, sum(kept), seconds, True)
        counting.append(time.thread_time() - start)
        if index % every:
            continue
        start = time.thread_time()
        encoder.encode(EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=1)))
        plain.append(time.thread_time() - start)
        stats = SchedulerStats(num_running_reqs=0)
        start = time.thread_time()
        meter.attach({0: EngineCoreOutputs(scheduler_stats=stats)}, controller)
        buffers = encoder.encode(EngineCoreOutputs(scheduler_stats=stats))
        reporting.append(time.thread_time() - start)
        received = decoder.decode(buffers).scheduler_stats
        start = time.thread_time()
        report = take_report(received)
        assert report is not None
        exporter.apply(report, 0)
        exporting.append(time.thread_time() - start)
    count = 1e6 * float(np.mean(counting[100:]))
    report_us = 1e6 * max(float(np.mean(reporting[1:])) - float(np.mean(plain[1:])), 0.0)
    export_us = 1e6 * float(np.mean(exporting[1:]))
    step = 1000 * STEP_MS[batch]
    return {
        "batch": batch,
        "count_us": round(count, 1),
        "report_us": round(report_us, 1),
        "export_us": round(export_us, 1),
        "steps_a_report": every,
        "share_of_step": round((count + (report_us + export_us) / every) / step, 5),
        "share_if_reported": round((count + report_us + export_us) / step, 5),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    args = parser.parse_args(arguments)
    rows = []
    for batch in STEP_MS:
        rows.append(measure(batch))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        from benchmarks.lib.provenance import describe

        result = {**describe(), "step_ms": STEP_MS, "results": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
