"""The planner's predictions beside committed measurements of the SmolLM2 recipes."""

from __future__ import annotations

import json

import pytest

from benchmarks import plan_check


def test_predictions_are_within_15_percent_of_what_was_measured() -> None:
    rows = plan_check.check()
    assert {row["recipe"] for row in rows} == {"smollm2-135m-eagle3", "smollm2-135m-medusa"}
    assert len(rows) >= 9
    assert max(abs(row["error"]) for row in rows) <= plan_check.WITHIN


def test_the_committed_table_is_what_the_script_makes() -> None:
    committed = json.loads((plan_check.RESULTS / "plan_check.json").read_text())
    assert committed["results"] == plan_check.check()


def test_acceptance_by_depth_from_how_often_each_was_accepted() -> None:
    assert plan_check.conditional([0.5, 0.25, 0.05]) == pytest.approx((0.5, 0.5, 0.2))
    assert plan_check.conditional([0.5, 0.0]) == (0.5, 0.0)


def test_a_prediction_by_hand() -> None:
    """Plain steps of 20 ms, verifying 1.2 and drafting 0.2 of one, 1 + .5 + .25 + .125 + .0625 tokens."""
    rate = plan_check.predict("smollm2-135m-eagle3", (0.5,), 0.020, 1.2, 0.2, 1)
    assert rate == pytest.approx(1.9375 / 1.4 / 0.020)
