"""`vllm-specx doctor` with the vLLM that is installed: its output and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_specx.cli import main


def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["doctor"]) == 0
    assert "names of vLLM that are used are there" in capsys.readouterr().out
    assert main(["doctor", "smollm2-135m-eagle3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True
    assert {f["topic"]: f["severity"] for f in found["findings"]["this machine"]}[
        "contract"
    ] == "ok"
    by_topic = {f["topic"]: f for f in found["findings"]["smollm2-135m-eagle3"]}
    assert "an EAGLE-3 draft that fits the target" in by_topic["checkpoint"]["what"]
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "model: embedded:smollm2-135m-instruct\nspeculation: null\nserve: {tensor-parallel-size: 2}\n"
    )
    assert main(["doctor", str(broken)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "9 attention heads and its 3 key-value heads do not divide" in said
    assert "It cannot work: 1 errors" in said
    from vllm_specx.engine import contract

    hook = contract.Hook("vllm.config", "NoSuchConfig", "a test")
    monkeypatch.setattr(contract, "HOOKS", (*contract.HOOKS, hook))
    assert main(["doctor"]) == 1
    assert "lacks vllm.config.NoSuchConfig" in " ".join(capsys.readouterr().out.split())
