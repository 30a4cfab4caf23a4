"""Text, hidden states, heads: the stages of `vllm-specx train`, each resumable on its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel

from vllm_specx.setup import cpu
from vllm_specx.train import hidden, run_state, shards, tether
from vllm_specx.train.errors import TrainError
from vllm_specx.train.generate import KIND as TEXT
from vllm_specx.train.generate import GenerateSettings, target_identity
from vllm_specx.train.hidden import HiddenSettings


def make_text(
    settings: GenerateSettings,
    out: Path,
    workers: int,
    *,
    states: str = "hidden",
    aux_layers: Sequence[int] = (),
) -> Path:
    """Stage 1: out/text, and in out/`states` the hidden states, as far as the engine records them.
    On a CPU, `workers` one-thread engines share the work."""
    environment: dict[str, str] = {}
    if cpu.is_cpu_vllm():
        environment, _ = cpu.environment(dict(os.environ), extra_flags=())
        if workers > 1:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    folder = out / "text"
    recorded = [str(out / states), ",".join(map(str, aux_layers))]
    if workers > 1:
        shards.remove_leftovers(out / states)
    _run("generate", settings, [str(folder)], workers, environment, recorded)
    return folder


def made_text(folder: Path, target: str) -> Path:
    """The text of another run of the target: its --out folder, or the folder of the shards.

    Raises TrainError if there is none, or if another target said it, as far as the folder tells.
    """
    text = folder / "text" if (folder / "text").is_dir() else folder
    if not shards.indices(text, TEXT):
        raise TrainError(f"--text is {folder}, but there is no training text in it.")
    noted = text / f"{TEXT}.json"
    if noted.exists():
        try:
            said_by = str(json.loads(noted.read_text())["target"])
        except (OSError, ValueError, KeyError, TypeError):
            raise TrainError(
                f"{noted} cannot be read; give the --text of another run, or none."
            ) from None
        mine = target_identity(target)
        # The folder may have another name by now; what is in it may not differ.
        if said_by.split()[-1:] != mine.split()[-1:]:
            raise TrainError(
                f"--text is {folder}, but it is what the target {said_by} said, not {mine}; take "
                "text of the same target, or leave --text out."
            )
    return text


def make_hidden(
    settings: HiddenSettings, text: Path, out: Path, workers: int, *, states: str = "hidden"
) -> Path:
    """Stage 2: out/`states`."""
    environment = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    folder = out / states
    _run("hidden", settings, [str(text), str(folder)], workers, environment)
    missing = set(shards.indices(text, TEXT)) - set(shards.indices(folder, hidden.LAST))
    if missing:
        raise TrainError(f"hidden states of {len(missing)} shards are missing in {folder}.")
    return folder


def _run(
    stage: str,
    settings: BaseModel,
    arguments: Sequence[str],
    workers: int,
    environment: Mapping[str, str],
    more: Sequence[str] = (),
) -> None:
    """Run a stage's module in `workers` processes, each with its part of the shards."""
    out = Path(arguments[-1])
    path = out.parent / f"{stage}.json"
    with shards.atomic(path) as file:
        file.write(settings.model_dump_json(indent=2).encode() + b"\n")
    module = f"vllm_specx.train.{stage}"
    if workers > 1:
        shards.remove_leftovers(out)
    with ExitStack() as stack:
        # The first worker shows its progress; what the others say is kept for an error.
        said = [
            None if part == 0 else stack.enter_context(tempfile.TemporaryFile("w+"))
            for part in range(workers)
        ]
        children: list[tether.Child] = []
        failed: int | None = None
        try:
            for part in range(workers):
                command = [sys.executable, "-m", module, str(path), *arguments]
                command += [f"{part}/{workers}", *more]
                children.append(tether.Child(command, {**os.environ, **environment}, said[part]))
            while failed is None:
                ended = [child.status() for child in children]
                failed = next((i for i, status in enumerate(ended) if status), None)
                if not any(status != 0 for status in ended):
                    return
                time.sleep(0.2)
        finally:
            for child in children:
                child.end()
        reason = "; see its message above"
        if (kept := said[failed]) is not None:
            kept.seek(0)
            lines = kept.read().strip().splitlines() or [""]
            reason = f": {lines[-1].removeprefix('vllm-specx: ')}"
        raise TrainError(f"the stage '{stage}' ended with status {ended[failed]}{reason}")


def summary(out: Path) -> str:
    """The last line for the user: where the heads are and how good they are."""
    try:
        config = json.loads((out / "heads" / "config.json").read_text())
    except OSError:
        raise TrainError(
            f"the training in {out} has ended, but {out / 'heads'} is gone; delete "
            f"{out / run_state.NAME} to train anew."
        ) from None
    training = config["specx"]["training"]
    return (
        f"{out / 'heads'}: acceptance length {training['validation_acceptance_length']} on held-out "
        f"answers, {training['tokens']} tokens, {training['epochs']} epochs, {training['seconds']} s"
    )
