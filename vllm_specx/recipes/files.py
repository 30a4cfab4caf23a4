"""Recipes as files: found by path or name, read with what they extend."""

from __future__ import annotations

import difflib
import sysconfig
from pathlib import Path
from typing import Any

import vllm_specx
from vllm_specx import documents
from vllm_specx.config import ConfigError
from vllm_specx.messages import clipped
from vllm_specx.recipes.schema import Recipe

SUFFIXES = (".yaml", ".yml")
DEEPEST = 8
"""Recipes that extend one another."""
OWN = ("name", "description", "extends")
"""Keys that a recipe does not take from the one it extends."""


def folder() -> Path:
    """The recipes that come with the checkout, or where a wheel puts them."""
    checkout = Path(vllm_specx.__file__).parent.parent / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "vllm_specx" / "recipes"
    return checkout if checkout.is_dir() else installed


def names() -> list[str]:
    """The names of the recipes in `folder()`."""
    return sorted(file.stem for file in folder().glob("*") if file.suffix in SUFFIXES)


def find(recipe: str) -> Path:
    """The file of a recipe given as a path or as a name in `folder()`. Raises ConfigError."""
    if (path := documents.file_at(recipe)) is not None:
        return path
    for suffix in ("", *SUFFIXES):
        named = None if "/" in recipe else documents.file_at(str(folder() / f"{recipe}{suffix}"))
        if named is not None:
            return named
    shown = f"'{clipped(recipe)}'"
    is_path = "/" in recipe or recipe.endswith(SUFFIXES)
    close = difflib.get_close_matches(Path(recipe).stem if is_path else recipe, names(), n=1)
    near = (
        f"did you mean '{close[0]}'?"
        if close
        else "`vllm-specx recipes` lists those that there are."
    )
    raise ConfigError(f"there is no recipe {'file ' if is_path else ''}{shown}; {near}")


def load(path: Path) -> Recipe:
    """Read a recipe and what it extends, and validate them. Raises ConfigError, one sentence that names
    file, key and fix."""
    return _validated(path, _merged(path, ()))


def _validated(path: Path, data: dict[str, Any]) -> Recipe:
    return documents.validated(path, {"name": path.stem, **data}, "recipe", Recipe)


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    data = documents.read(path, "recipe")
    base = data.get("extends")
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: 'extends' is {base!r}, but it must be the path of one recipe.")
    chain = (*above, path.resolve())
    found = documents.file_at(str(path.parent / Path(base).expanduser()))
    if found is None:
        raise ConfigError(
            f"{path}: 'extends' is '{clipped(base)}', but there is no such file beside the recipe; "
            "write a path relative to it."
        )
    if found.resolve() in chain or len(chain) > DEEPEST:
        raise ConfigError(
            f"{path}: 'extends' is '{clipped(base)}', which leads back here; end the chain of recipes."
        )
    under = _merged(found, chain)
    _validated(found, under)  # its faults are told as its own
    kept = {key: value for key, value in under.items() if key not in OWN}
    return _over(kept, data, top=True)


def _over(base: dict[str, Any], change: dict[str, Any], *, top: bool = False) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        before = merged.get(key)
        whole = top and key == "speculation" and isinstance(value, dict) and "method" in value
        if isinstance(value, dict) and isinstance(before, dict) and not whole:
            merged[key] = _over(before, value)
        elif value is None and not top:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
