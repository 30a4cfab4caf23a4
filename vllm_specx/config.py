"""The typed form of `additional_config["specx"]`; every error names the key, the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from vllm_specx.config_base import ProposerConfig, Strict
from vllm_specx.draft.draft_model_config import DraftModelConfig as DraftModelConfig
from vllm_specx.draft.eagle_config import EagleConfig as EagleConfig
from vllm_specx.draft.lookahead_config import LookaheadConfig
from vllm_specx.draft.medusa_config import MedusaConfig as MedusaConfig
from vllm_specx.draft.tree_config import TreeConfig


class ConfigError(ValueError):
    """A configuration that cannot work; the message is one sentence that says what to change."""


class PoolConfig(Strict):
    """The memory that requests share: what finished requests generated."""

    enabled: bool = True
    max_tokens: Annotated[int, Field(ge=1024, le=2**28)] = 1_000_000
    """Tokens kept over all pools; the least recently used are forgotten first."""


class NgramConfig(ProposerConfig):
    """Keys of `specx:ngram`, the training-free lookahead."""

    proposer: Literal["ngram"] = "ngram"
    min_match: Annotated[int, Field(ge=1, le=64)] = 1
    """The shortest context, in tokens, whose continuation is drafted."""
    max_match: Annotated[int, Field(ge=1, le=64)] = 64
    """Longer matches count as this long."""
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Drafting stops where the estimated probability that the target still agrees falls below this;
    unset, drafts are as long as makes the most accepted tokens per unit of time (token_cost)."""
    token_cost: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Time to verify one more token, in units of the fixed part of a decode step; unset, what the
    engine measures, and before that 0.06 on a CPU and 0.01 on a GPU."""
    pool: PoolConfig = PoolConfig()
    tree: TreeConfig | None = None
    lookahead: LookaheadConfig | None = None
    """Lookahead decoding, off unless it is asked for: `on`, or a mapping."""

    @field_validator("lookahead", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """on, off, true and false, as those of mappings with a key `enabled`."""
        if isinstance(value, bool | str):
            if value not in (True, False, "on", "off"):
                raise ValueError("lookahead must be 'on', 'off' or a mapping of its keys")
            return {} if value in (True, "on") else None
        return value

    @model_validator(mode="after")
    def _fits(self) -> NgramConfig:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}")
        if self.lookahead is not None and self.tree is None:
            raise ValueError("lookahead needs draft trees; add 'tree': {}")
        return self


class AutoConfig(ProposerConfig):
    """Keys of `specx:auto`: n-gram lookahead and a trained draft, whichever promises more."""

    proposer: Literal["auto"] = "auto"
    heads: Annotated[str, Field(min_length=1)]
    """The trained draft's checkpoint: Medusa heads, an EAGLE draft or a draft model, as it says itself."""
    depth: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens that the trained draft is asked for at most."""
    vocab: Annotated[int, Field(ge=1)] | None = None
    """As in MedusaConfig and EagleConfig."""
    cache_tokens: Annotated[int, Field(ge=16, le=2**31)] | None = None
    """As in EagleConfig."""
    aux_layers: tuple[int, ...] | None = None
    """As in EagleConfig."""
    min_match: Annotated[int, Field(ge=1, le=64)] = 1
    """As in NgramConfig, as are max_match and pool."""
    max_match: Annotated[int, Field(ge=1, le=64)] = 64
    pool: PoolConfig = PoolConfig()
    tree: TreeConfig | None = None

    def ngram(self) -> NgramConfig:
        """Of the n-gram lookahead. Raises ValueError if its keys do not go together."""
        return NgramConfig(
            min_match=self.min_match, max_match=self.max_match, pool=self.pool, tree=self.tree
        )

    def medusa(self) -> MedusaConfig:
        """Of the trained draft, if it is heads."""
        return MedusaConfig(heads=self.heads, vocab=self.vocab, tree=self.tree)

    def eagle(self) -> EagleConfig:
        """Of the trained draft, if it is an EAGLE draft."""
        kept = {"heads", "vocab", "cache_tokens", "aux_layers", "tree"}
        return EagleConfig(**self.model_dump(include=kept))

    def draft_model(self) -> DraftModelConfig:
        """Of the trained draft, if it is a language model."""
        return DraftModelConfig(draft=self.heads, cache_tokens=self.cache_tokens)

    @model_validator(mode="after")
    def _parts(self) -> AutoConfig:
        self.ngram()
        self.eagle()
        return self


class StockConfig(ProposerConfig):
    """specx beside one of vLLM's own methods."""

    proposer: Literal["stock"] = "stock"


