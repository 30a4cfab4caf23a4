"""What a recipe says: a model, vLLM's flags for it, and how to speculate."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_specx.engine.translate import MAX_SPECULATIVE_TOKENS, PREFIX
from vllm_specx.recipes import flags

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
TENSOR_PARALLEL = "tensor-parallel-size"
RENAMED = {
    "speculative": "speculation",
    "speculative_config": "speculation",
    "vllm": "serve",
    "served_model_name": "serve.served-model-name",
}
"""Names that other formats, and earlier ones of this, have for the same."""

Text = Annotated[str, Field(min_length=1)]
Flag = str | int | float | bool | list[Any] | dict[str, Any] | None
Scenario = Literal["code", "tool_calling", "reasoning", "creative", "mixed"]


class Part(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculation(BaseModel):
    """`--speculative-config`: the keys below, and any other of vLLM's method or of ours."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: Text = Field(
        description="specx:ngram, specx:draft_model, specx:eagle, specx:medusa, specx:auto, or one of "
        "vLLM's own, such as draft_model, eagle3 or ngram."
    )
    model: Text | None = Field(
        default=None,
        description="The draft: a hub name, or a folder, absolute or relative to the recipe.",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None = Field(
        default=None, strict=True, description="K: the most tokens that are drafted in a step."
    )
    draft_tensor_parallel_size: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        strict=True,
        description="Ranks that share the draft. Drafts of specx: are whole on every rank: 1.",
    )

    @property
    def is_ours(self) -> bool:
        """Whether a proposer of this package drafts."""
        return self.method.startswith(PREFIX)

    def flag(self, controller: dict[str, Any] | str | None = None) -> dict[str, Any]:
        """The mapping for `--speculative-config`; controller: as in Recipe."""
        keys = self.model_dump(exclude_none=True)
        if self.is_ours:
            # Whole on every rank: vLLM is not told.
            keys.pop("draft_tensor_parallel_size", None)
        if controller is None:
            return keys
        if self.is_ours:
            return {**keys, "controller": controller}
        own = keys.get("specx")
        return {
            **keys,
            "specx": {**(own if isinstance(own, dict) else {}), "controller": controller},
        }

    @model_validator(mode="after")
    def _whole(self) -> Speculation:
        if self.is_ours and self.draft_tensor_parallel_size not in (None, 1):
            raise ValueError(
                f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}, but drafts of "
                f"{self.method} are whole on every rank; write 1 or leave it out"
            )
        return self


class Hardware(Part):
    """Where the recipe has run, and where it has not yet."""

    tested_on: list[Text] = Field(default=[], description="Machines that it was run on.")
    planned_for: list[Text] = Field(
        default=[], description="Machines that it is written for and was not run on yet."
    )


class Recipe(Part):
    """A pairing of a model, a way to speculate and vLLM's flags, for `vllm-specx serve`."""

    name: Text = Field(default="recipe", description="Default: the file's name.")
    description: str = Field(default="", description="What it is, in a sentence or two.")
    extends: Text | None = Field(
        default=None,
        description="Another recipe, relative to this one. Mappings are merged (null takes a key out), "
        "all else replaces; a speculation that names its method replaces the whole one.",
    )
    model: Text | None = Field(
        default=None,
        description="A hub name, a folder, or embedded:NAME; the variable MODEL overrides it.",
    )
    serve: dict[str, Flag] = Field(
        default={},
        description="Flags of vllm serve without their dashes: true and false switch, a mapping becomes "
        "JSON, null leaves the flag out.",
    )
    gpus: dict[Annotated[int, Field(ge=1, le=1024)], dict[str, Flag]] = Field(
        default={},
        description="By number of GPUs, flags in place of those in serve: vllm-specx serve --gpus N.",
    )
    speculation: Speculation | None = Field(
        description="How to draft; null serves without speculation."
    )
    controller: dict[str, Any] | Literal["on", "off"] | None = Field(
        default=None,
        description="How the draft length follows acceptance and load; off: it does not.",
    )
    scenario: Scenario | None = Field(
        default=None, description="The work it is for, which vllm-specx plan takes acceptance from."
    )
    hardware: Hardware = Hardware()
    notes: list[Text] = Field(default=[], description="What to know before it is used.")
    env: dict[Annotated[str, Field(pattern=ENV_NAME)], str | int] = Field(
        default={}, description="Environment variables, for those that are not set."
    )

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks of the target."""
        value = self.serve.get(TENSOR_PARALLEL)
        return value if isinstance(value, int) else 1

    def on_gpus(self, count: int) -> Recipe:
        """The recipe with its flags for so many GPUs. Raises ValueError where it has none."""
        known = {self.tensor_parallel_size, *self.gpus}
        if count not in known:
            listed = ", ".join(map(str, sorted(known)))
            raise ValueError(
                f"recipe '{self.name}' has settings for {listed} GPUs, not for {count}; add "
                f"'gpus.{count}' to it, or give flags after `--`"
            )
        return self.with_flags(self.gpus.get(count, {}))

    def with_flags(self, changes: dict[str, Flag]) -> Recipe:
        """The recipe with other flags of vllm serve."""
        return self.model_copy(update={"serve": {**self.serve, **changes}})

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for old in RENAMED.keys() & data.keys():
            raise ValueError(f"'{old}' is written as '{RENAMED[old]}' in a recipe")
        read = dict(data)
        if isinstance(data.get("controller"), bool):
            # YAML takes on and off for true and false.
            read["controller"] = "on" if data["controller"] else "off"
        if "serve" in data:
            read["serve"] = _named(data["serve"], "serve")
        if isinstance(gpus := data.get("gpus"), dict):
            read["gpus"] = {count: _named(given, f"gpus.{count}") for count, given in gpus.items()}
        return read

    @model_validator(mode="after")
    def _known_to_vllm(self) -> Recipe:
        if self.speculation is None or self.speculation.is_ours:
            return self  # the method's own configuration judges ours
        keys = self.speculation.model_dump(exclude_unset=True)
        if said := flags.speculation_problem(self.speculation.method, keys):
            raise ValueError(said)
        return self

    @model_validator(mode="after")
    def _one_controller(self) -> Recipe:
        if self.controller is None:
            return self
        if self.speculation is None:
            raise ValueError("controller has nothing to steer where speculation is null; drop one")
        own = self.speculation.flag()
        if "controller" in own or (
            isinstance(own.get("specx"), dict) and "controller" in own["specx"]
        ):
            raise ValueError("controller is given twice, here and in speculation; keep one")
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Recipe:
        for count, given in self.gpus.items():
            ranks = {**self.serve, **given}.get(TENSOR_PARALLEL, 1)
            pipeline = {**self.serve, **given}.get("pipeline-parallel-size", 1)
            if isinstance(ranks, int) and isinstance(pipeline, int) and ranks * pipeline > count:
                raise ValueError(
                    f"gpus.{count} asks for {ranks * pipeline} ranks, more than {count} GPUs; correct "
                    f"its {TENSOR_PARALLEL}"
                )
        return self


def _named(given: Any, where: str) -> Any:
    """Flags under the names that vLLM's help has."""
    if not isinstance(given, dict):
        return given
    named: dict[str, Any] = {}
    for written, value in given.items():
        name = re.sub(r"^-+", "", str(written)).replace("_", "-")
        if name in named:
            raise ValueError(f"'{where}.{name}' is given twice; keep one")
        if said := flags.problem(name, value):
            raise ValueError(f"'{where}.{written}' {said}")
        named[name] = value
    return named
