"""Tokens a second by K, by the formula where verifying is free and by the roofline where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_specx.plan.curves import Curve
from vllm_specx.plan.formula import break_even, expected_tokens, speed_up

Shown = Literal["formula", "roofline", "measured"]


@dataclass(frozen=True, slots=True)
class Row:
    """K draft tokens for every request. tokens: of a request's step. verify: the step that verifies them
    over a plain one. draft: drafting them over a plain step. speed_up: over no drafts. rate: tokens/s of
    one request. break_even: the acceptance below which this K loses; None: at any."""

    k: int
    tokens: float
    verify: float
    draft: float
    speed_up: float
    rate: float
    break_even: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """plain: seconds of a step without drafts. gamma: of one draft step over that, as far as one figure
    says it."""

    shown: Shown
    batch: int
    plain: float
    gamma: float
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        """The row with the largest speed-up; the smaller K among equals."""
        return max(self.rows, key=lambda row: (row.speed_up, -row.k))

    def at(self, k: int) -> Row:
        """The row of that K. Raises KeyError."""
        for row in self.rows:
            if row.k == k:
                return row
        raise KeyError(k)


def speed(
    acceptance: float | Sequence[float],
    drafting: Sequence[float],
    curve: Curve,
    *,
    batch: int,
    context: float,
    measured: bool = False,
) -> Speed:
    """drafting: of K = 0, 1, ... draft tokens, over a plain step of the target. curve: steps of the
    target alone. context: tokens of each request. measured: the curve was."""
    plain = curve.decode(batch, 0, batch * context, 0)
    rows = []
    for k, draft in enumerate(drafting):
        verify = curve.decode(batch, batch * k, batch * context, 0) / plain
        gamma = draft / k if k else 0.0
        gain = speed_up(acceptance, k, gamma, verify)
        rows.append(
            Row(
                k=k,
                tokens=expected_tokens(acceptance, k),
                verify=verify,
                draft=draft,
                speed_up=gain,
                rate=gain / plain,
                break_even=break_even(k, gamma, verify) if k else None,
            )
        )
    free = all(row.verify <= 1.0 + 1e-9 for row in rows)
    shown: Shown = "measured" if measured else "formula" if free else "roofline"
    first = drafting[1] if len(drafting) > 1 else 0.0
    return Speed(shown, batch, plain, first, tuple(rows))
