"""Recipes: one YAML file a pairing of model, speculation and vLLM flags."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

import vllm_specx
from vllm_specx import documents
from vllm_specx.config import ConfigError, nearest
from vllm_specx.messages import clipped

SUFFIXES = (".yaml", ".yml")
FLAG_NAME = re.compile(r"^[A-Za-z][A-Za-z0-9.-]*$")
OWN_FLAGS = {
    "model": "model",
    "speculative-config": "speculative",
    "served-model-name": "served_model_name",
}
"""Flags of vllm serve that have a place of their own in a recipe."""

Flag = str | int | float | bool | list[Any] | dict[str, Any] | None


class Recipe(BaseModel):
    """What `vllm-specx serve` needs to know; unknown keys are refused.

    vllm: flags of `vllm serve` without their dashes. true and false switch a flag on and off, a
    list is given as several values, a mapping as JSON, null leaves the flag out.
    speculative: the `--speculative-config` mapping; null serves without speculation.
    env: environment variables, for those that the caller has not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    model: Annotated[str, Field(min_length=1)] | None = None
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    speculative: dict[str, Any] | None
    vllm: dict[str, Flag] = {}
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | int] = {}

    @field_validator("vllm", mode="before")
    @classmethod
    def _flag_names(cls, flags: Any) -> Any:
        if not isinstance(flags, dict):
            return flags
        named = {str(name).lstrip("-").replace("_", "-"): value for name, value in flags.items()}
        for name in named:
            if not FLAG_NAME.match(name):
                raise ValueError(
                    f"'{name}' is no flag of vllm serve; write its name, as in max-num-seqs"
                )
            if name in OWN_FLAGS:
                raise ValueError(f"write {name} as the key '{OWN_FLAGS[name]}' of the recipe")
        return named


def folder() -> Path:
    """The recipes that come with the checkout, or where a wheel puts them."""
    checkout = Path(vllm_specx.__file__).parent.parent / "recipes"
    installed = Path(sysconfig.get_path("data")) / "share" / "vllm_specx" / "recipes"
    return checkout if checkout.is_dir() else installed


def names() -> list[str]:
    """The names of the recipes in `folder()`."""
    return sorted(file.stem for file in folder().glob("*") if file.suffix in SUFFIXES)


def find(recipe: str) -> Path:
    """The file of a recipe given as a path or as a name in `folder()`."""
    if (path := documents.file_at(recipe)) is not None:
        return path
    for suffix in ("", *SUFFIXES):
        named = None if "/" in recipe else documents.file_at(str(folder() / f"{recipe}{suffix}"))
        if named is not None:
            return named
    shown = f"'{clipped(recipe)}'"
    if "/" in recipe or recipe.endswith(SUFFIXES):
        near = nearest(Path(recipe).stem, names())
        raise ConfigError(f"there is no recipe file {shown}; {near}")
    raise ConfigError(f"there is no recipe {shown}; {nearest(recipe, names())}")


def load(path: Path) -> Recipe:
    """Read and validate a recipe. Raises ConfigError, one sentence that names file, key and fix."""
    return documents.load(path, "recipe", Recipe)
