"""How many tokens a draft vocabulary should have: coverage of held-out text against time.

    python -m benchmarks.draft_vocab --text OUT/text [--held-out NAME=FOLDER ...] \
        [--model embedded:smollm2-135m-instruct] [--out benchmarks/results/draft_vocab.json]

For each size N the most frequent N tokens of the training text (folders of text shards, as
`vllm-specx train` makes them) are measured two ways: the share of held-out generated tokens that
are among them, which bounds acceptance at every depth, and the time of the product with their rows
of lm_head and of picking the best, in the draft step's own code. `ceiling` is the acceptance length
that drafts of depth K, right with probability --acceptance where they can be named, would have;
`tokens_per_ms` divides it by the time of a step that drafts them one after another; a plain step is
that of benchmarks/results/never_slower.json, so measure both on one machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib import models, plain_steps, provenance
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.vocab import DraftVocab, count_tokens
from vllm_specx.train.dataset import Corpus
from vllm_specx.train.target import load_target

SIZES = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152)
BATCHES = (1, 4, 32)
VERIFY = 0.05
"""What one more token to verify costs, in plain steps."""


def milliseconds(work: Any, repeats: int) -> float:
    """The median time of `work()`."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def product_times(rows: torch.Tensor, repeats: int) -> dict[str, float]:
    """ms by batch size: logits of `rows` [N, hidden], argmax and probability."""
    dense = Dense(rows.contiguous())
    dense.pack()
    found = {}
    for batch in BATCHES:
        hidden = torch.randn(batch, rows.shape[1], dtype=rows.dtype)

        def step(hidden: torch.Tensor = hidden) -> torch.Tensor:
            logits = dense(hidden)
            best = logits.max(-1).indices
            return torch.softmax(logits, -1).gather(-1, best[:, None])

        found[str(batch)] = round(milliseconds(step, repeats), 4)
    return found


def expected(coverage: float, acceptance: float, depth: int) -> float:
    """Acceptance length of a chain, bonus token included."""
    return sum((coverage * acceptance) ** d for d in range(depth + 1))


def spoken(corpus: Corpus) -> np.ndarray[Any, Any]:
    """What the target generated."""
    return corpus.tokens[corpus.source > 0]


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    target = load_target(models.resolve(arguments.model))
    corpus = Corpus(arguments.text, None)
    train, validation = corpus.split(0.03, set())

    def tokens(conversations: Any) -> np.ndarray[Any, Any]:
        parts = [slice(*corpus.offsets[i : i + 2]) for i in conversations]
        return np.concatenate([corpus.tokens[p][corpus.source[p] > 0] for p in parts])

    counts = count_tokens([tokens(train)], target.vocab_size)
    held_out = {"own": tokens(validation)}
    for name, _, folder in (each.partition("=") for each in arguments.held_out):
        held_out[name] = spoken(Corpus(Path(folder), None))
    weights = target.lm_head.to(torch.bfloat16)
    table = []
    plain = plain_steps.milliseconds()[1]
    for size in (n for n in SIZES if n <= target.vocab_size):
        vocab = DraftVocab.most_frequent(counts, size)
        covered = {name: round(vocab.coverage(text), 4) for name, text in held_out.items()}
        times = product_times(weights[vocab.token_ids], arguments.repeats)
        worst = min(covered.values())
        length = expected(worst, arguments.acceptance, arguments.depth)
        step = plain * (1 + VERIFY * arguments.depth) + arguments.depth * (
            times["1"] + arguments.network_ms
        )
        table.append(
            {
                "tokens": size, "coverage": covered, "product_ms": times,
                "ceiling": round(length, 3), "tokens_per_ms": round(length / step, 4),
            }
        )  # fmt: skip
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    best = max(table, key=lambda row: row["tokens_per_ms"])
    return {
        "training_tokens": int(counts.sum()),
        "distinct": int((counts > 0).sum()),
        "held_out_tokens": {name: len(text) for name, text in held_out.items()},
        "assumed": {
            "acceptance": arguments.acceptance, "depth": arguments.depth, "step_ms": plain,
            "verify": VERIFY, "network_ms": arguments.network_ms,
        },
        "threads": torch.get_num_threads(),
        "sizes": table,
        "best": best["tokens"],
        "versions": provenance.versions(),
        "cpu": provenance.cpu(),
        "git": provenance.git(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--acceptance", type=float, default=0.5)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--network-ms", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draft_vocab.json"))
    arguments = parser.parse_args()
    result = measure(arguments)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{arguments.out}: best of the sizes measured: {result['best']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
