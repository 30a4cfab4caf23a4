"""Keys of `specx.controller`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ControllerConfig(BaseModel):
    """How K, the number of draft tokens of a request and step, is chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    static_k: Annotated[int, Field(ge=0, le=128)] | None = None
    """One K for everything, chosen by hand; nothing is estimated."""
    k_min: Annotated[int, Field(ge=0, le=128)] = 0
    """Never draft less than this, except for requests that opt out."""
    k_max: Annotated[int, Field(ge=0, le=128)] | None = None
    """Never draft more; unset, num_speculative_tokens."""
    per_request: Literal["auto", "always", "never"] = "auto"
    """Whether requests of one batch may have different K; auto compares the two prices."""
    probe_share: Annotated[float, Field(ge=0.0, le=0.1)] = 0.01
    """Share of decoding time that may be spent on trying a K that does not look best."""
    hysteresis: Annotated[float, Field(ge=0.0, le=0.5)] = 0.02
    """Predicted gain, relative, from which K is changed again; less is enough after a rest."""
    changes_per_100_steps: Annotated[float, Field(gt=0.0, le=100.0)] = 5.0
    """Most changes of K in 100 steps of a steady batch."""
    trace: str | None = None
    """A file for one JSON line a step."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> ControllerConfig:
        if self.k_max is not None and self.k_min > self.k_max:
            raise ValueError(f"k_min ({self.k_min}) is above k_max ({self.k_max}); swap them")
        if self.static_k is not None:
            given = self.model_fields_set & {"k_min", "k_max", "per_request", "probe_share"}
            if given:
                raise ValueError(
                    f"static_k leaves nothing to choose, so drop it or {' and '.join(sorted(given))}"
                )
        return self
