"""Keys of `specx:medusa`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vllm_specx.config_base import ProposerConfig
from vllm_specx.draft.tree_config import TreeConfig


class MedusaConfig(ProposerConfig):
    """Draft heads on the target's last hidden state."""

    proposer: Literal["medusa"] = "medusa"
    heads: Annotated[str, Field(min_length=1)]
    """The checkpoint: a folder or a file (draft/checkpoints.py says which layouts are read)."""
    tree: TreeConfig | None = None
    choices: tuple[tuple[Annotated[int, Field(ge=0, le=31)], ...], ...] | None = None
    """A fixed tree, as Medusa's `medusa_choices`: each path is the rank of the candidate at each
    depth. Unset, the tree is built each step by expected acceptance."""
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """A draft ends where the estimated probability that all of it is accepted falls below this;
    unset, where one more token costs more than it promises (token_cost)."""
    token_cost: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Time to verify one more token, in units of the fixed part of a decode step; unset, 0.05 on a
    CPU and 0.01 on a GPU."""
    vocab: Annotated[int, Field(ge=1)] | None = None
    """Use only this many of the draft vocabulary's most frequent tokens."""

    @model_validator(mode="after")
    def _paths(self) -> MedusaConfig:
        if self.choices is None:
            return self
        if self.tree is None:
            raise ValueError("choices need the key 'tree'")
        paths = set(self.choices)
        if not paths or () in paths or len(paths) != len(self.choices):
            raise ValueError("choices must be distinct, non-empty paths")
        for path in self.choices:
            if len(path) > 1 and path[:-1] not in paths:
                raise ValueError(f"choices has {list(path)}, but not its parent {list(path[:-1])}")
        if len(paths) > 64:
            raise ValueError(f"choices has {len(paths)} paths; 64 is the most")
        return self
