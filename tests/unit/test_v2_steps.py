"""Where a trained draft ends before a draft does, what is beyond costs no forward."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specx.control.controller import Controller
from vllm_specx.control.cost import CostPrior
from vllm_specx.control.settings import ControllerConfig


def controller(most_draft_steps: int | None) -> Controller:
    prior = CostPrior.from_model(1e9, True, draft_share=0.2)
    made = Controller(
        ControllerConfig(), 16, prior=prior, varying=False, most_draft_steps=most_draft_steps
    )
    made.add("a")
    return made


@pytest.mark.parametrize(("most", "charged"), [(4, [0, 2, 4, 4]), (None, [0, 2, 4, 16])])
def test_forwards_that_are_charged(most: int | None, charged: list[int]) -> None:
    made = controller(most)
    choices = np.array([[0], [2], [4], [16]])
    _, seconds = made._choice.expect(np.zeros(1, np.int64), choices)
    expected = [
        made.cost.time(1, 1 + int(k), steps)
        for k, steps in zip(choices[:, 0], charged, strict=True)
    ]
    assert seconds.tolist() == pytest.approx(expected)


def test_a_long_draft_pays_where_its_end_is_free() -> None:
    """Everything is accepted; with a forward for each token the draft would stop sooner."""
    chosen = []
    for most in (4, None):
        made = controller(most)
        for _ in range(60):
            k = int(made.decide(["a"]).k[0])
            steps = k if most is None else min(k, most)
            seconds = made.cost.time(1, 1 + k, steps)
            made.observe(["a"], drafted=[k], accepted=[k], seconds=seconds, draft_steps=steps)
        chosen.append(int(made.decide(["a"]).k[0]))
    assert chosen[0] == 16
    assert chosen[0] >= chosen[1]
