"""Real engines that several files share: one for each configuration, started when first asked for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
TIGHT = {
    "num_gpu_blocks_override": 8,
    "block_size": 64,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "max_model_len": 384,
}
"""Few cache blocks and small steps: requests are preempted and prefills are cut into chunks."""
NGRAM = {"method": "specx:ngram", "num_speculative_tokens": 8}


@pytest.fixture(scope="package")
def model() -> str:
    """The embedded checkpoint's folder."""
    from vllm_specx.models.embedded import checkpoint

    return str(checkpoint("embedded:smollm2-135m-instruct"))


@pytest.fixture(scope="package")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """No speculation."""
    engine = Engine(tmp_path_factory.mktemp("plain") / "log", model=model)
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def ngram(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """specx:ngram by the short form."""
    engine = Engine(
        tmp_path_factory.mktemp("ngram") / "log", model=model, speculative_config=dict(NGRAM)
    )
    yield engine
    engine.close()


class Script:
    """Tells the scripted engine's proposer what to draft."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(mode="nothing")

    def set(self, **script: Any) -> None:
        """Replace the script; it holds from the next step on."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(script))
        os.replace(temporary, self.path)
        os.utime(self.path, ns=(time.time_ns(), time.time_ns()))


@pytest.fixture(scope="package")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """What the scripted engine drafts."""
    return Script(tmp_path_factory.mktemp("script") / "script.json")


def scripted_engine(model: str, folder: Path, script: Script, **kwargs: Any) -> Engine:
    """An engine whose drafts `script` dictates."""
    return Engine(
        folder / "log",
        env={
            "SPECX_TEST_SCRIPT": str(script.path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        model=model,
        speculative_config={
            "method": "custom_class",
            "model": "tests.support.proposers.Scripted",
            "num_speculative_tokens": 8,
        },
        **kwargs,
    )


@pytest.fixture(scope="package")
def scripted(
    model: str, script: Script, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Drafts by `script`."""
    engine = scripted_engine(model, tmp_path_factory.mktemp("scripted"), script)
    yield engine
    engine.close()