SpecxConfig = NgramConfig | MedusaConfig | EagleConfig | DraftModelConfig | AutoConfig | StockConfig
PROPOSERS: dict[str, type[SpecxConfig]] = {
    "ngram": NgramConfig,
    "medusa": MedusaConfig,
    "eagle": EagleConfig,
    "draft_model": DraftModelConfig,
    "auto": AutoConfig,
    "stock": StockConfig,
}
ALIASES = {"eagle3": "eagle"}
"""Other names of proposers; whether a draft is EAGLE or EAGLE-3, its checkpoint says."""
DEFAULT_NUM_SPECULATIVE_TOKENS = {
    "ngram": 32,
    "medusa": 4,
    "eagle": 4,
    "draft_model": 5,
    "auto": 32,
}


def drafts_by_goodput(settings: SpecxConfig) -> bool:
    """Whether drafts follow what they cost and promise, and no threshold that is configured."""
    own = (getattr(settings, key, None) for key in ("min_probability", "token_cost"))
    return all(value is None for value in own)


def tree_of(settings: SpecxConfig) -> TreeConfig | None:
    """How large draft trees may be; None: drafts are chains."""
    return getattr(settings, "tree", None)


def window_rows(settings: SpecxConfig) -> int:
    """Rows of the target's forward beside a draft tree: those of a window of lookahead decoding."""
    lookahead: LookaheadConfig | None = getattr(settings, "lookahead", None)
    return 0 if lookahead is None else lookahead.rows


def nearest(word: str, known: list[str]) -> str:
    """A hint for a misspelt word: `; did you mean 'pool'?`, or what is known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


def proposer_config(name: str) -> type[SpecxConfig]:
    """The configuration class of a proposer by its name after `specx:`."""
    name = ALIASES.get(name, name)
    if name in PROPOSERS:
        return PROPOSERS[name]
    usable = sorted(set(PROPOSERS) - {"stock"})
    raise ConfigError(
        f"unknown method 'specx:{name}'; {nearest('specx:' + name, ['specx:' + n for n in usable])}"
    )


def parse(raw: Mapping[str, Any]) -> SpecxConfig:
    """Validate the mapping under `additional_config["specx"]`.

    Raises ConfigError: one sentence with the key, the value and the fix.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"specx must be a mapping of keys, not {raw!r}.")
    name = str(raw.get("proposer", "ngram"))
    model = proposer_config(name)
    try:
        return model.model_validate({**raw, "proposer": ALIASES.get(name, name)})
    except ValidationError as error:
        raise ConfigError(_sentence(error, model)) from None


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "specx"
    if first["type"] == "extra_forbidden":
        owner: type[BaseModel] = model
        for part in first["loc"][:-1]:
            owner = _mapping_of(owner.model_fields[str(part)].annotation)
        return f"unknown key '{path}' in specx; {nearest(str(first['loc'][-1]), list(owner.model_fields))}"
    if first["type"] == "missing":
        also = ", or 'model' beside the method" if path in ("heads", "draft") else ""
        return f"'{path}' in specx is missing; add it{also}."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not first["loc"]:
        return f"specx: {message}."
    return f"'{path}' in specx is {first['input']!r}, but: {message[:1].lower()}{message[1:]}."


def _mapping_of(annotation: Any) -> type[BaseModel]:
    """The model of a key that is a mapping, or may be."""
    kinds = [annotation, *get_args(annotation)]
    found = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return found
