"""Loss and acceptance over training, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specx.train import shards
from vllm_specx.train.errors import TrainError


def plot_history(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG with the loss, and acceptance by depth and acceptance length on held-out text.

    Raises TrainError when matplotlib is missing or nothing has been measured yet.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TrainError("the plots need matplotlib; pip install matplotlib.") from None
    if not history:
        raise TrainError("there is nothing to plot before the first validation.")
    epochs = [entry["epoch"] for entry in history]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, depths, length = figure.subplots(1, 3)
    loss.plot(epochs, [entry["loss"] for entry in history])
    loss.set(title="training loss", xlabel="epoch")
    for depth in range(len(history[0]["by_depth"])):
        line = [entry["by_depth"][depth] for entry in history]
        depths.plot(epochs, line, label=f"depth {depth + 1}")
    depths.set(title="share of drafts right up to depth", xlabel="epoch", ylim=(0, None))
    depths.legend()
    length.plot(epochs, [entry["length"] for entry in history])
    length.set(title="acceptance length, greedy, held out", xlabel="epoch")
    with shards.atomic(path) as file:
        figure.savefig(file, format="png", dpi=120)
