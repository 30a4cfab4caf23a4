"""`vllm-specx train medusa|eagle|eagle3`: from a target to draft heads in one resumable command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from vllm_specx.config import ConfigError
from vllm_specx.models import embedded

if TYPE_CHECKING:
    from vllm_specx.train.target import TargetWeights

Settings = TypeVar("Settings", bound=BaseModel)

app = typer.Typer(help="Train draft heads for a target.", no_args_is_help=True)

Target = Annotated[str, typer.Option(help="A folder, a hub name or embedded:NAME.")]
Out = Annotated[Path, typer.Option(help="Where everything goes; the same again resumes.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL of prompts or of served requests; default: built-in templates."),
]
Tokens = Annotated[int, typer.Option(help="Tokens that the target generates.")]
Text = Annotated[
    Path | None, typer.Option(help="Take the text of another run's --out instead of generating.")
]
Exclude = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL of test prompts; text that shares a passage is left out."),
]
Depth = Annotated[int, typer.Option(help="Tokens drafted in a row.")]
Vocab = Annotated[int, typer.Option(help="Tokens of the draft vocabulary.")]
Epochs = Annotated[float, typer.Option(help="Passes over the text, at most.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate of the schedule.")]
Sequences = Annotated[int, typer.Option(help="Conversations a batch.")]
Seed = Annotated[int, typer.Option(help="Of prompts, batches and weights.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if any.")]
Workers = Annotated[
    int,
    typer.Option(
        min=0, help="Processes for the first two stages; default: 1 on a GPU, 2 on a CPU."
    ),
]


@app.callback()
def commands() -> None:
    """Train draft heads for a target."""


@app.command()
def medusa(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    tokens: Tokens = 3_000_000,
    text: Text = None,
    exclude: Exclude = None,
    conditioning: Annotated[
        str, typer.Option(help="hydra: sequential heads; none: Medusa's parallel heads.")
    ] = "hydra",
    depth: Depth = 4,
    layers: Annotated[int, typer.Option(help="Layers of a head.")] = 1,
    inner: Annotated[int | None, typer.Option(help="Width inside a sequential layer.")] = None,
    vocab: Vocab = 8192,
    epochs: Epochs = 10.0,
    learning_rate: Rate = 1e-3,
    seed: Seed = 0,
    device: Device = "",
    workers: Workers = 0,
) -> None:
    """Generate text with the target, cache its hidden states, and train heads on them."""
    from vllm_specx.train.medusa import MedusaSettings, Trainer
    from vllm_specx.train.target import load_target

    _readable(prompts, exclude)
    device = _device(device)
    settings = _settings(
        MedusaSettings,
        conditioning=conditioning, depth=depth, layers=layers, inner=inner, vocab=vocab,
        epochs=epochs, learning_rate=learning_rate, seed=seed, device=device,
    )  # fmt: skip
    model = _model(target)
    folder, hidden = _stages(model, out, prompts, tokens, text, seed, device, workers, "hidden", ())
    _train(Trainer, settings, model, load_target(model), folder, hidden, out, exclude)


@app.command()
def eagle(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    tokens: Tokens = 3_000_000,
    text: Text = None,
    exclude: Exclude = None,
    depth: Depth = 4,
    vocab: Vocab = 16384,
    epochs: Epochs = 10.0,
    learning_rate: Rate = 1e-3,
    feature_weight: Annotated[
        float, typer.Option(help="Of the distance to the target's states in the loss.")
    ] = 1.0,
    token_weight: Annotated[
        float, typer.Option(help="Of the target's distribution in the loss.")
    ] = 1.0,
    sequences: Sequences = 8,
    seed: Seed = 0,
    device: Device = "",
    workers: Workers = 0,
) -> None:
    """Train an EAGLE-1 draft: it continues the target's last hidden states."""
    _eagle(
        target, out, prompts, tokens, text, exclude, workers,
        version=1, depth=depth, vocab=vocab, epochs=epochs, learning_rate=learning_rate,
        feature_weight=feature_weight, token_weight=token_weight, sequences=sequences, seed=seed,
        device=_device(device),
    )  # fmt: skip


