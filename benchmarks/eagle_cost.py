"""What drafting with EAGLE costs: time of EagleDrafter.propose at batch 1, 8 and 32, as a share of a step.

    python -m benchmarks.eagle_cost [--heads FOLDER] [--out benchmarks/results/eagle_cost.json]

Every request has CONTEXT tokens in the draft's cache, and in each step two tokens were committed.
Measured are drafts of 1 to 5 tokens (none ends early), no draft (the states are kept), and the states
of a prompt; with packed and plain weights, and with the layer and the lm_head through torch.compile. The
steps that this is a share of are those of benchmarks/results/never_slower.json: measure both on one
machine.
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

from benchmarks.lib import plain_steps, provenance
from vllm_specx.draft.checkpoints import TargetShape
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.eagle_checkpoints import load_eagle
from vllm_specx.draft.eagle_config import EagleConfig
from vllm_specx.draft.eagle_weights import EagleWeights
from vllm_specx.draft.proposer import DraftContext, VerifiedRows

HIDDEN, VOCAB, LAYERS = 576, 49152, 30
"""Of SmolLM2-135M."""
DEPTHS = (1, 2, 3, 4, 5)
BATCHES = (1, 8, 32)
CONTEXT, LENGTH, ACCEPTED = 300, 2048, 2


class Batch:
    """Requests that decode in step, and a drafter that follows them."""

    def __init__(self, weights: EagleWeights, size: int, form: str) -> None:
        self.size, self.auxiliary = size, len(weights.aux_layers) or 1
        embeddings = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
        self.drafter = EagleDrafter(
            EagleConfig(heads="measured", min_probability=0.0),
            weights,
            lm_head=embeddings,
            embeddings=embeddings,
            max_batch=size,
            max_model_len=LENGTH,
            cache_tokens=size * LENGTH,
        )
        _change(self.drafter, form)
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(0, VOCAB, (size, LENGTH), dtype=np.int32)
        self.known = 0

    def step(self, committed: int, rejected: int, budget: int) -> float:
        """`committed` more tokens of each request have states, `rejected` rows come after them. Returns
        the seconds of propose()."""
        read = np.full(self.size, committed + rejected, np.int32)
        last = self.known + committed
        states = tuple(
            torch.randn(int(read.sum()), HIDDEN).to(torch.bfloat16) for _ in range(self.auxiliary)
        )
        context = DraftContext(
            request_ids=[str(i) for i in range(self.size)],
            rows=np.arange(self.size, dtype=np.int32),
            token_ids=self.tokens,
            num_tokens=np.full(self.size, last + 1, np.int32),
            num_prompt_tokens=np.full(self.size, CONTEXT, np.int32),
            sampled=[row[self.known + 1 : last + 1].tolist() for row in self.tokens],
            budgets=np.full(self.size, budget, np.int32),
            temperatures=np.zeros(self.size, np.float32),
            pools=[None] * self.size,
            finished=[],
            vocab_size=VOCAB,
            verified=VerifiedRows(
                states,
                (np.cumsum(read) - read).astype(np.int32),
                np.full(self.size, self.known, np.int32),
                np.full(self.size, committed, np.int32),
            ),
        )
        began = time.perf_counter()
        self.drafter.propose(context)
        self.known = last
        return time.perf_counter() - began


def _change(drafter: EagleDrafter, form: str) -> None:
    """packed: as it is. plain: no product has packed weights. compiled: plain, through torch.compile."""
    if form == "packed":
        return
    net: Any = drafter._net
    for owner in (net, *net.layers):
        for part in vars(owner).values():
            if isinstance(part, Dense):
                part._packed = None
    if form == "compiled":
        for layer in net.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        net.leave = torch.compile(net.leave, dynamic=True)


def measure(weights: EagleWeights, form: str, repeats: int) -> list[dict[str, Any]]:
    """One row a batch size."""
    rows = []
    steps = plain_steps.milliseconds()
    for size in BATCHES:
        prompt = statistics.median(
            Batch(weights, size, form).step(CONTEXT - 1, 0, 1) for _ in range(3)
        )
        found = {}
        for depth in (0, *DEPTHS):
            batch = Batch(weights, size, form)
            batch.step(CONTEXT - 1, 0, 1)
            committed = min(ACCEPTED, depth + 1)
            times = [batch.step(committed, depth + 1 - committed, depth) for _ in range(repeats)]
            found[depth] = 1000 * statistics.median(times[repeats // 4 :])
        rows.append(
            {
                "form": form,
                "batch": size,
                "draft_ms": {depth: round(ms, 3) for depth, ms in found.items()},
                "share_of_step": {d: round(ms / steps[size], 3) for d, ms in found.items()},
                "ms_a_further_token": round((found[5] - found[1]) / 4, 3),
                "prompt_ms": round(1000 * prompt, 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=Path, default=Path("recipes/heads/smollm2-135m-eagle3"))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/eagle_cost.json"))
    arguments = parser.parse_args()
    shape = TargetShape(HIDDEN, VOCAB, torch.bfloat16, num_layers=LAYERS)
    weights = load_eagle(arguments.heads, shape)
    rows = [
        row
        for form in ("packed", "plain", "compiled")
        for row in measure(weights, form, arguments.repeats)
    ]
    result = {
        "context": CONTEXT, "step_ms": plain_steps.milliseconds(),
        "threads": torch.get_num_threads(), "rows": rows, "versions": provenance.versions(),
        "cpu": provenance.cpu(), "git": provenance.git(),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
