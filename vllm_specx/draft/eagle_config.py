"""Keys of `specx:eagle`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from vllm_specx.config_base import ProposerConfig
from vllm_specx.draft.tree_config import TreeConfig


class EagleConfig(ProposerConfig):
    """A draft of decoder layers that follows the target's hidden states: EAGLE or EAGLE-3, as the
    checkpoint says."""

    proposer: Literal["eagle"] = "eagle"
    heads: Annotated[str, Field(min_length=1)]
    """The checkpoint: a folder or a file (draft/eagle_checkpoints.py says which layouts are read)."""
    tree: TreeConfig | None = None
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """A draft ends where the estimated probability that all of it is accepted falls below this;
    unset, where one more token costs more than it promises (token_cost)."""
    token_cost: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Time to draft and verify one more token, in units of the fixed part of a decode step; unset, what
    the engine measures or a value for the platform."""
    vocab: Annotated[int, Field(ge=1)] | None = None
    """Use only this many of the draft vocabulary's most frequent tokens; checkpoints that do not have
    them by frequency refuse it."""
    cache_tokens: Annotated[int, Field(ge=16, le=2**31)] | None = None
    """The most tokens that the draft's K/V cache holds, over all requests; unset, max_num_seqs times
    max_model_len, but at most what 1 GiB holds."""
    aux_layers: tuple[Annotated[int, Field(ge=0, le=4096)], ...] | None = None
    """The target's layers whose input is an auxiliary state of EAGLE-3, ascending. The plugin fills it
    in from the checkpoint; to be set only where a checkpoint does not say."""

    @field_validator("aux_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and (not layers or list(layers) != sorted(set(layers))):
            raise ValueError(
                "aux_layers must be distinct layers in ascending order, such as [2, 14, 27]"
            )
        return layers
