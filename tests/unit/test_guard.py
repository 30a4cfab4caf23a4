"""A proposer's faults: counted, told once, and the end of it after three in a row."""

from __future__ import annotations

import logging

import pytest

from vllm_specx.engine.guard import MAX_CONSECUTIVE_FAULTS, Guard


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, once imported, keeps its loggers to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def fail() -> list[int]:
    raise ValueError("no drafts today")


def good() -> list[int]:
    return [1]


def test_faults_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("test")
    with caplog.at_level(logging.ERROR, logger="vllm"):
        for _ in range(4):
            assert guard.run(fail, []) == []
            assert guard.run(good, []) == [1]
    assert (guard.faults, guard.consecutive, guard.disabled) == (4, 0, False)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_three_in_a_row_switch_it_off_for_good(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("test")
    with caplog.at_level(logging.ERROR, logger="vllm"):
        for _ in range(MAX_CONSECUTIVE_FAULTS):
            assert not guard.disabled
            guard.run(fail, [])
        assert guard.disabled
        assert guard.run(good, []) == []
    assert guard.faults == MAX_CONSECUTIVE_FAULTS == 3
    assert "'test' failed 3 times in a row and is switched off" in caplog.records[-1].getMessage()


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt() -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard("test").run(interrupt, [])