@app.command()
def eagle3(
    target: Target,
    out: Out,
    prompts: Prompts = None,
    tokens: Tokens = 3_000_000,
    text: Text = None,
    exclude: Exclude = None,
    aux_layers: Annotated[
        str, typer.Option(help="Layers whose input the draft reads; default: 2, half, last but 3.")
    ] = "",
    depth: Depth = 4,
    vocab: Vocab = 12288,
    train_lm_head: Annotated[
        bool, typer.Option(help="Train lm_head's rows too; else they stay the target's.")
    ] = False,
    export_lm_head: Annotated[
        bool,
        typer.Option(help="Write the target's rows too: stock vLLM needs them, this does not."),
    ] = True,
    norm_before_residual: Annotated[bool, typer.Option(help="vLLM's option of the name.")] = False,
    epochs: Epochs = 10.0,
    learning_rate: Rate = 1e-3,
    sequences: Sequences = 8,
    seed: Seed = 0,
    device: Device = "",
    workers: Workers = 0,
) -> None:
    """Train an EAGLE-3 draft: it reads three of the target's layers, and is trained on its own drafts."""
    try:
        layers = [int(layer) for layer in aux_layers.split(",") if layer]
    except ValueError:
        raise ConfigError(
            f"--aux-layers is '{aux_layers}', but it must be numbers of layers, as 2,15,27."
        ) from None
    _eagle(
        target, out, prompts, tokens, text, exclude, workers,
        version=3, aux_layers=layers, depth=depth, vocab=vocab, train_lm_head=train_lm_head,
        export_lm_head=export_lm_head, norm_before_residual=norm_before_residual, epochs=epochs,
        learning_rate=learning_rate, sequences=sequences, seed=seed, device=_device(device),
    )  # fmt: skip


def _eagle(
    target: str,
    out: Path,
    prompts: list[Path] | None,
    tokens: int,
    text: Path | None,
    exclude: list[Path] | None,
    workers: int,
    **values: Any,
) -> None:
    from vllm_specx.train import teacher
    from vllm_specx.train.eagle import EagleSettings, EagleTrainer, aux_layers_of
    from vllm_specx.train.eagle_net import layer_config
    from vllm_specx.train.progress import Progress
    from vllm_specx.train.target import load_target

    _readable(prompts, exclude)
    model = _model(target)
    layer_config(model, None)  # a target that no draft fits is refused before hours of work
    if values["version"] == 3:
        values["aux_layers"] = aux_layers_of(model, values["aux_layers"])
    settings = _settings(EagleSettings, target=model, **values)
    folder, states = _stages(
        model, out, prompts, tokens, text, settings.seed, settings.device, workers, "states",
        settings.aux_layers,
    )  # fmt: skip
    weights = load_target(model)
    with Progress("teacher", "tok") as progress:
        teacher.make(weights, folder, states, settings.device, progress.update)
    _train(EagleTrainer, settings, model, weights, folder, states, out, exclude)


def _device(asked: str) -> str:
    """The device asked for, or a GPU if there is one."""
    import torch

    if not asked:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ConfigError(
            f"--device is '{asked}', but it must be cpu, cuda or cuda:1, as PyTorch names them."
        ) from None
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(
            f"--device is '{asked}', but PyTorch sees {gpus} GPUs here; leave it out to take what "
            "there is."
        )
    return asked


def _readable(*lists: list[Path] | None) -> None:
    """Raise TrainError if a file of prompts is not one; some are read only at the end."""
    from vllm_specx.train.prompts import from_files

    for files in lists:
        if files:
            from_files(files)


def _model(target: str) -> str:
    from vllm_specx.train.target import folder_of

    return str(embedded.checkpoint(target) if embedded.is_embedded(target) else folder_of(target))


def _stages(
    model: str,
    out: Path,
    prompts: list[Path] | None,
    tokens: int,
    text: Path | None,
    seed: int,
    device: str,
    workers: int,
    states: str,
    aux_layers: tuple[int, ...],
) -> tuple[Path, Path]:
    """(text, hidden states) of the target in the folder `model`, made as far as they are not there."""
    from vllm_specx.train import disk, pipeline
    from vllm_specx.train.eagle_net import hidden_size
    from vllm_specx.train.generate import GenerateSettings
    from vllm_specx.train.hidden import HiddenSettings

    workers = workers or (min(2, os.cpu_count() or 1) if device == "cpu" else 1)
    kept = disk.Kept(1 + len(aux_layers), hidden_size(model), taught=states != "hidden")
    text_settings = _settings(
        GenerateSettings, target=model, tokens=tokens, prompts=prompts or [], seed=seed
    )
    hidden_settings = _settings(HiddenSettings, target=model, device=device, aux_layers=aux_layers)
    if text is not None:
        folder = pipeline.made_text(text, model)
        disk.require(kept, folder, out / states, None, workers)
    else:
        disk.require(kept, out / "text", out / states, text_settings, workers)
        folder = pipeline.make_text(
            text_settings, out, workers, states=states, aux_layers=aux_layers
        )
    return folder, pipeline.make_hidden(hidden_settings, folder, out, workers, states=states)


def _train(
    kind: Any,
    settings: BaseModel,
    model: str,
    weights: TargetWeights,
    text: Path,
    hidden: Path,
    out: Path,
    exclude: list[Path] | None,
) -> None:
    from vllm_specx.train import pipeline
    from vllm_specx.train.dataset import Corpus
    from vllm_specx.train.exclude import excluded
    from vllm_specx.train.plots import plot_history
    from vllm_specx.train.progress import Progress

    corpus = Corpus(text, hidden)
    trainer = kind(settings, corpus, weights, out, excluded(corpus, exclude or [], model))
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
