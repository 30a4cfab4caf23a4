"""Scenario files: what is compared, on which prompts, how often."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.lib.errors import BenchError
from vllm_specx.config import nearest

BENCHMARKS = Path(__file__).parents[1]
WARMUP = BENCHMARKS / "prompts" / "warmup.jsonl"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(_Strict):
    """Passed to vLLM's SamplingParams; `seed` None keeps the engine's own random numbers."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1)] = 128
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    seed: int | None = None


class Group(_Strict):
    """Prompts that are reported together."""

    name: str
    prompts: str
    """A .jsonl file, relative to the scenario, the working directory, or benchmarks/."""
    tasks: tuple[str, ...] = ()
    """Only these tasks (MT-bench: categories) of the file."""
    count: Annotated[int, Field(ge=1)] | None = None
    """Prompts a round; default all lines of the file once."""
    sampling: dict[str, Any] = {}
    """Keys of `sampling` that differ in this group."""
    seen_again: bool = True
    """Whether each round shows the same prompts a second time."""
    task_sampling: dict[str, dict[str, Any]] = {}
    """Keys of `sampling` that differ for the prompts of a task."""
    profile: tuple[tuple[int, int], ...] = ()
    """(requests at a time, requests) one after the other, in place of batches of one size."""

    @property
    def levels(self) -> list[int] | None:
        """For each request of the profile, how many may run with it; None without a profile."""
        found = [level for level, count in self.profile for _ in range(count)]
        return found or None


class Slo(_Strict):
    """What a request must keep to count as good; None: anything."""

    ttft_ms: Annotated[float, Field(gt=0.0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0.0)] | None = None


class Configuration(_Strict):
    """One engine; `model` among its engine_args serves another target than the scenario's."""

    name: str
    speculative_config: dict[str, Any] | None = None
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}


class Scenario(_Strict):
    """A whole comparison; `engine_args` and `env` hold for every configuration."""

    name: str
    model: str
    mode: Literal["engine", "server"] = "engine"
    rounds: Annotated[int, Field(ge=1)] = 3
    seed: int = 1
    baseline: str
    compare_tokens: bool = False
    """Compare token ids with the baseline's: meaningful at temperature 0 in float32."""
    restart_each_round: bool = False
    """New engines in every round: nothing at all is remembered from one round to the next."""
    slo: Slo = Slo()
    """For goodput: the requests a second that keep it."""
    trace: bool = False
    """Keep what the controller of our methods says of each step: step times, and the K chosen."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    sampling: Sampling = Sampling()
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]
    configurations: Annotated[tuple[Configuration, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names(self) -> Scenario:
        for what, names in (
            ("configurations", [each.name for each in self.configurations]),
            ("groups", [each.name for each in self.groups]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{what}: the name '{min(twice)}' is used twice")
        known = [each.name for each in self.configurations]
        if self.baseline not in known:
            raise ValueError(
                f"baseline '{self.baseline}' is no configuration; {nearest(self.baseline, known)}"
            )
        for group in self.groups:
            keys = set(group.sampling).union(*group.task_sampling.values())
            unknown = keys - set(Sampling.model_fields)
            if unknown:
                key = min(unknown)
                raise ValueError(
                    f"group '{group.name}': unknown sampling key '{key}'; "
                    f"{nearest(key, list(Sampling.model_fields))}"
                )
            self.sampling_of(group)
        return self

    def sampling_of(self, group: Group, task: str = "") -> Sampling:
        """Of a prompt of `task`."""
        own = {**group.sampling, **group.task_sampling.get(task, {})}
        return Sampling.model_validate({**self.sampling.model_dump(), **own})

    def select(self, only: Sequence[str], rounds: int | None) -> Scenario:
        """The same scenario with fewer configurations or another number of rounds."""
        data = self.model_dump()
        if rounds is not None:
            data["rounds"] = rounds
        if only:
            known = [each.name for each in self.configurations]
            for name in only:
                if name not in known:
                    raise BenchError(f"there is no configuration '{name}'; {nearest(name, known)}.")
            data["configurations"] = [c for c in data["configurations"] if c["name"] in only]
            if self.baseline not in only:
                data["baseline"] = data["configurations"][0]["name"]
        return validated(data, "the selection")

    def described(self) -> dict[str, Any]:
        """For results: without this machine's folders, of an absolute path its last part."""
        data = self.model_dump(mode="json")
        for group in data["groups"]:
            path = Path(group["prompts"])
            group["prompts"] = path.name if path.is_absolute() else group["prompts"]
        return data

    def fingerprint(self) -> str:
        """Equal for runs whose partial results may be continued: all but the number of rounds."""
        data = self.model_dump(mode="json", exclude={"rounds", "slo"})
        if not self.trace:
            del data["trace"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def validated(data: Any, source: str) -> Scenario:
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            models: dict[str, type[BaseModel]] = {
                "groups": Group,
                "configurations": Configuration,
                "sampling": Sampling,
            }
            owner = (
                models.get(str(first["loc"][0]), Scenario) if len(first["loc"]) > 1 else Scenario
            )
            hint = nearest(str(first["loc"][-1]), list(owner.model_fields))
            raise BenchError(f"{source}: unknown key '{path}'; {hint}.") from None
        where = f"'{path}': " if path else ""
        raise BenchError(f"{source}: {where}{message[:1].lower()}{message[1:]}.") from None


def load_scenario(path: Path, datasets: Sequence[str] = ()) -> Scenario:
    """Read a scenario file.

    datasets: prompt files that take the place of the groups' own, one group each, as `PATH` or
    `NAME=PATH`. Raises BenchError: one sentence with the key and the fix.
    """
    if not path.is_file():
        known = sorted(each.name for each in (BENCHMARKS / "scenarios").glob("*.yaml"))
        raise BenchError(f"there is no scenario {path}; {nearest(path.name, known)}.")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise BenchError(f"{path} is not YAML ({problem}); mend it.") from None
    if not isinstance(data, dict):
        raise BenchError(f"{path} must hold a mapping of keys, such as name, model and groups.")
    if datasets:
        first = (data.get("groups") or [{}])[0]
        kept = {key: first[key] for key in ("count", "sampling", "seen_again") if key in first}
        data["groups"] = []
        for dataset in datasets:
            name, _, file = dataset.rpartition("=")
            data["groups"].append(
                {**kept, "name": name or Path(file).stem, "prompts": str(Path(file).absolute())}
            )
    for group in data.get("groups") or []:
        if isinstance(group, dict) and isinstance(group.get("prompts"), str):
            group["prompts"] = _find(group["prompts"], path)
    return validated(data, str(path))


def _find(prompts: str, scenario: Path) -> str:
    """The prompt file, relative to benchmarks/ where it lies there: paths are part of results."""
    for folder in (scenario.parent, scenario.parent.parent, Path(), BENCHMARKS):
        file = (folder / prompts).resolve()
        if file.is_file():
            return (
                str(file.relative_to(BENCHMARKS)) if file.is_relative_to(BENCHMARKS) else str(file)
            )
    raise BenchError(f"{scenario}: there is no prompt file '{prompts}'; name one that exists.")


def prompt_file(group: Group) -> Path:
    """Where the group's prompts lie."""
    return BENCHMARKS / group.prompts
