"""YAML files that people write: read safely, and refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vllm_specx.config import ConfigError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


def load(path: Path, kind: str, model: type[ModelT], keys: Sequence[str] | None = None) -> ModelT:
    """The file's content as a `model`.

    kind: what the file is, as in "is not a recipe". keys: those a misspelt key is compared with;
    None: the model's own. Raises ConfigError: one sentence that names the file, the key and the fix.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{path}{place} is not valid YAML: {problem}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a {kind}: it must be a mapping with the key 'name'.")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        known = list(model.model_fields) if keys is None else keys
        raise ConfigError(f"{path}: {_sentence(error, kind, known)}") from None


def _sentence(error: ValidationError, kind: str, keys: Sequence[str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]") or kind
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {nearest(str(first['loc'][-1]), list(keys))}"
    if first["type"] == "missing":
        return f"the key '{key}' is missing."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    shown: Any = first["input"]
    if isinstance(shown, dict | list | BaseModel):
        return f"{key}: {message}."
    return f"'{key}' is {shown!r}, but {message[:1].lower()}{message[1:]}."
