"""The file that an interrupted training run goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from vllm_specx.train import shards
from vllm_specx.train.errors import TrainError

NAME = "state.pt"


def write(path: Path, settings: BaseModel, state: Mapping[str, Any]) -> None:
    """Replace the file whole or not at all. Raises TrainError if the disk is full."""
    with shards.atomic(path) as file:
        torch.save({"settings": settings.model_dump_json(), **state}, file)


def read(path: Path, device: torch.device, settings: BaseModel, free: Set[str]) -> dict[str, Any]:
    """What was written, or {} if nothing was.

    free: settings that may differ from those of the file.
    Raises TrainError if the file is damaged or belongs to a run with other settings.
    """
    if not path.exists():
        return {}
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        before = state["settings"]
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise TrainError(
            f"{path} cannot be read ({reason}); delete it to train from the start."
        ) from None
    try:
        written = type(settings).model_validate_json(before).model_dump(exclude=set(free))
    except ValidationError:
        raise TrainError(f"{path} is of heads of another kind; use another --out.") from None
    for name, value in settings.model_dump(exclude=set(free)).items():
        if written[name] != value:
            raise TrainError(
                f"{path} is of a run with other settings ({name.replace('_', '-')} was "
                f"{written[name]!r}, not {value!r}); use the same ones or another --out."
            )
    return state
