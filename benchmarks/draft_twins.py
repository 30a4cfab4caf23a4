"""Drafts for a target of SmolLM2's function (cost_twin.py): one that agrees sometimes, one that never does.

    python -m benchmarks.draft_twins pruned:20-25 [--agreement]
    python -m benchmarks.draft_twins random

print the checkpoint folder, made on first use; in a scenario they are the `model` of a speculative config.
`pruned:A-B,C` is SmolLM2-135M-Instruct without the decoder layers A to B and C (from 0); `random` has its
shape and random weights. --agreement also prints how often its likeliest token is the whole model's, at
tokens that the whole model has said.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.errors import BenchError
from vllm_specx.config import ConfigError
from vllm_specx.models.embedded import cache_root, checkpoint

BASE = "embedded:smollm2-135m-instruct"
PRUNED, RANDOM = "pruned:", "random"
_WEIGHTS = "model.safetensors"
PROMPTS = (
    "Write a Python function that reverses a string.",
    "What is the capital of France, and what is it known for?",
    "Explain why the sky is blue to a child.",
    "Give me a recipe for pancakes.",
    "Tom has 3 boxes with 12 apples each. He gives away 7. How many are left?",
    "Summarize the plot of Romeo and Juliet.",
)


def is_draft(model: str) -> bool:
    """Whether make() makes it."""
    return model.startswith(PRUNED) or model == RANDOM


def make(model: str, base: Path | None = None) -> Path:
    """The folder of `pruned:LAYERS` or `random`. base: a folder of a Llama; default the embedded model's.
    Raises BenchError."""
    source = base or checkpoint(BASE)
    if model == RANDOM:
        return _made(f"{source.name}-random", source, _randomize)
    layers = _layers(model)

    def prune(whole: Any) -> None:
        kept = [layer for n, layer in enumerate(whole.model.layers) if n not in layers]
        if len(kept) + len(layers) != len(whole.model.layers) or not kept:
            raise BenchError(f"'{model}': the model has layers 0 to {len(whole.model.layers) - 1}.")
        whole.model.layers = torch.nn.ModuleList(kept)
        whole.config.num_hidden_layers = len(kept)
        if types := getattr(whole.config, "layer_types", None):
            whole.config.layer_types = types[: len(kept)]

    return _made(f"{source.name}-{model.replace(':', '-').replace(',', '_')}", source, prune)


def _layers(model: str) -> set[int]:
    layers: set[int] = set()
    for part in model.removeprefix(PRUNED).split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last if dash else first).isdecimal()):
            raise BenchError(
                f"draft '{model}': write the layers to leave out, as in 'pruned:20-25,28'."
            )
        layers |= set(range(int(first), int(last or first) + 1))
    return layers


def _randomize(model: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)


def _made(name: str, source: Path, change: Callable[[Any], None]) -> Path:
    from transformers import AutoModelForCausalLM

    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _WEIGHTS).exists():
            work = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=root))
            try:
                model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
                change(model)
                model.save_pretrained(work)
                for file in source.iterdir():
                    if file.name.startswith(("tokenizer", "vocab", "merges", "special", "chat")):
                        shutil.copy(file, work / file.name)
                work.chmod(0o755)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def agreement(folder: Path, base: Path, tokens: int = 96) -> float:
    """How often the draft's likeliest token is what the whole model has said greedily, both in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    whole, draft = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (base, folder)
    )
    right = total = 0
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )["input_ids"]
            said = whole.generate(ids, max_new_tokens=tokens, do_sample=False)
            guessed = draft(said).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
            right += int((guessed == said[0, ids.shape[1] :]).sum())
            total += said.shape[1] - ids.shape[1]
    return right / total


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_twins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="pruned:LAYERS or random")
    parser.add_argument(
        "--agreement", action="store_true", help="also compare with the whole model"
    )
    args = parser.parse_args()
    try:
        if not is_draft(args.model):
            raise BenchError(
                f"'{args.model}' is no draft of these; write 'pruned:20-25' or 'random'."
            )
        folder = make(args.model)
        if args.agreement:
            print(f"{agreement(folder, checkpoint(BASE)):.3f} of its tokens agree", file=sys.stderr)
    except (BenchError, ConfigError) as error:
        print(f"draft_twins: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
