"""`vllm-specx recipes`: what there is to serve, and the schema of the files."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllm_specx import recipes
from vllm_specx.recipes import json_schema


def show(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")
    ] = False,
) -> None:
    """List the recipes that come along."""
    if schema:
        sys.stdout.write(json_schema.text())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "what it is", "GPUs", box=None, pad_edge=False)
    for name in recipes.names():
        recipe = recipes.load(recipes.find(name))
        counts = sorted({recipe.tensor_parallel_size, *recipe.gpus})
        table.add_row(name, recipe.description, ", ".join(map(str, counts)))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
