"""Flags of `vllm serve`: from a recipe's mapping to arguments, with the user's own on top."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ALIASES = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-n": "nnodes",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
}
"""vllm/engine/arg_utils.py: the short forms."""


def name_of(argument: str) -> str | None:
    """The flag that an argument sets, as a recipe writes it; None for a value.

    `--max_model_len=9` is max-model-len, `--no-enforce-eager` is enforce-eager, `-tp` is
    tensor-parallel-size, and `--speculative-config.pool` is speculative-config.pool.
    """
    head = argument.split("=", 1)[0]
    if head in ALIASES:
        return ALIASES[head]
    if head.startswith("-O"):
        return "optimization-level"
    if not head.startswith("--") or len(head) < 3:
        return None
    flag, dot, rest = head[2:].partition(".")
    return flag.replace("_", "-").removeprefix("no-") + dot + rest


def value_of(name: str, arguments: Sequence[str]) -> str | None:
    """The last value that `arguments` give to a flag: `--flag value` or `--flag=value`."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if name_of(argument) == name:
            value = argument.split("=", 1)[1] if "=" in argument else following
    return value


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags that `arguments` set, as a recipe writes them; of several values the first."""
    found: dict[str, Any] = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if (name := name_of(argument)) is None:
            continue
        if "=" in argument:
            found[name] = _parse(argument.split("=", 1)[1])
        elif name_of(following) is not None or following == "--":
            found[name] = not argument.startswith("--no-")
        else:
            found[name] = _parse(following)
    return found


def merge(flags: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    """Arguments for `flags`, without those that `extra` sets, followed by `extra`.

    A dotted flag in `extra` (`--speculative-config.pool off`) changes its key in the mapping that
    `flags` holds, since vLLM itself would let one replace the other.
    """
    given = {name for argument in extra if (name := name_of(argument))}
    kept = {name: value for name, value in flags.items() if name not in given}
    mappings = {name: value for name, value in kept.items() if isinstance(value, Mapping)}
    rest: list[str] = []
    arguments = iter(extra)
    for argument in arguments:
        name, dot, key = (name_of(argument) or "").partition(".")
        if not dot or name not in mappings or key.endswith("+"):
            rest.append(argument)
            continue
        value = argument.split("=", 1)[1] if "=" in argument else next(arguments, "")
        kept[name] = _with(kept[name], key.split("."), _parse(value))
    return [argument for name, value in kept.items() for argument in render(name, value)] + rest


def render(name: str, value: Any) -> list[str]:
    """The arguments of one flag."""
    match value:
        case None:
            return []
        case True:
            return [f"--{name}"]
        case False:
            return [f"--no-{name}"]
        case Mapping():
            return [f"--{name}", json.dumps(value)]
        case list():
            return [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in value)]
        case _:
            return [f"--{name}", str(value)]


def _with(mapping: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    head, *rest = keys
    if rest:
        inner = mapping.get(head)
        value = _with(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**mapping, head: value}


def _parse(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
