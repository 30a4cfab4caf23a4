"""The file that an interrupted training run goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

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
        written = type(settings).model_validate_json(state["settings"])
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise TrainError(
            f"{path} cannot be read ({reason}); delete it to train from the start."
        ) from None
    if written.model_dump(exclude=set(free)) != settings.model_dump(exclude=set(free)):
        raise TrainError(
            f"{path} is of a run with other settings; use the same ones or another --out."
        )
    return state
