"""What proposing costs: time of NgramLookahead.propose at batch 1, 8 and 32, 2,000-token contexts.

    python -m benchmarks.ngram_cost [--out benchmarks/results/ngram_cost.json]

Contexts are text-like: words drawn from a Zipf distribution, with passages that come back, so that
there is much to match and to draft. Each step commits one to four tokens a request. The pool is
measured empty and full (its default size, filled with outputs of the same kind).
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

from vllm_specx.config import NgramConfig
from vllm_specx.draft.ngram import NgramLookahead
from vllm_specx.draft.proposer import DraftContext

VOCABULARY = 49152
CONTEXT = 2000
STEPS = 400
# ms of a decode step without drafts: SmolLM2-135M, bf16, 2 cores.
STEP_MS = {1: 8.7, 8: 12.0, 32: 29.4}

Tokens = np.ndarray[Any, np.dtype[np.int32]]


def text(random: np.random.Generator, length: int, passages: Sequence[Tokens] = ()) -> Tokens:
    """int32 [length]: Zipf words, a third of them in passages that come back."""
    words = np.minimum(random.zipf(1.3, length), VOCABULARY - 1).astype(np.int32)
    at = 60
    while at + 40 < length:
        size = int(random.integers(8, 40))
        if passages and random.random() < 0.3:
            passage = passages[int(random.integers(len(passages)))]
            start = int(random.integers(0, len(passage) - size))
            words[at : at + size] = passage[start : start + size]
        elif random.random() < 0.5:
            start = int(random.integers(0, at - size)) if at > size else 0
            words[at : at + size] = words[start : start + size]
        at += size
    return words


def fill(lookahead: NgramLookahead, random: np.random.Generator) -> list[Tokens]:
    """Fill the pool to its limit; returns some of its documents."""
    documents: list[Tokens] = []
    pool = lookahead.pool.join("default")
    while lookahead.pool.used_tokens < 0.98 * lookahead.pool.max_tokens:
        document = text(random, 600, documents[-20:])
        lookahead.pool.add(pool, document[:64], document[64:])
        lookahead.pool.index(1 << 20)
        documents.append(document)
    return documents[-200:]


def measure(batch: int, full: bool, seed: int = 1) -> dict[str, Any]:
    """Times of STEPS steps after one that builds the indexes, in microseconds."""
    random = np.random.default_rng(seed)
    lookahead = NgramLookahead(NgramConfig(), batch, 4096, 32)
    lookahead.warm_up()
    documents = fill(lookahead, random) if full else []
    token_ids = np.stack([text(random, 4096, documents) for _ in range(batch)])
    num_tokens = np.full(batch, CONTEXT, np.int32)
    times = []
    drafted = 0
    for index in range(STEPS + 20):
        committed = random.integers(1, 5, batch) if index else np.ones(batch, np.int64)
        num_tokens = (num_tokens + committed).astype(np.int32)
        sampled = [
            token_ids[i, num_tokens[i] - committed[i] : num_tokens[i]].tolist()
            for i in range(batch)
        ]
        context = DraftContext(
            request_ids=[f"request-{i}" for i in range(batch)],
            rows=np.arange(batch, dtype=np.int32),
            token_ids=token_ids,
            num_tokens=num_tokens,
            num_prompt_tokens=np.full(batch, CONTEXT // 2, np.int32),
            sampled=sampled,
            budgets=np.full(batch, 32, np.int32),
            temperatures=np.zeros(batch, np.float32),
            pools=["default"] * batch,
            finished=[],
            vocab_size=VOCABULARY,
        )
        start = time.perf_counter()
        trees = lookahead.propose(context)
        took = 1e6 * (time.perf_counter() - start)
        if index == 0:
            first = took
        if index >= 20:
            times.append(took)
            drafted += sum(len(tree.tokens) for tree in trees)
    median = float(np.median(times))
    return {
        "batch": batch,
        "pool": "full" if full else "empty",
        "median_us": round(median, 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
        "first_us": round(first, 1),
        "share_of_step": round(median / (1000 * STEP_MS[batch]), 5),
        "drafted_a_request": round(drafted / STEPS / batch, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ngram_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    args = parser.parse_args(arguments)
    rows = []
    for batch in STEP_MS:
        for full in (False, True):
            rows.append(measure(batch, full))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        from benchmarks.lib.provenance import describe

        result = {**describe(), "context_tokens": CONTEXT, "step_ms": STEP_MS, "results": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
