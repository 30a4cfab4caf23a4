"""What the configurations of all proposers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from vllm_specx.control.settings import ControllerConfig


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProposerConfig(Strict):
    """Keys of every proposer."""

    controller: ControllerConfig = ControllerConfig()
    """How the draft length follows acceptance and load; `off` keeps it as configured."""
    runner: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner; `auto`: V2 where vLLM would take it and has all that is asked for, else V1."""

    @model_validator(mode="before")
    @classmethod
    def _switches(cls, data: Any) -> Any:
        """on, off, true and false for the keys that are mappings with a key `enabled`."""
        if not isinstance(data, Mapping):
            return data
        switched = dict(data)
        for key in ("controller", "pool"):
            switch = data.get(key)
            if isinstance(switch, bool | str):
                if switch not in (True, False, "on", "off"):
                    raise ValueError(f"{key} must be 'on', 'off' or a mapping of its keys")
                switched[key] = {"enabled": switch in (True, "on")}
        return switched
