"""A Llama of any size that says what is known beforehand, and draft heads of any acceptance for it.

    python -m benchmarks.permutation_llama [1b]

Its layers have random weights but o_proj and down_proj of zero, so that a step reads and multiplies what a
step of its size does, and the residual stream keeps the token's embedding; row p(t) of the lm_head is the
embedding of t, so that token t is followed by p(t), for ever. p goes round in circles of CIRCLE tokens:
a text has nothing to look up in its first round, and everything after it.

The heads are sequential ones that pass the embedding of the last token through: with rows of the lm_head
exchanged for a share of the tokens, they are wrong for these and right for all others. So what is measured
with them is what drafting and verifying cost, at an acceptance that is chosen.

In a scenario the target is `model: permutation:SIZE`, and heads are `permutation-heads:SIZE:PERCENT`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.lib.errors import BenchError
from vllm_specx.models.embedded import cache_root, checkpoint

BASE = "embedded:smollm2-135m-instruct"
"""Whose tokenizer it has, and so its vocabulary."""
VOCAB = 49152
CIRCLE = 48
DEPTH = 4
INNER = 64
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(hidden=256, inner=512, layers=2, heads=4, kv_heads=2),
    "1b": dict(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8),
    "8b": dict(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8),
}
"""1b and 8b have the shapes of Llama 3.2 1B and Llama 3.1 8B, but for the vocabulary."""
TARGET, HEADS = "permutation:", "permutation-heads:"


def following(seed: int = 0) -> torch.Tensor:
    """int64 [VOCAB]: p, in circles of CIRCLE random tokens."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    p = torch.empty(VOCAB, dtype=torch.int64)
    for start in range(0, VOCAB, CIRCLE):
        circle = order[start : start + CIRCLE]
        p[circle] = circle.roll(-1)
    return p


def target(size: str) -> Path:
    """The checkpoint folder, made on first use. Raises BenchError."""
    shape = _shape(size)
    return _made(f"permutation-{size}", lambda folder: _write_target(folder, shape))


def heads(size: str, percent: int) -> Path:
    """The folder of heads that are right for so many per cent of the tokens. Raises BenchError."""
    shape = _shape(size)
    if not 0 <= percent <= 100:
        raise BenchError(f"heads that are right for {percent}% cannot be made; ask for 0 to 100.")
    name = f"permutation-{size}-heads-{percent}"
    return _made(name, lambda folder: _write_heads(folder, shape["hidden"], percent))


def resolve(model: str) -> str | None:
    """The folder of `permutation:SIZE` or `permutation-heads:SIZE:PERCENT`; None of other names."""
    if model.startswith(TARGET):
        return str(target(model.removeprefix(TARGET)))
    if not model.startswith(HEADS):
        return None
    size, _, percent = model.removeprefix(HEADS).partition(":")
    if not percent.isdecimal():
        raise BenchError(f"heads '{model}': write size and per cent, as in '{HEADS}1b:80'.")
    return str(heads(size, int(percent)))


def _shape(size: str) -> dict[str, int]:
    if size not in SIZES:
        raise BenchError(f"there is no permutation Llama '{size}'; known: {', '.join(SIZES)}.")
    return SIZES[size]


def _made(name: str, write: Callable[[Path], None]) -> Path:
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            work = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=root))
            try:
                write(work)
                work.chmod(0o755)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _embeddings(hidden: int) -> torch.Tensor:
    rows = torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(1))
    return (rows / rows.square().mean(1, keepdim=True).sqrt()).bfloat16()


def _write_target(folder: Path, shape: dict[str, int]) -> None:
    """In one file a layer, so that no more than that is in memory."""
    hidden, inner = shape["hidden"], shape["inner"]
    head_dim = hidden // shape["heads"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in checkpoint(BASE).iterdir():
        if (
            "token" in file.name
            or file.name in ("vocab.json", "merges.txt")
            or file.suffix == ".jinja"
        ):
            shutil.copy(file, folder / file.name)
    files: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5).bfloat16()

    rows = shape["kv_heads"] * head_dim
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}."
        tensors = {
            "self_attn.q_proj.weight": random(hidden, hidden),
            "self_attn.k_proj.weight": random(rows, hidden),
            "self_attn.v_proj.weight": random(rows, hidden),
            "self_attn.o_proj.weight": torch.zeros(hidden, hidden, dtype=torch.bfloat16),
            "mlp.gate_proj.weight": random(inner, hidden),
            "mlp.up_proj.weight": random(inner, hidden),
            "mlp.down_proj.weight": torch.zeros(hidden, inner, dtype=torch.bfloat16),
            "input_layernorm.weight": ones.clone(),
            "post_attention_layernorm.weight": ones.clone(),
        }
        save(f"layer-{layer}.safetensors", {prefix + name: t for name, t in tensors.items()})
    embeddings = _embeddings(hidden)
    lm_head = torch.empty_like(embeddings)
    lm_head[following()] = embeddings
    outer = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": ones.clone(),
        "lm_head.weight": lm_head,
    }
    save("outer.safetensors", outer)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files}) + "\n"
    )


def _write_heads(folder: Path, hidden: int, percent: int) -> None:
    """The draft's lm_head is the target's, but that pairs of rows are exchanged."""
    from vllm_specx.draft.checkpoint_files import FORMAT
    from vllm_specx.draft.medusa_heads import SequentialHeads

    net = SequentialHeads(hidden, layers=1, inner=INNER, depth=DEPTH)
    with torch.no_grad():
        through = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        net.fc.weight.copy_(through)
        net.layers[0].down.weight.zero_()
    lm_head = torch.empty(VOCAB, hidden, dtype=torch.bfloat16)
    lm_head[following()] = _embeddings(hidden)
    wrong = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    wrong = wrong[: round(VOCAB * (100 - percent) / 100)]
    lm_head[wrong] = lm_head[wrong.roll(1)]
    tensors = {name: tensor.detach().bfloat16() for name, tensor in net.state_dict().items()}
    own = {
        "format": FORMAT,
        "conditioning": "hydra",
        "acceptance": [max(percent, 1) / 100] * DEPTH,
    }
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": VOCAB,
        "num_heads": DEPTH,
        "num_hidden_layers": 1,
        "intermediate_size": INNER,
        "dtype": "bfloat16",
        "specx": own,
    }
    save_file({**tensors, "lm_head.weight": lm_head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", default="1b", choices=sorted(SIZES))
    print(target(parser.parse_args(arguments).size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
