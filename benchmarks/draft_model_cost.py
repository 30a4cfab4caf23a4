"""What drafting with a draft model costs: time of DraftModelDrafter.propose, by how its products are laid out.

    python -m benchmarks.draft_model_cost [--layers 4] [--out benchmarks/results/draft_model_cost.json]

A Llama of SmolLM2-135M's shape with random weights and `--layers` of its 30 layers, which decide how long
torch.compile takes. Every request has CONTEXT tokens in the draft's cache, and in each step two tokens were
committed. Measured are drafts of 1 and 5 tokens, with packed and plain weights (and, by --forms
compiled, with the layers and the head through torch.compile); and, with packed weights, drafts that are drawn at random.
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

from benchmarks.lib import provenance
from vllm_specx.draft.dense import Dense
from vllm_specx.draft.draft_model import DraftModelDrafter
from vllm_specx.draft.draft_model_checkpoint import DraftModelWeights
from vllm_specx.draft.draft_model_config import DraftModelConfig
from vllm_specx.draft.eagle_weights import DecoderShape, LayerWeights
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.sampling import SamplingRows
from vllm_specx.draft.vocabularies import Draftable

VOCAB, HIDDEN, INTERMEDIATE = 49152, 576, 1536
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
"""Of SmolLM2-135M."""
BATCHES = (1, 8)
DEPTHS = (1, 5)
CONTEXT, LENGTH, COMMITTED = 300, 1024, 2
FORMS = ("packed", "plain", "drawn")
"""`compiled` on top: in PyTorch 2.13 torch.compile ends with a failed guard at the attention over pages."""


def random_weights(layers: int) -> DraftModelWeights:
    """In bfloat16, of the scale that a trained model has."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(torch.bfloat16)

    def layer() -> LayerWeights:
        gain = torch.ones(HIDDEN, dtype=torch.bfloat16)
        return LayerWeights(
            qkv=matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            qkv_bias=None,
            out=matrix(HIDDEN, HEADS * HEAD_DIM),
            gate_up=matrix(2 * INTERMEDIATE, HIDDEN),
            down=matrix(HIDDEN, INTERMEDIATE),
            input_norm=gain,
            hidden_norm=None,
            post_norm=gain,
        )

    embeddings = matrix(VOCAB, HIDDEN)
    shape = DecoderShape(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        rope={"rope_type": "default", "rope_theta": 1e5},
    )
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return DraftModelWeights(
        shape, tuple(layer() for _ in range(layers)), embeddings, norm, embeddings
    )


class Batch:
    """Requests that decode in step, and a drafter that follows them."""

    def __init__(self, weights: DraftModelWeights, size: int, form: str) -> None:
        self.size, self.drawn = size, form == "drawn"
        self.drafter = DraftModelDrafter(
            DraftModelConfig(draft="measured", min_probability=0.0, probabilistic=self.drawn),
            weights,
            Draftable(VOCAB),
            max_batch=size,
            max_model_len=LENGTH,
            cache_tokens=size * LENGTH,
        )
        _change(self.drafter, form)
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(0, VOCAB, (size, LENGTH), dtype=np.int32)
        self.known = CONTEXT

    def step(self, budget: int) -> float:
        """Two more tokens of each request. Returns the seconds of propose()."""
        self.known += COMMITTED
        size = self.size
        rows = SamplingRows(
            np.full(size, self.drawn),
            np.full(size, 0.8, np.float32),
            np.zeros(size, np.int64),
            np.ones(size, np.float32),
        )
        context = DraftContext(
            request_ids=[str(i) for i in range(size)],
            rows=np.arange(size, dtype=np.int32),
            token_ids=self.tokens,
            num_tokens=np.full(size, self.known, np.int32),
            num_prompt_tokens=np.full(size, CONTEXT, np.int32),
            sampled=[row[self.known - COMMITTED : self.known].tolist() for row in self.tokens],
            budgets=np.full(size, budget, np.int32),
            temperatures=np.full(size, 0.8 if self.drawn else 0.0, np.float32),
            pools=[None] * size,
            finished=[],
            vocab_size=VOCAB,
            tokens_read=size * LENGTH,
            sampling=rows if self.drawn else None,
        )
        began = time.perf_counter()
        drafts = self.drafter.propose(context)
        took = time.perf_counter() - began
        assert all(len(draft.tokens) == budget for draft in drafts)
        return took


def _change(drafter: DraftModelDrafter, form: str) -> None:
    """packed, drawn: as it is. plain: no product has packed weights. compiled: plain, through
    torch.compile."""
    if form in ("packed", "drawn"):
        return
    net: Any = drafter._net
    for owner in (net, *net.layers):
        for part in vars(owner).values():
            if isinstance(part, Dense):
                part._packed = None
    if form == "compiled":
        torch._dynamo.config.recompile_limit = 256
        for layer in net.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        net.leave = torch.compile(net.leave, dynamic=True)


def measure(weights: DraftModelWeights, form: str, repeats: int) -> list[dict[str, Any]]:
    """One row a batch size."""
    rows = []
    for size in BATCHES:
        found = {}
        for depth in DEPTHS:
            batch = Batch(weights, size, form)
            batch.step(depth)
            times = [batch.step(depth) for _ in range(repeats)]
            found[depth] = 1000 * statistics.median(times[repeats // 4 :])
        further = (found[DEPTHS[1]] - found[DEPTHS[0]]) / (DEPTHS[1] - DEPTHS[0])
        rows.append(
            {
                "form": form,
                "batch": size,
                "draft_ms": {depth: round(ms, 3) for depth, ms in found.items()},
                "ms_a_further_token": round(further, 3),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--forms", default=",".join(FORMS), metavar="FORM,FORM")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/draft_model_cost.json")
    )
    arguments = parser.parse_args()
    weights = random_weights(arguments.layers)
    rows = [
        row
        for form in arguments.forms.split(",")
        for row in measure(weights, form, arguments.repeats)
    ]
    result = {
        "layers": arguments.layers, "context": CONTEXT, "threads": torch.get_num_threads(),
        "rows": rows, "versions": provenance.versions(), "cpu": provenance.cpu(),
        "git": provenance.git(),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
