"""The key `tree`: how large draft trees may be."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from vllm_specx.config_base import Strict


class TreeConfig(Strict):
    """Drafts are trees, verified in one forward of the target; without this key they are chains."""

    nodes: Annotated[int, Field(ge=2, le=64)] = 32
    """Tokens of a tree at most. How many there are follows what they promise and cost."""
    branching: Annotated[int, Field(ge=1, le=32)] = 4
    """Children of a node at most."""
    depth: Annotated[int, Field(ge=1, le=16)] = 6
    """Tokens of a path at most; n-grams draft as deep as there are nodes."""

    @model_validator(mode="after")
    def _fits(self) -> TreeConfig:
        if self.depth > self.nodes:
            raise ValueError(f"tree.depth {self.depth} is above tree.nodes {self.nodes}")
        return self
