"""`vllm-specx plan`: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_specx.cli import main

RECIPE = "qwen2.5-72b-draft-0.5b"


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--gpu", "A100-80G", "--alpha", "0.8", "--gamma", "0.05"]) == 0
    said = capsys.readouterr().out
    assert "4 x A100-80GB. Predicted, not measured." in " ".join(said.split())
    assert "57.1 tokens/s without speculation" in " ".join(said.split())
    assert "2.80x" in said, "K=4 by hand: 3.3616 / 1.2"
    assert "It fits" in said
    assert main(["plan", "qwen2.5-72b", "--gpu", "L40S", "--count", "1"]) == 0
    assert "It does not fit" in capsys.readouterr().out


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", RECIPE, "--alpha", "0.8", "--gamma", "0.05", "--context", "8k", "--json"]
    assert main([*arguments, "--batch", "8", "--count", "8", "--gpu", "h100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 8
    assert found["gpu"] == "H100-SXM"
    assert found["fits"] is True
    by_k = {row["k"]: row for row in found["by_k"]}
    assert by_k[4]["speed_up"] == pytest.approx(3.3616 / 1.2)
    assert found["memory_a_gpu"]["target"] == pytest.approx(145.4e9 / 8, rel=0.001)


def test_the_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table"]) == 0
    said = capsys.readouterr().out
    assert "long chain of thought" in said
    assert "optimistic" in said
    assert main(["plan", "--table", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workloads"]) == 4


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    assert main(["plan", RECIPE, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "qwen2.5-72b", "--plot", str(picture)]) == 2
    assert "nothing to plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a recipe"),
        (["no-such-recipe"], "there is no recipe 'no-such-recipe'"),
        ([RECIPE, "--gpu", "A101"], "there are no figures of the GPU 'A101'; did you mean"),
        ([RECIPE, "--alpha", "2"], "--alpha is '2'"),
        ([RECIPE, "--context", "1m"], "--context is '1m'"),
        ([RECIPE, "--context", "64k"], "requests have at most 32768 tokens"),
        ([RECIPE, "--batch", "0"], "--batch is 0; it must be from 1 to 100000."),
        ([RECIPE, "--gamma", "-1"], "--gamma is -1.0"),
        ([RECIPE, "--gamma", "nan"], "--gamma is nan"),
        ([RECIPE, "--step-ms", "1:5"], "needs the time of a step without drafts"),
        ([RECIPE, "--plot", "/no/such/folder/x.png"], "there is no folder"),
        ([RECIPE, "--plot", "x.jpeg2"], "must name a file that ends in"),
        (["smollm2-135m-eagle3", "--count", "2"], "do not divide; plan for 1, 3 GPUs."),
        (["ngram-any"], "names no model; set MODEL"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert said in shown[0]


def test_another_model_for_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "Qwen/Qwen2.5-7B-Instruct")
    assert main(["plan", "ngram-any", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"]["parameters"] == 7615616512
