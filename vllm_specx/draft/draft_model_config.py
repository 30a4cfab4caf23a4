"""Keys of `specx:draft_model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_specx.config_base import ProposerConfig


class DraftModelConfig(ProposerConfig):
    """A small language model of the target's vocabulary, whole on every rank."""

    proposer: Literal["draft_model"] = "draft_model"
    draft: Annotated[str, Field(min_length=1)]
    """The model: a folder or a hub name (draft/draft_model_checkpoint.py says which are read)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of its weights and its cache; auto: the target's."""
    max_model_len: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Longer requests are not drafted for; unset, the draft's max_position_embeddings."""
    probabilistic: bool = False
    """Whether drafts of requests that sample (temperature above 0) are drawn from what the draft thinks of
    all tokens (draft/sampling.py); off, they are the tokens that it thinks likeliest."""
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """As in EagleConfig, as is token_cost."""
    token_cost: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    cache_tokens: Annotated[int, Field(ge=16, le=2**31)] | None = None
    """The most tokens that the draft's K/V cache holds, over all requests; unset, max_num_seqs times the
    longest request that is drafted for, but at most what 2 GiB hold."""
    read_tokens: Annotated[int, Field(ge=16, le=2**20)] = 512
    """The most tokens of prompts that the draft reads in a step beside those that are being decoded, or as
    many as the target reads in it, if these are more; a request is drafted for once its prompt is read."""
