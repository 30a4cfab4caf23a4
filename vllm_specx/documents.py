"""YAML files that people write: read safely, and refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vllm_specx.config import ConfigError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)
DEEPEST = 50
"""Levels of lists and mappings in a file."""
MOST_VALUES = 100_000


def file_at(name: str) -> Path | None:
    """The file of that name (`~` is a home folder); None where there is none, whatever the reason."""
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def first_there(name: str, folders: Sequence[Path]) -> Path | None:
    """The file or folder of that name in the first of `folders` that has it (`~` is a home folder);
    None where there is none, whatever the reason."""
    try:
        path = Path(name).expanduser()
        return next((found for each in folders if (found := each / path).exists()), None)
    except (OSError, RuntimeError, ValueError):
        return None


def load(path: Path, kind: str, model: type[ModelT], keys: Sequence[str] | None = None) -> ModelT:
    """The file's content as a `model`: read(), then validated()."""
    return validated(path, read(path, kind), kind, model, keys)


def read(path: Path, kind: str) -> dict[str, Any]:
    """The file's mapping. kind: what the file is, as in "is not a recipe". Raises ConfigError: one
    sentence that names the file, the key and the fix."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}.") from None
    except (ValueError, RecursionError) as error:
        problem = str(error).split(";")[0] or "it cannot be parsed"
        raise ConfigError(f"{path} is not valid YAML: {problem}.") from None
    if said := strange(data):
        raise ConfigError(f"{path}: {said}")
    if not isinstance(data, dict):
        held = "empty" if data is None else "a list" if isinstance(data, list) else "a single value"
        raise ConfigError(f"{path} is not a {kind}: it is {held}, but must be a mapping of keys.")
    return data


def validated(
    path: Path,
    data: dict[str, Any],
    kind: str,
    model: type[ModelT],
    keys: Sequence[str] | None = None,
) -> ModelT:
    """The mapping as a `model`. path: whose it is, for messages. keys: those a misspelt key is compared
    with; None: the model's own. Raises ConfigError as read() does."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        known = _keys(error, model) if keys is None else keys
        raise ConfigError(f"{path}: {_sentence(error, kind, known)}") from None


def strange(data: Any) -> str | None:
    """What neither JSON nor a command line can carry in what YAML has made of a file, in a sentence."""
    todo: list[tuple[Any, str, int]] = [(data, "", 0)]
    for _ in range(MOST_VALUES):
        if not todo:
            return None
        value, key, depth = todo.pop()
        where = f"'{key}'" if key else "the file"
        if depth > DEEPEST:
            return f"{where} lies deeper than {DEEPEST} levels, or in itself; write it flat."
        if isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(name, bool) or not isinstance(name, str | int | float):
                    return f"the name {name!r} in {where} is not text; put it in quotes."
                path = f"{key}.{name}" if key else str(name)
                todo += [(str(name), path, depth), (inner, path, depth + 1)]
        elif isinstance(value, list):
            todo += [(inner, f"{key}.{i}", depth + 1) for i, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{where} is {value}; it must be a finite number."
        elif isinstance(value, int) and abs(value) > 2**63:
            return f"{where} is a number of {len(hex(value)) - 2} hexadecimal digits; write less."
        elif isinstance(value, str) and ("\0" in value or _surrogates(value)):
            return f"{where} holds a character that no command line can carry; take it out."
        elif value is not None and not isinstance(value, str | int | float | bool):
            kind = type(value).__name__
            return (
                f"{where} is taken by YAML as a {kind}; put it in quotes, or write another value."
            )
    return f"it holds more than {MOST_VALUES} values; write less."


def _surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _keys(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Those of the part of `model` in which the error lies."""
    owner = model
    for part in error.errors()[0]["loc"][:-1]:
        inner = owner.model_fields[str(part)].annotation if part in owner.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        owner = inner
    return list(owner.model_fields)


def _sentence(error: ValidationError, kind: str, keys: Sequence[str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]") or kind
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {nearest(str(first['loc'][-1]), list(keys))}"
    if first["type"] == "missing":
        return f"the key '{key}' is missing."
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"] and message.startswith(("'", "unknown key")):
        return message if message.endswith("?") else f"{message.rstrip('.')}."
    message = message.rstrip(".")
    shown: Any = first["input"]
    if isinstance(shown, dict | list | BaseModel):
        return f"{key}: {message}."
    return f"'{key}' is {shown!r}, but {message[:1].lower()}{message[1:]}."
