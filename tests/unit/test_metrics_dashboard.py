"""dashboard.json and alerts.yaml: current, about metrics that exist, and right about when to alarm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.promtool import promtool
from vllm_specx.metrics import dashboard
from vllm_specx.metrics.definitions import METRICS

ALERTS = dashboard.FILE.with_name("alerts.yaml")
OURS = {name for metric in METRICS for name in metric.series}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def test_the_file_is_what_the_table_says() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), (
        "run `python -m vllm_specx.metrics.dashboard`"
    )


def test_every_panel_says_what_it_reads_and_reads_what_there_is() -> None:
    board = dashboard.dashboard()
    assert board["schemaVersion"] == 39 and "vllm" in board["tags"]
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "job", "model_name", "instance", "engine"]
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        read = {n for t in panel["targets"] for n in dashboard.metrics_of(t["expr"])}
        assert read
        for name in read:
            assert name in panel["description"], panel["title"]
            assert name in OURS or name.startswith("vllm:inter_token"), name
        mappings = panel["fieldConfig"]["defaults"]["mappings"]
        assert mappings[0]["options"]["result"]["text"] == "No traffic"


def test_rates_are_over_the_rate_interval_and_denominators_are_guarded() -> None:
    for panel in dashboard.panels():
        for query, _ in panel.queries:
            for window in re.findall(r"\[([^\]]+)\]", query):
                assert window == "$__rate_interval"
            for below in query.split(" / ")[1:]:
                assert below.startswith("(") and "> 0)" in below, query


def test_no_panel_covers_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_read_metrics_that_exist() -> None:
    assert len(rules()) == 7
    for rule in rules():
        for name in dashboard.metrics_of(rule["expr"]):
            assert name in OURS, rule["alert"]


def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(
        [promtool(), "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "7 rules found" in done.stdout


LABELS = 'job="vllm",instance="host:8000",model_name="m",engine="0",method="specx:ngram"'
HOUR = 60


def counter(name: str, a_minute: float, more: str = "") -> dict[str, str]:
    labels = LABELS + (f",{more}" if more else "")
    return {"series": f"vllm_specx:{name}{{{labels}}}", "values": f"0+{a_minute}x{HOUR}"}


def acceptance(share: float, drafted: float = 600) -> list[dict[str, str]]:
    code = 'scenario="code"'
    return [
        counter("draft_tokens_total", drafted, code),
        counter("accepted_tokens_total", share * drafted, code),
    ]


def steps(plain: float, speculated: float) -> list[dict[str, str]]:
    return [
        counter("decode_steps_total", plain, 'speculated="no"'),
        counter("decode_steps_total", speculated, 'speculated="yes"'),
    ]


def bubble(share: float, a_minute: float = 50) -> list[dict[str, str]]:
    return [
        counter("bubble_seconds_total", share * a_minute),
        counter("bubble_base_seconds_total", a_minute),
    ]


def speed(ratio: float, a_minute: float = 50) -> list[dict[str, str]]:
    return [
        counter("plain_seconds_total", ratio * a_minute),
        counter("foreseen_step_seconds_total", a_minute),
    ]


def errors(values: str) -> list[dict[str, str]]:
    return [{"series": f"vllm_specx:proposer_errors_total{{{LABELS}}}", "values": values}]


def disabled(value: int) -> list[dict[str, str]]:
    series = f'vllm_specx:disabled{{{LABELS},part="proposer"}}'
    return [{"series": series, "values": f"{value}x{HOUR}"}]


CASES: list[tuple[str, list[dict[str, str]], int, bool]] = [
    ("SpecxAcceptanceLow", acceptance(0.60), 30, True),
    ("SpecxAcceptanceLow", acceptance(0.60), 9, False),
    ("SpecxAcceptanceLow", acceptance(0.70), 30, False),
    ("SpecxAcceptanceLow", acceptance(0.60, drafted=30), 30, False),
    ("SpecxAcceptanceLow", [*acceptance(0.1), counter("tree_nodes_total", 600)], 30, False),
    ("SpecxAcceptanceLow", [*acceptance(0.1), counter("tree_nodes_total", 0)], 30, True),
    ("SpecxAcceptanceCritical", acceptance(0.45), 30, True),
    ("SpecxAcceptanceCritical", acceptance(0.60), 30, False),
    ("SpecxSpeculationOff", steps(600, 0), 50, True),
    ("SpecxSpeculationOff", steps(600, 0), 20, False),
    ("SpecxSpeculationOff", steps(600, 60), 50, False),
    ("SpecxSpeculationOff", steps(0, 0), 50, False),
    ("SpecxProposerErrors", errors(f"0x10 1x{HOUR}"), 12, True),
    ("SpecxProposerErrors", errors(f"0x10 1x{HOUR}"), 40, False),
    ("SpecxProposerErrors", errors(f"0x{HOUR}"), 12, False),
    ("SpecxDisabled", disabled(1), 5, True),
    ("SpecxDisabled", disabled(0), 5, False),
    ("SpecxBubbleHigh", bubble(0.5), 30, True),
    ("SpecxBubbleHigh", bubble(0.3), 30, False),
    ("SpecxBubbleHigh", bubble(0.9, a_minute=0), 30, False),
    ("SpecxSlowerThanPlain", speed(0.9), 40, True),
    ("SpecxSlowerThanPlain", speed(0.99), 40, False),
    ("SpecxSlowerThanPlain", speed(1.8), 40, False),
    ("SpecxSlowerThanPlain", speed(0.9, a_minute=0), 40, False),
]


def promtool_test(case: tuple[str, list[dict[str, str]], int, bool]) -> dict[str, Any]:
    alert, series, minute, fires = case
    (rule,) = [r for r in rules() if r["alert"] == alert]
    kept = {"job": "vllm", "instance": "host:8000", "model_name": "m", "engine": "0"}
    if alert == "SpecxDisabled":
        kept["part"] = "proposer"
    expected = [{"exp_labels": {**kept, **rule["labels"]}}] if fires else []
    return {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}
        ],
    }


def promtool_says(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """`promtool test rules`, on the rules without their texts, which have values in them."""
    bare = yaml.safe_load(ALERTS.read_text())
    for rule in bare["groups"][0]["rules"]:
        del rule["annotations"]
    (folder / "bare.yaml").write_text(yaml.safe_dump(bare))
    written = {"rule_files": ["bare.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(written))
    return subprocess.run(
        [promtool(), "test", "rules", str(folder / "tests.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_alerts_fire_when_they_must_and_not_otherwise(tmp_path: Path) -> None:
    assert {alert for alert, *_, fires in CASES if fires} == {r["alert"] for r in rules()}
    assert {alert for alert, *_, fires in CASES if not fires} == {r["alert"] for r in rules()}
    done = promtool_says(tmp_path, [promtool_test(case) for case in CASES])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("place", range(2))
def test_a_wrong_expectation_is_noticed(tmp_path: Path, place: int) -> None:
    alert, series, minute, fires = CASES[place]
    done = promtool_says(tmp_path, [promtool_test((alert, series, minute, not fires))])
    assert done.returncode != 0
