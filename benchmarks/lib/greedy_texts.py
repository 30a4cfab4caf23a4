"""Greedy answers of a target with its hidden states: what drafters can be replayed against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.errors import BenchError


@dataclass(frozen=True, eq=False)
class Text:
    """One answered question.

    tokens: prompt and answer; prompt: how many of them are the prompt.
    last: [len(tokens), hidden], the state after the final norm; aux: the same of each auxiliary layer.
    """

    group: str
    tokens: list[int]
    prompt: int
    last: torch.Tensor
    aux: tuple[torch.Tensor, ...]


def record(
    folder: Path,
    datasets: Sequence[tuple[str, Path]],
    out: Path,
    *,
    questions: int,
    max_tokens: int,
    aux_layers: Sequence[int],
) -> None:
    """Answer the first turns of each data set with transformers, in bfloat16; write `out`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts: list[dict[str, Any]] = []
    for group, path in datasets:
        with path.open() as lines:
            turns = [json.loads(line)["turns"][0] for line, _ in zip(lines, range(questions))]  # noqa: B905
        for turn in turns:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
            )
            start = torch.tensor([prompt])
            with torch.inference_mode():
                whole = model.generate(
                    start,
                    attention_mask=torch.ones_like(start),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    pad_token_id=0,
                )
                said = model.model(whole, output_hidden_states=True)
            texts.append(
                {
                    "group": group,
                    "tokens": whole[0].tolist(),
                    "prompt": len(prompt),
                    "last": said.last_hidden_state[0].clone(),
                    # The residual stream before a layer, as vLLM counts auxiliary layers.
                    "aux": [said.hidden_states[layer][0].clone() for layer in aux_layers],
                }
            )
    torch.save({"aux_layers": list(aux_layers), "texts": texts}, out)


def load(path: Path) -> list[Text]:
    """What `record` wrote. Raises BenchError."""
    if not path.is_file():
        raise BenchError(f"there are no texts in {path}; make them with `record {path}`.")
    saved = torch.load(path, weights_only=True)
    return [
        Text(t["group"], t["tokens"], t["prompt"], t["last"], tuple(t["aux"]))
        for t in saved["texts"]
    ]
