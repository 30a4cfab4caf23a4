"""A tiny target with tokenizer and chat template, and training text for it, made in a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from vllm_specx.train import shards
from vllm_specx.train.generate import GREEDY, KIND, SAMPLED

HIDDEN, VOCAB = 64, 400
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_target(folder: Path) -> Path:
    """A Llama checkpoint of random weights whose next token depends on the last two."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    bytes_only = Tokenizer(models.BPE())
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bytes_only.train_from_iterator(
        ["the quick brown fox"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def counting_text(folder: Path, count: int, *, per_shard: int = 40, seed: int = 0) -> Path:
    """Shards whose "answers" follow a rule that heads can learn: the next id is the last one plus
    the step that the conversation began with."""
    random = np.random.default_rng(seed)
    for index in range(-(-count // per_shard)):
        tokens: list[int] = []
        source: list[int] = []
        offsets = [0]
        for _ in range(min(per_shard, count - index * per_shard)):
            step, start = int(random.integers(1, 4)), int(random.integers(20, 300))
            given, length = 6, int(random.integers(20, 60))
            spoken = GREEDY if random.random() < 0.7 else SAMPLED
            tokens += [start + (i * step) % 90 for i in range(given + length)]
            source += [0] * given + [spoken] * length
            offsets.append(len(tokens))
        arrays: dict[str, np.ndarray] = {
            "tokens": np.array(tokens, np.int32),
            "source": np.array(source, np.uint8),
            "offsets": np.array(offsets, np.int64),
            "task": np.zeros(len(offsets) - 1, np.uint8),
        }
        meta = {"tasks": '["count"]', "generated": str(sum(s > 0 for s in source))}
        shards.write_shard(shards.shard_path(folder, KIND, index), arrays, meta)
    return folder


def python(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run this Python with one thread."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, **kwargs
    )  # type: ignore[call-overload, no-any-return]
