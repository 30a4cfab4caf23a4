"""Predicted against measured: what the planner makes of committed figures, beside committed tokens/s.

    python -m benchmarks.plan_check [--out benchmarks/results/plan_check.json]

Runs no engine. For every committed run of a SmolLM2 recipe whose drafts always had K = 4 tokens, the
planner is given the plain step of the same run, what verifying costs over a plain step
(results/cost_curve.json), what drafting costs over it (results/eagle_cost.json, medusa_cost.json), and
acceptance by depth: once that of the same run, once that of another run on other prompts of the same
kind, where there is one. Predicted and measured are tokens/s of one request while it decodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import provenance
from vllm_specx import recipes
from vllm_specx.plan.pairing import pairing
from vllm_specx.plan.planner import Asked, plan

RESULTS = Path(__file__).parent / "results"
K = 4
WITHIN = 0.15
ALL = "all groups"
"""Left out: where a run was stopped in a round, its rounds are not of the same questions."""


@dataclass(frozen=True)
class Case:
    """A configuration of a result file. cost: the file that says what drafting costs; other: the file and
    configuration whose acceptance is taken for the second prediction."""

    result: str
    configuration: str
    recipe: str
    cost: str
    other: tuple[str, str] | None = None


CASES = (
    Case("eagle", "eagle3-4", "smollm2-135m-eagle3", "eagle_cost", ("eagle_stock", "specx-same")),
    Case("eagle_stock", "specx-same", "smollm2-135m-eagle3", "eagle_cost", ("eagle", "eagle3-4")),
    Case("heads", "hydra-4", "smollm2-135m-medusa", "medusa_cost"),
)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def row(name: str, configuration: str, batch: int, group: str) -> dict[str, Any] | None:
    """A row of a result file; None: there is none."""
    for each in read(name)["results"]:
        said = (each["configuration"], each["batch_size"], each["group"])
        if said == (configuration, batch, group):
            return dict(each)
    return None


def verifying() -> dict[int, dict[int, float]]:
    """A step that verifies K tokens over a plain one, by batch and K."""
    found: dict[int, dict[int, float]] = {}
    for each in read("cost_curve")["results"]:
        if each["configuration"] != "none":
            found.setdefault(each["batch_size"], {})[each["k"]] = each["ratio"]
    return found


def drafting(cost: str, batch: int) -> float | None:
    """K tokens over a plain step; between the measured batches it is interpolated."""
    data = read(cost)
    if cost == "eagle_cost":
        shares = {
            r["batch"]: r["share_of_step"][str(K)] for r in data["rows"] if r["form"] == "packed"
        }
    else:
        (chosen,) = (
            r
            for r in data["rows"]
            if (r["conditioning"], r["vocab"], r["topology"], r["form"])
            == ("hydra", 8192, "chain", "packed")
        )
        shares = {int(b): share for b, share in chosen["share_of_step"].items()}
    if batch in shares:
        return float(shares[batch])
    below = [b for b in shares if b < batch]
    above = [b for b in shares if b > batch]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    part = (batch - low) / (high - low)
    return float(shares[low] + part * (shares[high] - shares[low]))


def conditional(survival: list[float]) -> tuple[float, ...]:
    """Acceptance of each depth given the ones before, from how often it was accepted at all."""
    before, found = 1.0, []
    for each in survival[:K]:
        found.append(each / before if before else 0.0)
        before = each
    return tuple(found)


def predict(
    recipe: str,
    acceptance: tuple[float, ...],
    plain: float,
    verify: float,
    draft: float,
    batch: int,
) -> float:
    """Tokens/s of one request with K drafts, by the planner. plain: seconds."""
    path = recipes.find(recipe)
    asked = Asked(
        acceptance=acceptance,
        gamma=draft / K,
        batch=batch,
        context=512,
        step_ms={0: plain * 1e3, K: verify * plain * 1e3},
    )
    made = plan(pairing(recipes.load(path), (path.parent,)), asked, download=False)
    return made.speed.at(K).rate


def check() -> list[dict[str, Any]]:
    """One row a case, batch and group."""
    ratios = verifying()
    found = []
    for case in CASES:
        rows = read(case.result)["results"]
        places = [
            (r["batch_size"], r["group"])
            for r in rows
            if r["configuration"] == case.configuration and r["group"] != ALL
        ]
        for batch, group in places:
            measured = row(case.result, case.configuration, batch, group)
            plain = row(case.result, "none", batch, group)
            draft = drafting(case.cost, batch)
            if measured is None or plain is None or draft is None or K not in ratios.get(batch, {}):
                continue
            step = 1 / plain["decode_tok_s"]["median"]
            truth = measured["decode_tok_s"]["median"]
            made = {
                "result": case.result,
                "configuration": case.configuration,
                "recipe": case.recipe,
                "batch": batch,
                "group": group,
                "plain_ms": round(step * 1e3, 2),
                "verify": ratios[batch][K],
                "draft": round(draft, 4),
                "measured": round(truth, 2),
                "measured_over_plain": round(truth * step, 3),
            }
            sources = [("", measured)]
            if case.other and (elsewhere := row(*case.other, batch, group)) is not None:
                sources.append(("_other", elsewhere))
            for suffix, source in sources:
                acceptance = conditional(source["acceptance_by_depth"])
                said = predict(case.recipe, acceptance, step, ratios[batch][K], draft, batch)
                made[f"acceptance{suffix}"] = [round(a, 4) for a in acceptance]
                made[f"predicted{suffix}"] = round(said, 2)
                made[f"error{suffix}"] = round(said / truth - 1, 4)
            found.append(made)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| run | batch | questions | measured tok/s | predicted | error | with another run's acceptance |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for each in rows:
        other = f"{each['error_other']:+.1%}" if "error_other" in each else "-"
        lines.append(
            f"| {each['result']} {each['configuration']} | {each['batch']} | {each['group']} | "
            f"{each['measured']:.1f} | {each['predicted']:.1f} | {each['error']:+.1%} | {other} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="RESULT.json")
    args = parser.parse_args()
    rows = check()
    print(table(rows))
    worst = max(abs(each["error"]) for each in rows)
    inside = sum(abs(each["error"]) <= WITHIN for each in rows)
    typical = statistics.median(abs(each["error"]) for each in rows)
    print(
        f"\n{inside} of {len(rows)} within {WITHIN:.0%}; the median error is {typical:.1%}, the largest {worst:.1%}."
    )
    if args.out is not None:
        result = {
            **provenance.describe(),
            "k": K,
            "within": inside,
            "of": len(rows),
            "median_error": round(typical, 4),
            "largest_error": round(worst, 4),
            "results": rows,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
