"""The flags of `vllm serve` that a recipe may set, without vLLM."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_specx.messages import shown

FILE = Path(__file__).with_name("serve_flags.json")
TABLE: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
"""Of vLLM 0.32 and 0.33, made by engine/serve_flags.py. `type`: boolean (`--x` and `--no-x`), switch
(`--x` only), integer, number, json, or absent: text that vLLM judges. `choices`; `list`: several values; `keys` of --speculative-config."""
ELSEWHERE = {
    "model": "write it as the key 'model' of the recipe",
    "speculative-config": "write it as the key 'speculation' of the recipe",
    "spec-method": "write it as 'speculation.method'",
    "spec-model": "write it as 'speculation.model'",
    "spec-tokens": "write it as 'speculation.num_speculative_tokens'",
    "config": "write its flags into the recipe",
}
"""Flags with another place in a recipe."""


def speculation_problem(method: str, keys: Iterable[str]) -> str | None:
    """What looks misspelt in a mapping for one of vLLM's own methods; None: nothing. Methods and keys
    that are like none of 0.32 and 0.33 are left to vLLM."""
    methods = TABLE["spec-method"]["choices"]
    known = [*TABLE["speculative-config"]["keys"], "specx"]
    if method not in methods and (close := difflib.get_close_matches(method, methods, n=1)):
        return f"'speculation.method' is '{method}'; did you mean '{close[0]}'?"
    for key in keys:
        if key not in known and (close := difflib.get_close_matches(key, known, n=1)):
            return f"unknown key 'speculation.{key}'; did you mean '{close[0]}'?"
    return None


def problem(name: str, value: Any) -> str | None:
    """What is wrong with the flag in a recipe, and the fix; None: nothing that is known here."""
    if name in ELSEWHERE:
        return f"is not a flag of its own here; {ELSEWHERE[name]}"
    base, dot, _ = name.partition(".")
    if name.startswith("no-") and name[3:] in TABLE:
        return f"is written as '{name[3:]}: false'"
    if base not in TABLE:
        close = difflib.get_close_matches(base, TABLE, n=1, cutoff=0.5)
        near = f"did you mean '{close[0]}'?" if close else "vllm serve --help=all lists them."
        return f"is no flag of vllm serve (0.32, 0.33), those of others go after `--`; {near}"
    if dot or value is None:
        return None
    wanted = _unfit(TABLE[base], value)
    return f"is {shown(value)}; it must be {wanted}" if wanted else None


def _unfit(flag: Mapping[str, Any], value: Any) -> str | None:
    """What the value must be, if it is not."""
    if "choices" in flag:
        each = value if flag.get("list") and isinstance(value, list) else [value]
        if any(one not in flag["choices"] for one in each):
            return f"one of {', '.join(map(str, flag['choices']))}"
        return None
    switched = isinstance(value, bool)
    match flag.get("type"):
        case "boolean":
            return None if switched else "true or false"
        case "switch":
            return None if value is True else "true, or be left out"
        case "integer":
            return None if isinstance(value, int) and not switched else "a whole number"
        case "number":
            return None if isinstance(value, int | float) and not switched else "a number"
        case "json":
            return None if isinstance(value, dict | list | str) and value != "" else "a mapping"
        case _:
            if isinstance(value, list) and not flag.get("list"):
                return "one value"
            return "a value, not a switch" if switched else None
