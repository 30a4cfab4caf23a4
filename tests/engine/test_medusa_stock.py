"""The same checkpoint in vLLM 0.32's own Medusa and in ours drafts the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafting import context
from tests.support.heads import random_heads
from vllm_specx.draft.checkpoints import TargetShape, load_heads, save_for_vllm
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.medusa_config import MedusaConfig

HIDDEN, VOCAB, STATES, HEADS = 64, 512, 200, 4
stock = pytest.importorskip("vllm.model_executor.models.medusa", reason="this vLLM has no Medusa")
pytestmark = pytest.mark.engine


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """What vLLM's layers ask for: a configuration and a tensor-parallel group of one."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(
            1, 0, f"file://{tmp_path / 'rendezvous'}", 0, backend="gloo"
        )
        distributed.initialize_model_parallel(1)
        yield
        distributed.cleanup_dist_env_and_memory()


def test_equal_drafts_on_fixed_states(tmp_path: Path, one_rank: None) -> None:
    shape = TargetShape(HIDDEN, VOCAB)
    generator = torch.Generator().manual_seed(3)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
    states = torch.randn(STATES, HIDDEN, generator=generator)
    raw = load_heads(random_heads(tmp_path / "raw", HIDDEN, HEADS, spread=0.3), shape)
    folder = tmp_path / "stock"
    save_for_vllm(raw, lm_head, folder)
    theirs = _stock_drafts(folder, states)
    drafter = MedusaDrafter(
        MedusaConfig(heads=str(folder), min_probability=0.0),
        load_heads(folder, shape),
        lm_head=None,
    )
    ours = drafter.propose(context(states, budgets=[HEADS] * STATES, vocab_size=VOCAB))
    assert [draft.tokens.tolist() for draft in ours] == theirs
    assert len({tuple(draft) for draft in theirs}) > STATES // 2


def _stock_drafts(folder: Path, states: torch.Tensor) -> list[list[int]]:
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    config.truncated_vocab_size = config.vocab_size
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    model: Any = stock.Medusa(vllm_config=SimpleNamespace(speculative_config=draft))
    model.load_weights(load_file(folder / "model.safetensors").items())
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    with torch.inference_mode():
        logits = model.compute_logits(model(states))
    return torch.stack([each.argmax(-1) for each in logits], 1).tolist()  # type: ignore[no-any-return]
