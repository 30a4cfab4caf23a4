"""What drafting with heads costs: time of MedusaDrafter.propose at batch 1, 4 and 32.

    python -m benchmarks.medusa_cost [--heads FOLDER] [--out benchmarks/results/medusa_cost.json]

Without --heads, heads of SmolLM2-135M's size and random weights are measured: the time does not
depend on what they say. Each kind is measured with drafts of full length, as chains and as trees,
with packed and plain weights, and the chain's network also through torch.compile. The steps that
this is a share of are those of benchmarks/results/never_slower.json: measure both on one machine.
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
from vllm_specx.draft.checkpoints import HeadWeights, TargetShape, load_heads
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.medusa_heads import SequentialHeads
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree_config import TreeConfig
from vllm_specx.draft.vocab import DraftVocab

HIDDEN, VOCAB, DEPTH = 576, 49152, 4
BATCHES = (1, 4, 32)


def random_heads(conditioning: str, vocab: int) -> HeadWeights:
    """Four heads; vocab tokens of the draft vocabulary."""
    ids = torch.randperm(VOCAB)[:vocab]
    kept = DraftVocab(ids, VOCAB) if vocab < VOCAB else None
    if conditioning == "hydra":
        net = SequentialHeads(HIDDEN, layers=1, inner=1536, depth=DEPTH).to(torch.bfloat16)
        sequential = {name: tensor.detach() for name, tensor in net.state_dict().items()}
        return HeadWeights("hydra", DEPTH, None, None, None, kept, sequential)
    blocks = torch.randn(DEPTH, 1, HIDDEN, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
    return HeadWeights("none", DEPTH, blocks, None, None, kept)


def context(batch: int) -> DraftContext:
    """A decode step of `batch` requests that may draft DEPTH tokens each (trees: 32 nodes)."""
    return DraftContext(
        request_ids=[str(i) for i in range(batch)],
        rows=np.arange(batch, dtype=np.int32),
        token_ids=np.random.default_rng(0).integers(0, VOCAB, (batch, 64), dtype=np.int32),
        num_tokens=np.full(batch, 32, np.int32),
        num_prompt_tokens=np.full(batch, 16, np.int32),
        sampled=[[1]] * batch,
        budgets=np.full(batch, 32, np.int32),
        temperatures=np.zeros(batch, np.float32),
        pools=[None] * batch,
        finished=[],
        vocab_size=VOCAB,
        hidden_states=torch.randn(batch, HIDDEN).to(torch.bfloat16),
    )


def milliseconds(drafter: MedusaDrafter, batch: int, repeats: int) -> float:
    """The median time of one propose()."""
    step = context(batch)
    for _ in range(5):
        drafter.propose(step)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        drafter.propose(step)
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times), 3)


def unpack(drafter: MedusaDrafter) -> None:
    """Make every product a plain one."""
    for part in (drafter._lm_head, drafter._parallel and drafter._parallel._first):
        if isinstance(part, Dense):
            part._packed = None
    if drafter._sequential is not None:
        for module in drafter._sequential.modules():
            if isinstance(module, Dense):
                module._packed = None


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    lm_head = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    rows: list[dict[str, Any]] = []
    steps = plain_steps.milliseconds()
    kinds: list[tuple[str, int, HeadWeights]] = [
        (conditioning, vocab, random_heads(conditioning, vocab))
        for conditioning in ("none", "hydra")
        for vocab in (4096, 8192, 16384, VOCAB)
    ]
    if arguments.heads is not None:
        heads = load_heads(arguments.heads, TargetShape(HIDDEN, VOCAB, torch.bfloat16))
        size = len(heads.vocab) if heads.vocab else VOCAB
        kinds = [(heads.conditioning, size, heads)]
    for conditioning, vocab, heads in kinds:
        for topology in ("chain", "tree"):
            for form in ("packed", "plain", "compiled") if vocab == 8192 else ("packed",):
                if form == "compiled" and topology == "tree":
                    continue
                tree = TreeConfig(nodes=32, branching=8) if topology == "tree" else None
                config = MedusaConfig(heads="random", tree=tree, min_probability=0.0)
                drafter = MedusaDrafter(config, heads, lm_head=lm_head, embeddings=lm_head)
                if form != "packed":
                    unpack(drafter)
                if form == "compiled":
                    drafter._logits = torch.compile(drafter._logits, dynamic=True)  # type: ignore[method-assign]
                    if drafter._sequential is not None:
                        drafter._sequential.forward = torch.compile(  # type: ignore[method-assign]
                            drafter._sequential.forward, dynamic=True
                        )
                times = {b: milliseconds(drafter, b, arguments.repeats) for b in BATCHES}
                rows.append(
                    {
                        "conditioning": conditioning, "vocab": vocab, "topology": topology,
                        "form": form, "ms": times,
                        "share_of_step": {b: round(times[b] / steps[b], 3) for b in BATCHES},
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/medusa_cost.json"))
    arguments = parser.parse_args()
    result = {
        "depth": DEPTH, "step_ms": plain_steps.milliseconds(), "threads": torch.get_num_threads(),
        "rows": measure(arguments), "versions": provenance.versions(), "cpu": provenance.cpu(),
        "git": provenance.git(),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
