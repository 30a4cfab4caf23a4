"""`vllm-specx train medusa`: from a target to draft heads in one resumable command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from vllm_specx.config import ConfigError
from vllm_specx.models import embedded

Settings = TypeVar("Settings", bound=BaseModel)

app = typer.Typer(help="Train draft heads for a target.", no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Train draft heads for a target."""


@app.command()
def medusa(
    target: Annotated[str, typer.Option(help="A folder, a hub name or embedded:NAME.")],
    out: Annotated[Path, typer.Option(help="Where everything goes; the same again resumes.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of prompts or of served requests; default: built-in templates."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens that the target generates.")] = 3_000_000,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of test prompts; text that shares a passage is left out."),
    ] = None,
    conditioning: Annotated[
        str, typer.Option(help="hydra: sequential heads; none: Medusa's parallel heads.")
    ] = "hydra",
    depth: Annotated[int, typer.Option(help="Tokens that the heads can draft.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers of a head.")] = 1,
    inner: Annotated[int | None, typer.Option(help="Width inside a sequential layer.")] = None,
    vocab: Annotated[int, typer.Option(help="Tokens of the draft vocabulary.")] = 8192,
    epochs: Annotated[float, typer.Option(help="Passes over the text, at most.")] = 10.0,
    learning_rate: Annotated[float, typer.Option(help="The highest one of the schedule.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of prompts, batches and weights.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if any.")] = "",
    workers: Annotated[
        int,
        typer.Option(help="Processes for the first two stages; default: one a GPU, 2 on a CPU."),
    ] = 0,
) -> None:
    """Generate text with the target, cache its hidden states, and train heads on them."""
    import torch

    from vllm_specx.train import pipeline
    from vllm_specx.train.dataset import Corpus
    from vllm_specx.train.generate import GenerateSettings
    from vllm_specx.train.hidden import HiddenSettings
    from vllm_specx.train.medusa import MedusaSettings, Trainer
    from vllm_specx.train.plots import plot_history
    from vllm_specx.train.progress import Progress
    from vllm_specx.train.target import folder_of, load_target

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    workers = workers or (min(2, os.cpu_count() or 1) if device == "cpu" else 1)
    model = embedded.checkpoint(target) if embedded.is_embedded(target) else folder_of(target)
    text_settings = _settings(
        GenerateSettings, target=str(model), tokens=tokens, prompts=prompts or [], seed=seed
    )
    hidden_settings = _settings(HiddenSettings, target=str(model), device=device)
    settings = _settings(
        MedusaSettings,
        conditioning=conditioning, depth=depth, layers=layers, inner=inner, vocab=vocab,
        epochs=epochs, learning_rate=learning_rate, seed=seed, device=device,
    )  # fmt: skip
    weights = load_target(str(model))
    text = pipeline.make_text(text_settings, out, workers)
    hidden = pipeline.make_hidden(hidden_settings, text, out, workers)
    corpus = Corpus(text, hidden)
    left_out = pipeline.excluded(corpus, exclude or [], str(model))
    trainer = Trainer(settings, corpus, weights, out, left_out)
    with Progress("heads", "steps") as progress:
        trainer.train(progress.update)
    try:
        plot_history(trainer.history, out / "curves.png")
    except ConfigError as error:
        print(f"vllm-specx: no curves: {error}", file=sys.stderr)
    print(f"vllm-specx: {pipeline.summary(out)}", file=sys.stderr)


def _settings(kind: type[Settings], **values: object) -> Settings:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise ConfigError(f"--{name} is {first['input']!r}, but: {said}.") from None
