"""Three minutes of mixed load, with a proposer that fails now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import run, verdict

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


def test_three_minutes(tmp_path: Path) -> None:
    result = run(3.0, 300, 0, ["--enforce-eager"], tmp_path / "log")
    assert result["finished"] > 50
    assert result["aborted"] > 3
    # Windows of half a minute vary more than those of five minutes.
    assert verdict(result, tolerance=0.3, growth=0.02) == []
