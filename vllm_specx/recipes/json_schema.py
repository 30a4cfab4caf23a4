"""The JSON schema of recipes, for editors: recipes/schema.json."""

from __future__ import annotations

import json
from typing import Any

from vllm_specx.config import ALIASES, PROPOSERS
from vllm_specx.control.settings import ControllerConfig
from vllm_specx.engine.translate import MODEL_KEY, PREFIX
from vllm_specx.recipes import flags
from vllm_specx.recipes.schema import Recipe, Speculation

FILE_NAME = "schema.json"
_TYPES: dict[str | None, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "switch": {"const": True},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "json": {"type": ["object", "array", "string"]},
    None: {"type": ["string", "number", "object"]},
}


def text() -> str:
    """The file's content."""
    return _laid_out(make(), 0) + "\n"


def make() -> dict[str, Any]:
    """JSON schema of a recipe file; one with `extends` may leave out what the other says."""
    schema = Recipe.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    definitions["Flags"] = {
        "type": "object",
        "properties": {
            name: _flag(said) for name, said in flags.TABLE.items() if name not in flags.ELSEWHERE
        },
        "patternProperties": {"^[a-z][a-z0-9-]*\\.[^ ]+$": {}},
        "additionalProperties": False,
    }
    definitions["Controller"] = _closed(ControllerConfig.model_json_schema(), definitions)
    definitions["Speculation"] |= {"allOf": _by_method(definitions)}
    keys: dict[str, Any] = schema["properties"]
    flag_mapping = {"$ref": "#/$defs/Flags"}
    keys["serve"] = {"description": keys["serve"]["description"], **flag_mapping}
    keys["gpus"] = {
        "description": keys["gpus"]["description"],
        "type": "object",
        "patternProperties": {"^[1-9][0-9]*$": flag_mapping},
        "additionalProperties": False,
    }
    keys["controller"] = {
        "description": keys["controller"]["description"],
        "anyOf": [{"$ref": "#/$defs/Controller"}, {"enum": ["on", "off", True, False, None]}],
    }
    del schema["required"]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of vllm-specx",
        "anyOf": [{"required": ["speculation"]}, {"required": ["extends"]}],
    }
    return {**head, **{key: value for key, value in schema.items() if key not in head}}


def _laid_out(value: Any, depth: int) -> str:
    """JSON with what fits on a line on one."""
    line = json.dumps(value)
    if len(line) + depth <= 100 or not isinstance(value, dict | list) or not value:
        return line
    start, end = "{}" if isinstance(value, dict) else "[]"
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_laid_out(v, depth + 1)}" for k, v in value.items()]
    else:
        parts = [_laid_out(each, depth + 1) for each in value]
    return f"{start}{inner}{f',{inner}'.join(parts)}\n{' ' * depth}{end}"


def _flag(said: Any) -> dict[str, Any]:
    one = {"enum": said["choices"]} if "choices" in said else _TYPES[said.get("type")]
    many = [{"type": "array", "items": one}] if said.get("list") else []
    return {"anyOf": [one, *many, {"type": "null"}]}


def _by_method(definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """What else may stand beside each of our methods."""
    rules = []
    common = Speculation.model_json_schema()["properties"]
    for proposer, kind in PROPOSERS.items():
        if proposer == "stock":
            continue
        own = _closed(kind.model_json_schema(), definitions)["properties"]
        own = {key: value for key, value in own.items() if key != "proposer"}
        if proposer not in MODEL_KEY:
            own["model"] = False
        names = [proposer, *(alias for alias, meant in ALIASES.items() if meant == proposer)]
        rules.append(
            {
                "if": {"properties": {"method": {"enum": [PREFIX + name for name in names]}}},
                "then": {"properties": {**common, **own}, "additionalProperties": False},
            }
        )
    return rules


def _closed(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema, with its own definitions among the recipe's; mappings that may be switched also take
    on and off."""
    definitions |= schema.pop("$defs", {})
    switch = {"enum": ["on", "off", True, False]}
    for key in ("controller", "pool", "lookahead"):
        if key in schema.get("properties", {}):
            inner = schema["properties"][key]
            kinds = inner.get("anyOf") or [{"$ref": inner["$ref"]}]
            schema["properties"][key] = {"anyOf": [*kinds, switch]}
    return schema
