"""The harness on real engines: numbers that must hold whatever the machine's speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

SCENARIO = """
name: smoke
model: embedded:smollm2-135m-instruct
mode: {mode}
baseline: none
rounds: 1
compare_tokens: true
batch_sizes: [2]
sampling: {{temperature: 0, max_tokens: 24, ignore_eos: true}}
engine_args: {{dtype: float32, enforce_eager: true, max_model_len: 512, max_num_seqs: 2}}
groups:
  - {{name: edit, prompts: prompts/repetitive.jsonl, tasks: [edit], count: 2}}
configurations:
  - name: none
  - name: ngram
    speculative_config:
      {{method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 4}}
"""


def run(folder: Path, mode: str, *more: str) -> dict[str, Any]:
    scenario, out = folder / "s.yaml", folder / "r.json"
    scenario.write_text(SCENARIO.format(mode=mode))
    assert harness.main(["run", str(scenario), "--out", str(out), *more]) == 0
    return dict(json.loads(out.read_text()))


def check(result: dict[str, Any]) -> None:
    rows = {(row["phase"], row["configuration"]): row for row in result["results"]}
    assert set(rows) == {(p, c) for p in ("first seen", "seen again") for c in ("none", "ngram")}
    for (_, name), row in rows.items():
        rounds = len(row["tok_s_by_round"])
        assert row["tokens"] == rounds * 2 * 24
        assert row["equal_to_baseline"] == {"equal": rounds * 2, "of": rounds * 2}
        assert row["ttft_ms"]["median"] > 0 and row["tpot_ms"]["median"] > 0
        if name == "none":
            assert row["ratio"]["median"] == 1.0
            assert row["drafts"] == 0 and row["acceptance_length"] is None
        else:
            assert row["drafts"] > 0
            assert 1.0 < row["acceptance_length"] <= 5.0
            assert row["accepted_tokens"] <= row["draft_tokens"]
            assert row["acceptance_by_depth"] == sorted(row["acceptance_by_depth"], reverse=True)
            assert row["steps"] < rows[("first seen", "none")]["steps"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_and_its_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, "engine")
    check(first)
    session = first["sessions"][0]
    assert session["versions"]["torch"] and session["cpu"]["cores"] and session["load_after"]
    assert harness.main(["table", str(tmp_path / "r.json")]) == 0
    assert "| edit | ngram |" in capsys.readouterr().out

    second = run(tmp_path, "engine", "--rounds", "2")
    check(second)
    assert len(second["sessions"]) == 2
    for old, new in zip(first["results"], second["results"], strict=True):
        assert new["tok_s_by_round"]["0"] == old["tok_s_by_round"]["0"]
        assert set(new["tok_s_by_round"]) == {"0", "1"}


@pytest.mark.server
@pytest.mark.slow
def test_a_run_with_servers(tmp_path: Path) -> None:
    check(run(tmp_path, "server"))


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_that_cannot_start_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(SCENARIO.format(mode="engine").replace("max_model_len: 512", "typo: 1"))
    assert harness.main(["run", str(scenario), "--out", str(tmp_path / "r.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harness: configuration 'none'") and "typo" in error
    assert "Traceback" not in error
