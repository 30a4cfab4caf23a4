"""What the soak sends, and what it finds fault with; the run itself is in tests/server/."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import Record, requests, verdict, window


def test_requests_are_of_all_scenarios_short_and_long_and_the_same_each_time() -> None:
    bodies = requests(0)
    assert bodies == requests(0) and len(bodies) == 96
    scenarios = {body.get("vllm_xargs", {}).get("specx_scenario") for body in bodies}
    assert scenarios == {"code", "tool_calling", "reasoning", "creative"}
    lengths = sorted(len(body["messages"][-1]["content"]) for body in bodies)
    assert lengths[0] < 400 and lengths[-1] > 1500


def recorded(late_speed: float = 100.0, late_share: float = 0.6, late_mib: int = 500) -> Record:
    record = Record()
    tokens = drafted = accepted = 0.0
    for second in range(0, 361, 5):
        late = second >= 300
        held = 1024 * (late_mib if late else 500)
        record.samples.append((float(second), tokens, drafted, accepted, held))
        tokens += 5 * (late_speed if late else 100.0)
        drafted += 500.0
        accepted += 500.0 * (late_share if late else 0.6)
    return record


def result(record: Record, **more: Any) -> dict[str, Any]:
    windows = {"second": window(record, 360, 1), "last": window(record, 360, 5)}
    return {"errors": {}, "fault_every": 0, "proposer_errors": 0, **windows, **more}


def test_a_steady_run_is_faultless() -> None:
    steady = result(recorded())
    assert steady["second"]["tokens_per_second"] == pytest.approx(100)
    assert steady["second"]["acceptance"] == pytest.approx(0.6)
    assert verdict(steady, 0.05, 0.02) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (result(recorded(late_speed=90)), "tokens_per_second fell from 100.000 to 90.000"),
        (result(recorded(late_share=0.5)), "acceptance fell"),
        (result(recorded(late_mib=520)), "memory grew from 500 to 520 MiB"),
        (result(recorded(), errors={"status 500": 2}), "2 requests: status 500"),
        (result(recorded(), fault_every=100), "never failed"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(given: dict[str, Any], words: str) -> None:
    (said,) = verdict(given, 0.05, 0.02)
    assert words in said
