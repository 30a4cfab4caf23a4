"""Trees in simulations, and the choice of how many nodes are verified."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specx.config import ConfigError
from vllm_specx.control.nodes import best_sizes
from vllm_specx.plan import report
from vllm_specx.plan.scenario import Simulation, Work, load
from vllm_specx.plan.simulate import simulate, verdict
from vllm_specx.plan.trees import Shape, rank_table

WORK = {
    "acceptance": [0.6, 0.5, 0.4],
    "siblings": [[0.2, 0.1], [0.15, 0.1]],
    "prompt_tokens": 100,
    "output_tokens": 60,
}


def scenario(slope: float, **changes: Any) -> Simulation:
    """Batches of 1 and 8, where another token costs `slope` of a step."""
    ms = {b: {k: 10.0 * (1 + slope * b * k) for k in (0, 8, 64)} for b in (1, 8)}
    return Simulation.model_validate(
        {
            "name": "x",
            "max_k": 4,
            "static_k": [1, 2, 4],
            "max_requests": 8,
            "tree": {"nodes": [8, 32], "branching": 3, "depth": 4, "overhead": 0.05},
            "work": {"questions": WORK},
            "arrivals": {"kind": "levels", "levels": [[1, 12], [8, 60]]},
            "cost": {"kind": "measured", "ms": ms, "draft_step_ms": 0.1},
            **changes,
        }
    )


def test_accepted_tokens_are_what_the_nodes_promise() -> None:
    """Over a grid of draws that has each rank as often as the table says."""
    table = rank_table(Work.model_validate(WORK), 3, 3)
    assert table.tolist() == [[0.6, 0.2, 0.1], [0.5, 0.15, 0.1], [0.4, 0.15, 0.1]]
    shape = Shape(table, 64)
    assert shape.gains.tolist() == sorted(shape.gains.tolist(), reverse=True)
    grid = (np.arange(20) + 0.5) / 20
    for nodes in (1, 2, 5, 13, len(shape.gains)):
        mean = np.mean([shape.accepted(nodes, d) for d in itertools.product(grid, repeat=3)])
        assert mean == pytest.approx(float(shape.gains[:nodes].sum()))
    chain = Shape(rank_table(Work.model_validate(WORK), 3, 1), 64)
    assert chain.gains == pytest.approx([0.6, 0.3, 0.12])


@given(st.integers(0, 2**31 - 1), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_sizes_make_the_most_tokens_per_time(seed: int, batch: int) -> None:
    """Against all of them, of all shapes."""
    rng = np.random.default_rng(seed)
    gains = [-np.sort(-rng.random((batch, width)), axis=1) for width in (1, 2, 4)]
    limits = rng.integers(0, 5, batch)
    slopes = rng.random(3)

    def timed(which: int) -> Any:
        return lambda n, steps: 1.0 + slopes[which] * np.arange(n + 1) + 0.1 * steps

    chosen = best_sizes(gains, [1, 2, 2], limits, [timed(i) for i in range(3)], 1.0)
    every = [
        (batch + sum(float(gain[b, :n].sum()) for b, n in enumerate(sizes)))
        / float(timed(which)(sum(sizes), [1, 2, 2][which])[-1])
        for which, gain in enumerate(gains)
        for sizes in itertools.product(*(range(min(n, gain.shape[1]) + 1) for n in limits.tolist()))
    ]
    assert chosen.goodput == pytest.approx(max(*every, batch / 1.0))
    if chosen.which >= 0:
        n = chosen.nodes
        got = batch + sum(float(gains[chosen.which][b, : n[b]].sum()) for b in range(batch))
        time = float(timed(chosen.which)(int(n.sum()), [1, 2, 2][chosen.which])[-1])
        assert got / time == pytest.approx(chosen.goodput)
    else:
        assert not chosen.nodes.any()


def test_free_tokens_ask_for_trees_and_dear_ones_for_chains() -> None:
    free = verdict(simulate(scenario(0.0005)))
    assert free["nodes_over_chains"] > 1.12 and free["nodes_over_best_tree"] > 0.92
    dear = verdict(simulate(scenario(0.08)))
    assert dear["nodes_over_chains"] > 0.97 and dear["nodes_over_best_tree"] > 1.2


def test_a_plot_by_batch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chosen = scenario(0.01)
    report.plot(chosen, simulate(chosen), tmp_path / "trees.png")
    assert (tmp_path / "trees.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"siblings": [[0.5]]}, "only one child of a node can be right"),
        ({"drafted": 0.5}, "which trees do not know"),
    ],
)
def test_bad_trees(tmp_path: Path, work: dict[str, Any], said: str) -> None:
    document = scenario(0.01).model_dump(mode="json", exclude_unset=True)
    document["work"] = {"questions": {**WORK, **work}}
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=said):
        load(path)
