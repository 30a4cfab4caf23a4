"""Rules per request, settings and the trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_specx.control import policy
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.control.trace import Trace


@pytest.mark.parametrize(
    ("scenario", "start"),
    [("code", (5, 6)), ("tool_calling", (4, 5)), ("reasoning", (3, 4)), ("creative", (0, 2))],
)
def test_scenarios_start_as_the_table_says(scenario: str, start: tuple[int, int]) -> None:
    rule = policy.rule_for({"specx_scenario": scenario}, 0.0, 16)
    assert rule.start_k is not None
    assert start[0] <= rule.start_k <= start[1]
    assert rule.pool == scenario


def test_unknown_scenarios_have_their_own_pool_and_no_prior() -> None:
    rule = policy.rule_for({"specx_scenario": "sql-agent_v2"}, 0.0, 16)
    assert rule == policy.Rule(pool="sql-agent_v2")


@pytest.mark.parametrize("temperature", [0.9, 1.0, 1.7])
def test_hot_requests_start_small_and_apart(temperature: float) -> None:
    hot = policy.rule_for({"specx_scenario": "code"}, temperature, 16)
    assert hot.start_k is not None
    assert hot.start_k <= 2
    assert hot.pool != policy.rule_for({"specx_scenario": "code"}, 0.89, 16).pool
    assert policy.rule_for(None, temperature, 16).start_k == 2
    assert policy.rule_for(None, None, 16) == policy.Rule()


@pytest.mark.parametrize(("given", "fixed"), [(0, 0), (3, 3), ("4", 4), (5.0, 5), (16, 16)])
def test_a_fixed_k(given: Any, fixed: int) -> None:
    assert policy.rule_for({"specx_k": given}, 0.0, 16).fixed_k == fixed
    assert policy.problem({"specx_k": given}, 16) is None


@pytest.mark.parametrize("value", [-1, 17, True, "many", "-1", 2.5, [3], {}, "99999", "²"])
def test_a_wrong_k_is_named_and_ignored(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    said = policy.problem({"specx_k": value}, 16)
    assert said is not None
    assert "specx_k" in said
    assert repr(value) in said
    assert "from 0 to 16" in said
    with caplog.at_level(logging.WARNING, logger="vllm"):
        assert policy.rule_for({"specx_k": value}, 0.0, 16).fixed_k is None


@pytest.mark.parametrize("value", ["", "a b", "x" * 65, 3, ["code"], "é", "-x"])
def test_a_wrong_scenario_is_named_and_ignored(value: Any) -> None:
    said = policy.problem({"specx_scenario": value}, 16)
    assert said is not None
    assert "specx_scenario" in said
    assert "code, tool_calling, reasoning, creative" in said
    assert policy.rule_for({"specx_scenario": value}, 0.0, 16) == policy.Rule()


@pytest.mark.parametrize("value", [0, 0.0, "0"])
def test_only_a_k_of_zero_opts_out(value: Any) -> None:
    assert policy.opts_out({"specx_k": value})
    assert not policy.opts_out(None) and not policy.opts_out({"specx_scenario": "code"})
    for other in (None, 1, "1", False, -1, 0.5, "no", []):
        assert not policy.opts_out({"specx_k": other})


def test_settings_refuse_what_cannot_be() -> None:
    for wrong in (
        {"k_min": 5, "k_max": 3},
        {"static_k": 3, "k_max": 5},
        {"kmax": 3},
        {"per_request": "sometimes"},
        {"probe_share": 0.5},
        {"k_max": 129},
    ):
        with pytest.raises(ValidationError):
            ControllerConfig.model_validate(wrong)


def test_trace_writes_lines_and_survives_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    trace = Trace(path, lines=2)
    for step in range(3):
        trace.write({"step": step})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    trace.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    trace.write({"step": 9})
    full = Trace("/dev/full", lines=1)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        for step in range(5):
            full.write({"step": step})
    assert not full.open
    assert sum("trace" in record.message for record in caplog.records) <= 1
    assert not Trace(tmp_path).open
