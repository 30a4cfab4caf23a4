"""`specx:auto` knows a draft model from an EAGLE draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support import eagle_files
from tests.support.twins import twin
from vllm_specx.config import DraftModelConfig, EagleConfig, parse
from vllm_specx.draft.checkpoint_files import CheckpointError
from vllm_specx.draft.draft_model_checkpoint import holds_model
from vllm_specx.engine.heads import trained_part


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_a_draft_model_is_known_by_its_tensors(tmp_path: Path, shards: str) -> None:
    path = twin(tmp_path / "model", "qwen2", max_shard_size=shards)
    part = trained_part(parse({"proposer": "auto", "heads": path, "cache_tokens": 64}))
    assert part == DraftModelConfig(draft=path, cache_tokens=64)
    with pytest.raises(CheckpointError, match="is a draft model, which has no 'vocab'"):
        trained_part(parse({"proposer": "auto", "heads": path, "vocab": 10}))


@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_draft_is_none(tmp_path: Path, version: int) -> None:
    tensors = eagle_files.eagle3() if version == 3 else eagle_files.eagle1()
    config = eagle_files.eagle3_config() if version == 3 else eagle_files.layer_config()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not holds_model(tmp_path)
    assert isinstance(
        trained_part(parse({"proposer": "auto", "heads": str(tmp_path)})), EagleConfig
    )


def test_what_holds_nothing_is_none(tmp_path: Path) -> None:
    assert not holds_model(tmp_path)
    assert not holds_model(tmp_path / "none")
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert not holds_model(tmp_path)
