"""Rules per request: what its client says of it, and its temperature."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_specx.messages import shown, warn_of

SCENARIO_KEY = "specx_scenario"
K_KEY = "specx_k"
HOT_TEMPERATURE = 0.9
HOT_START_K = 2
"""From HOT_TEMPERATURE up a request starts with few draft tokens; its acceptance then decides."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to expect of a kind of work before anything is measured.

    start_k: draft tokens at first.
    rejection: 1 - the middle of the acceptance rates that are usual for it.
    """

    start_k: int
    rejection: float


SCENARIOS = {
    "code": Scenario(5, 0.185),
    "tool_calling": Scenario(4, 0.24),
    "reasoning": Scenario(3, 0.385),
    "creative": Scenario(1, 0.625),
}
PRIOR_REJECTION = 0.4
"""Of work that nothing is known of."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the controller may do for one request.

    pool: name of the estimates that the request shares.
    rejection: prior probability that a draft token is rejected, used while the pool is new.
    start_k: the most draft tokens until there is evidence; None: no such bound.
    fixed_k: always this many, 0 for none; None: the controller chooses.
    """

    pool: str = ""
    rejection: float = PRIOR_REJECTION
    start_k: int | None = None
    fixed_k: int | None = None


def problem(extra_args: Mapping[str, Any] | None, max_k: int) -> str | None:
    """What is wrong with our keys in a request's extra_args, in one sentence; None if nothing is."""
    for key in (SCENARIO_KEY, K_KEY):
        if extra_args and (said := _problem_of(key, extra_args.get(key), max_k)):
            return said
    return None


def rule_for(extra_args: Mapping[str, Any] | None, temperature: float | None, max_k: int) -> Rule:
    """The rule of a request. Keys with invalid values count as absent, with a warning.

    extra_args: vLLM's SamplingParams.extra_args (`vllm_xargs` over HTTP), with
        specx_scenario: code, tool_calling, reasoning, creative, or any other short name;
        specx_k: a fixed number of draft tokens, 0 for no speculation.
    """
    given = {}
    for key in (SCENARIO_KEY, K_KEY):
        value = (extra_args or {}).get(key)
        if said := _problem_of(key, value, max_k):
            warn_of(said)
        elif value is not None:
            given[key] = value
    name = str(given.get(SCENARIO_KEY, ""))
    known = SCENARIOS.get(name)
    start_k = known.start_k if known else None
    rejection = known.rejection if known else PRIOR_REJECTION
    pool = name
    if (temperature or 0.0) >= HOT_TEMPERATURE:
        start_k = HOT_START_K if start_k is None else min(start_k, HOT_START_K)
        rejection = min(1.3 * rejection, 0.8)
        pool = f"{name}@hot"
    fixed = int(given[K_KEY]) if K_KEY in given else None
    return Rule(pool, rejection, start_k, fixed)


def opts_out(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request asks never to be drafted for, by a specx_k of 0."""
    given = (extra_args or {}).get(K_KEY)
    return given is not None and _problem_of(K_KEY, given, 0) is None


def _problem_of(key: str, value: Any, max_k: int) -> str | None:
    if value is None:
        return None
    if key == SCENARIO_KEY:
        if isinstance(value, str) and _NAME.fullmatch(value):
            return None
        return (
            f"{SCENARIO_KEY} is {shown(value)}; it must be one of {', '.join(SCENARIOS)}, "
            "or another name of at most 64 letters, digits, dots, dashes and underscores."
        )
    whole = not isinstance(value, bool) and (
        isinstance(value, int)
        or (isinstance(value, float) and value.is_integer())
        or (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 5)
    )
    if whole and 0 <= int(value) <= max_k:
        return None
    return f"{K_KEY} is {shown(value)}; it must be a whole number from 0 to {max_k}."
