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
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def twin(folder: Path, family: str = "qwen2", *, seed: int = 0, **changes: Any) -> str:
    """Make a checkpoint whose next token depends on what it has read; changes: of its configuration,
    and `max_shard_size`."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    torch.manual_seed(seed)
    save = {"max_shard_size": changes.pop("max_shard_size", "5GB")}
    if family == "mistral":
        changes.setdefault("sliding_window", None)
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


def without_layers(folder: Path, source: str, dropped: range) -> str:
    """A copy of a checkpoint that lacks some decoder layers: it guesses what the whole one says."""
    import shutil

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    kept = [layer for n, layer in enumerate(model.model.layers) if n not in dropped]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = types[: len(kept)]
    model.save_pretrained(folder)
    for file in Path(source).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def perturbed(folder: Path, source: str, noise: float = 0.2) -> str:
    """A copy of a checkpoint whose lm_head is a little different: it agrees with the source now and then.

    noise: of its standard deviation, that of the lm_head being 1.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight += noise * weight.std() * torch.randn(weight.shape, generator=random)
    model.save_pretrained(folder)
    return str(folder)


def qwen_pair(folder: Path) -> tuple[str, str]:
    """A target that two ranks can share and a draft that they cannot, of one tokenizer.

    As Qwen2.5-72B and Qwen2.5-0.5B: embeddings padded to other sizes, the draft's 7 heads and one
    key-value head do not divide by two. Embeddings and lm_head are the same, and the layers weigh
    little, so that the draft is right now and then.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    real, paths = 1001, []
    sizes: dict[str, dict[str, Any]] = {
        "target": {"vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2},
        "draft": {
            "vocab_size": 1008,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    }
    torch.manual_seed(0)
    embeddings, head = torch.randn(1024, 128) * 0.1, torch.randn(1024, 128) * 4 / 128**0.5
    for name, own in sizes.items():
        config = Qwen2Config(
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            **own,
        )
        rows = config.vocab_size
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(embeddings[:rows])
            model.lm_head.weight.copy_(head[:rows])
        model.save_pretrained(folder / name)
        paths.append(str(folder / name))
        tokenizer(paths[-1], [f"w{i}" for i in range(real - 1)], ("<end>",))
    return paths[0], paths[1]
