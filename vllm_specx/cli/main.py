"""The commands of `vllm-specx`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from vllm_specx.cli import bench as measuring
from vllm_specx.cli import doctor as doctoring
from vllm_specx.cli import plan as planning
from vllm_specx.cli import recipes as listing
from vllm_specx.cli import serve as serving
from vllm_specx.cli import simulate as simulating
from vllm_specx.cli import top as watching
from vllm_specx.cli import train
from vllm_specx.config import ConfigError

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's, wherever typer keeps it."""

app = typer.Typer(
    name="vllm-specx",
    help="Speculative decoding for stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
)

app.add_typer(train.app, name="train")
app.add_typer(measuring.app, name="bench")
app.command()(simulating.simulate)
app.command()(watching.top)
app.command()(planning.plan)
app.command()(doctoring.doctor)
app.command("recipes")(listing.show)


@app.callback()
def commands() -> None:
    """Speculative decoding for stock vLLM."""


@app.command(epilog="The environment: MODEL, HOST (127.0.0.1), PORT (8000), VLLM_SPECX_CACHE.")
def serve(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or its name in recipes/.")],
    flags: Annotated[
        list[str] | None, typer.Argument(help="After `--`: flags for vllm serve; they win.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the vllm serve command and stop.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Take the recipe's flags for so many GPUs.")
    ] = None,
) -> None:
    """Serve a recipe: become `vllm serve` with the recipe's flags."""
    command = serving.prepare(recipe, flags or [], os.environ, starting=not dry_run, gpus=gpus)
    for note in command.notes:
        print(f"vllm-specx: {note}", file=sys.stderr, flush=True)
    if dry_run:
        print(command.shell())
    else:
        command.run(os.environ)


def main(args: list[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit status."""
    try:
        return app(args, standalone_mode=False) or 0
    except ConfigError as error:
        message = str(error)
    except UsageError as error:
        message = _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    print(f"vllm-specx: {message}", file=sys.stderr)
    return 2


def _usage(error: Exception) -> str:
    message = " ".join(str(getattr(error, "message", "") or error).split()).rstrip(".")
    if not message:
        return "name a command; `vllm-specx --help` shows what there is."
    if "o such option" in message:
        return f"{message}; flags for vllm serve go after `--`."
    return f"{message}; `vllm-specx --help` shows what there is."
