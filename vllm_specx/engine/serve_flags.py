"""The flags of `vllm serve` as data, so that recipes are checked and completed where vLLM is not loaded.

`python -m vllm_specx.engine.serve_flags` adds those of the installed vLLM to recipes/serve_flags.json of
the package; a test compares the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from vllm_specx.recipes import flags

CONFIGS = frozenset({"parse_dataclass", "union_dict_and_str", "_parse_type", "loads"})
"""Names of vLLM's converters that take JSON (vllm/engine/arg_utils.py)."""


def of_installed_vllm() -> dict[str, dict[str, Any]]:
    """By flag without its dashes: what flags.TABLE holds."""
    found: dict[str, dict[str, Any]] = {}
    for action in parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names and names[0] != "--help":
            found[names[0][2:]] = _described(action)
    found["speculative-config"]["keys"] = sorted(_speculative_keys())
    return found


def _speculative_keys() -> list[str]:
    from vllm.config import SpeculativeConfig

    return [field.name for field in dataclasses.fields(SpeculativeConfig) if field.init]


def parser() -> argparse.ArgumentParser:
    """vLLM's own parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    made: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def _described(action: argparse.Action) -> dict[str, Any]:
    said: dict[str, Any] = {}
    converter = getattr(action.type, "__name__", "")
    if action.nargs == 0:
        negatable = isinstance(action, argparse.BooleanOptionalAction)
        said["type"] = "boolean" if negatable else "switch"
    elif action.choices is not None:
        said["choices"] = [choice for choice in action.choices if choice is not None]
    elif converter == "int" and action.nargs is None:
        said["type"] = "integer"
    elif converter == "float" and action.nargs is None:
        said["type"] = "number"
    elif converter in CONFIGS:
        said["type"] = "json"
    if action.nargs == "+":
        said["list"] = True
    return said


def main() -> None:
    """Write the table: flags of other versions stay, choices of both are taken together."""
    table = {name: dict(said) for name, said in flags.TABLE.items()}
    for name, said in of_installed_vllm().items():
        before = table.get(name, {})
        for kind in ("choices", "keys"):
            if kind in said:
                others = [one for one in before.get(kind, []) if one not in said[kind]]
                said[kind] = [*said[kind], *others]
        if name in table and "choices" not in before:
            said.pop("choices", None)  # one of the versions takes more than these
        table[name] = said
    lines = [f" {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    flags.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
