"""Scripted trees whose counts a test can read, and parts of whose verification it can leave out while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.proposers import SCRIPT
from tests.support.tiny import SPREAD, VOCAB
from tests.support.tree_proposers import ScriptedTrees
from vllm_specx.draft.proposer import DraftContext, Proposer
from vllm_specx.draft.tree import DraftTree
from vllm_specx.engine import trees as tree_steps
from vllm_specx.engine.proposers import EngineProposer
from vllm_specx.engine.trees import Trees

COUNTS = "SPECX_TEST_COUNTS"


class _Watched(ScriptedTrees):
    """Key `left_out` of the script: "commit", "positions", "mask" or nothing."""

    def __init__(self, path: str, trees: Trees, counts: Path) -> None:
        super().__init__(path)
        self.trees, self.counts = trees, counts
        commit, plan_step = trees.attention.commit, vars(tree_steps)["plan_step"]

        def committed() -> None:
            if self.script.get("left_out") != "commit":
                commit()

        def planned(*arguments: Any) -> Any:
            plan, nodes, positions = plan_step(*arguments)
            if plan is not None and self.script.get("left_out") == "positions":
                flat = [c + np.arange(1, r) for c, r in zip(plan.context, plan.rows, strict=True)]
                positions = np.concatenate(flat)
            if plan is not None and self.script.get("left_out") == "mask":
                causal = [np.tril(np.ones((r, r), np.uint8)).ravel() for r in plan.rows]
                plan.visible = np.concatenate(causal)
            return plan, nodes, positions

        trees.attention.commit = committed  # type: ignore[method-assign]
        vars(tree_steps)["plan_step"] = planned

    def propose(self, context: DraftContext) -> list[DraftTree]:
        drafts = super().propose(context)
        self.counts.write_text(json.dumps(self.trees.counts))
        return drafts


class WatchedTrees(EngineProposer):
    """For `--speculative-config '{"model": "tests.support.tree_watched.WatchedTrees", ...}'`."""

    name = "watched trees"

    def build(self) -> Proposer:
        self.trees = Trees()
        return _Watched(os.environ[SCRIPT], self.trees, Path(os.environ[COUNTS]))


def attentive_llama(folder: Path) -> str:
    """A small Llama with grouped queries whose next token depends on all of its context and on positions, so that
    a wrong mask, position or cache entry shows at once. Vocabulary: tiny.VOCAB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for part, scale in (("q", 6.0), ("k", 6.0), ("v", 10.0), ("o", 10.0)):
                getattr(attention, f"{part}_proj").weight.mul_(scale)
        model.lm_head.weight.normal_(std=SPREAD / config.hidden_size**0.5)
    model.save_pretrained(folder)
    return str(folder)
