"""Drafts are read and checked while the engine is configured, before the target is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import eagle_files as synthetic
from vllm_specx.config import ConfigError, parse
from vllm_specx.engine import seams


def configured(folder: Path, version: int, stages: int) -> tuple[Any, dict[str, Any]]:
    """vLLM's configuration, as far as the check reads it, and the specx part of it."""
    tensors = synthetic.eagle3() if version == 3 else synthetic.eagle1()
    config = synthetic.eagle3_config() if version == 3 else synthetic.layer_config()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    own: dict[str, Any] = {"proposer": "eagle", "heads": str(folder)}
    text = SimpleNamespace(hidden_size=synthetic.HIDDEN, num_hidden_layers=synthetic.TARGET_LAYERS)
    model = SimpleNamespace(
        hf_text_config=text, dtype=torch.float32, get_vocab_size=lambda: synthetic.VOCAB
    )
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    made = SimpleNamespace(
        model_config=model, parallel_config=parallel, additional_config={"specx": own}
    )
    return made, own


def test_the_layers_that_a_draft_reads_become_part_of_the_configuration(tmp_path: Path) -> None:
    vllm_config, own = configured(tmp_path, 3, 1)
    seams._check_draft(vllm_config, parse(own))
    assert own["aux_layers"] == [2, 6, 9]
    assert parse(own) == parse({**own, "aux_layers": (2, 6, 9)})


def test_inner_states_do_not_cross_pipeline_stages(tmp_path: Path) -> None:
    vllm_config, own = configured(tmp_path, 3, 2)
    with pytest.raises(ConfigError, match="from one pipeline stage to the next"):
        seams._check_draft(vllm_config, parse(own))


def test_the_last_state_is_where_the_draft_is(tmp_path: Path) -> None:
    vllm_config, own = configured(tmp_path, 1, 2)
    seams._check_draft(vllm_config, parse(own))
    assert "aux_layers" not in own
