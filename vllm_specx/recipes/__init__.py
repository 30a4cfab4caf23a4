"""Recipes: one YAML file a pairing of model, speculation and vLLM flags."""

from vllm_specx.recipes.files import find, folder, load, names
from vllm_specx.recipes.schema import Hardware, Recipe, Speculation

__all__ = ["Hardware", "Recipe", "Speculation", "find", "folder", "load", "names"]
