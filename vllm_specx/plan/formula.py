"""The arithmetic of speculation: tokens a step, speed-up, the best K, where it starts to lose.

S = ((1 - a^(K+1)) / (1 - a)) / (1 + K g), arXiv 2211.17192, section 3.3: a is the probability that a
draft token is accepted once all before it are, g the time of a draft step over that of a plain step of
the target, and verifying K + 1 tokens costs what one does. `verify` says where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_K = 16
"""The longest draft that is looked at."""


def expected_tokens(acceptance: float | Sequence[float], k: int) -> float:
    """Tokens of one step with K draft tokens, the one that the target adds among them.

    acceptance: given all before it are accepted, of every token or by depth (the last goes on).
    """
    by_depth = [acceptance] if isinstance(acceptance, int | float) else list(acceptance)
    tokens = survival = 1.0
    for depth in range(k):
        survival *= by_depth[min(depth, len(by_depth) - 1)]
        tokens += survival
    return tokens


def speed_up(
    acceptance: float | Sequence[float], k: int, gamma: float, verify: float = 1.0
) -> float:
    """Times as many tokens a second as without drafts. gamma: a draft step over a plain step of the
    target; verify: a step that verifies K + 1 tokens of each request over a plain one."""
    return expected_tokens(acceptance, k) / (verify + k * gamma)


def best_k(
    acceptance: float | Sequence[float], gamma: float, most: int = MOST_K
) -> tuple[int, float]:
    """The K from 0 to `most` with the largest speed-up, and that; the smaller K among equals."""
    best = max(range(most + 1), key=lambda k: (speed_up(acceptance, k, gamma), -k))
    return best, speed_up(acceptance, best, gamma)


def break_even(k: int, gamma: float, verify: float = 1.0) -> float | None:
    """The acceptance below which K draft tokens lose; None: they lose at any."""
    cost = verify + k * gamma
    if cost >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < cost else (low, middle)
    return high


def memory_bound_step(read_bytes: float, bandwidth: float) -> float:
    """Seconds that reading takes, below which no step can go: 140 GB at 2000 GB/s take 0.07 s, so one
    stream has at most 14.3 tokens/s. bandwidth: bytes/s of all devices that share the reading."""
    return read_bytes / bandwidth
