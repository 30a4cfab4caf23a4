"""Small random models of one family, as transformers makes them, with or without tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 96,
}
FAMILIES = ("llama", "qwen2", "qwen3")


def twin(folder: Path, family: str = "qwen2", *, seed: int = 0, **changes: Any) -> str:
    """Make a checkpoint whose next token depends on what it has read; changes: of its configuration,
    and `max_shard_size`."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    torch.manual_seed(seed)
    save = {"max_shard_size": changes.pop("max_shard_size", "5GB")}
    config = getattr(transformers, f"{names[family]}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.lm_head.weight.normal_(std=1.0)
    model.save_pretrained(folder, **save)
    return str(folder)


def continuation(model: Any, tokens: list[int], count: int, ids: int | None = None) -> list[int]:
    """The most probable tokens after `tokens` below `ids`, by transformers, all read anew each time."""
    said: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens + said])).logits[0, -1]
            said.append(int(logits[:ids].argmax()))
    return said


def tokenizer(folder: str, tokens: list[str], added: tuple[str, ...] = ()) -> None:
    """Put a tokenizer of whole words into the folder: `tokens` have the ids 0, 1, ..., `added` follow."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    made = Tokenizer(words)
    made.add_special_tokens(list(added))
    made.save(f"{folder}/tokenizer.json")
