"""What a draft model is said to take is what the process takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.twins import twin
from vllm_specx.draft.draft_model_checkpoint import load_draft_model
from vllm_specx.draft.draft_model_memory import memory_plan
from vllm_specx.draft.vocabularies import Draftable

LONGEST, TOKENS, VOCAB = 512, 4096, 16384
MEASURE = f"""
import ctypes, gc, sys, torch
from vllm_specx.draft.draft_model import DraftModelDrafter
from vllm_specx.draft.draft_model_checkpoint import load_draft_model
from vllm_specx.draft.draft_model_config import DraftModelConfig
from vllm_specx.draft.vocabularies import Draftable

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024

def make(path):
    weights = load_draft_model(path, getattr(torch, sys.argv[3]))
    each = DraftModelDrafter(DraftModelConfig(draft=path), weights, Draftable(len(weights.lm_head)),
        max_batch=64, max_model_len={LONGEST}, cache_tokens={TOKENS})
    each._cache.kv.fill_(0.5)  # a page of zeros takes no memory until it is written
    each._net.leave(*each._net.enter(torch.tensor([1])))
    return each

small = make(sys.argv[1])
before = resident()
large = make(sys.argv[2])
print(resident() - before, large.memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_is_what_the_process_takes(tmp_path: Path, dtype: str, tied: bool) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
    }
    small = twin(tmp_path / "small", "llama", tie_word_embeddings=tied)
    large = twin(tmp_path / "large", "llama", **sizes)
    weights = load_draft_model(large, getattr(torch, dtype), values=False)
    plan = memory_plan(
        weights, Draftable(VOCAB), longest=LONGEST, cache_tokens=TOKENS, device=torch.device("cpu")
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large, dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    taken, counted = map(int, done.stdout.split())
    assert plan.total == pytest.approx(counted, rel=0.001)
    assert plan.total == pytest.approx(taken, rel=0.05)
