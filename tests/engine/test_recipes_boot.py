"""Every recipe boots: its own flags through vLLM's parser and engine on the CPU, with tiny twins of its
models (tests/support/recipe_twins.py), say at T=0 what the target says without speculation."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import recipe_twins as twins
from tests.support.engine import Engine, grown, ids
from vllm_specx import recipes
from vllm_specx.cli import flags
from vllm_specx.cli.serve import prepare
from vllm_specx.models import embedded

pytestmark = pytest.mark.engine

ON_THE_CPU: dict[str, tuple[str | bool | None, str]] = {
    "quantization": (None, "FP8 wants a GPU"),
    "gpu-memory-utilization": (None, "the twins' cache has a size in bytes"),
    "dtype": ("float32", "tokens are compared"),
    "max-model-len": ("256", "twins on a small machine"),
    "enforce-eager": (True, "compiling takes minutes"),
    "skip-tokenizer-init": (True, "the twins' tokens are numbers"),
}
"""Flags of the recipes that the CPU run leaves out or has otherwise, and why; the parser reads all."""
OF_THE_SERVER = ("host", "port", "served-model-name")
ASKED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "detokenize": False}
FAST = "llama-3-8b-eagle"


@functools.cache
def loaded(name: str) -> recipes.Recipe:
    return recipes.load(recipes.find(name))


NAMES = [name for name in recipes.names() if name != "ngram-any"]
GPUS = [
    (name, n)
    for name in NAMES
    for n in sorted({loaded(name).tensor_parallel_size, *loaded(name).gpus})
]
BOOTS = [(name, 1) for name in NAMES] + [
    (name, 2) for name in NAMES if any(n > 1 for other, n in GPUS if other == name)
]
"""On one rank, and on two where the recipe is for several."""


def rendered(name: str, gpus: int, *extra: str) -> list[str]:
    """Arguments after `vllm serve`."""
    model = {"MODEL": "org/any"} if name == "ngram-any" else {}
    return prepare(name, extra, model, starting=False, gpus=gpus).argv[2:]


@functools.cache
def parser() -> Any:
    from vllm_specx.engine.serve_flags import parser

    return parser()


def parsed(argv: list[str]) -> dict[str, Any]:
    """What vLLM's own parser and `EngineArgs` make of a command line."""
    from vllm import EngineArgs

    args = parser().parse_args(argv)
    args.model = args.model_tag or args.model
    return vars(EngineArgs.from_cli_args(args))


def engine_arguments(argv: list[str]) -> dict[str, Any]:
    """The same without vLLM's defaults."""
    defaults = parsed([])
    return {name: value for name, value in parsed(argv).items() if value != defaults[name]}


@pytest.mark.parametrize(("name", "gpus"), [*GPUS, ("ngram-any", 1)])
def test_vllms_parser_reads_it(name: str, gpus: int) -> None:
    recipe = recipes.load(recipes.find(name)).on_gpus(gpus)
    extra = []
    if recipe.speculation and str(recipe.speculation.model).startswith("heads/"):
        extra = ["--speculative-config.model", "org/heads"]  # some are trained by the user
    read = parsed(rendered(name, gpus, *extra))
    assert read["tensor_parallel_size"] == recipe.tensor_parallel_size <= gpus
    for flag, value in recipe.serve.items():
        if flag not in OF_THE_SERVER and flag != "tensor-parallel-size":
            assert read[flag.replace("-", "_")] == value
    if recipe.speculation is not None:
        assert read["speculative_config"]["method"] == recipe.speculation.method


@pytest.mark.parametrize(("name", "gpus"), GPUS)
def test_heads_divide_by_the_ranks(name: str, gpus: int) -> None:
    recipe = loaded(name).on_gpus(gpus)
    shared = [recipe.model]
    if recipe.speculation and not recipe.speculation.is_ours:
        shared.append(recipe.speculation.model)
    for model in shared:
        config = twins.described(str(model))["config"]
        groups = config["num_key_value_heads"]
        assert config["num_attention_heads"] % recipe.tensor_parallel_size == 0
        assert groups % gpus == 0 or gpus % groups == 0


class Twins:
    """Checkpoints by hub name, and what the targets say without speculation; made when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = functools.cache(self._target)
        self._made = functools.cache(self._draft)
        self.says = functools.cache(self._says)
        self.booted: dict[str, Booted] = {}

    def _target(self, name: str) -> str:
        if embedded.is_embedded(name):
            return str(embedded.checkpoint(name))
        return twins.model_twin(self.folder / "targets" / name, name)

    def draft(self, method: str, name: str, of: str) -> str | None:
        """None: the recipe's own is there."""
        if embedded.is_embedded(of):
            return None
        kinds = [kind for kind in ("draft_model", "medusa") if kind in method]
        return self._made(*(kinds or ["eagle"]), name, of)

    def _draft(self, kind: str, name: str, of: str) -> str:
        folder = self.folder / "drafts" / of / name
        if kind == "draft_model":
            return twins.model_twin(folder, name, often_wrong=True)
        if kind == "medusa":
            return twins.medusa_twin(folder, self.target(of))
        return twins.eagle_twin(folder, name, self.target(of))

    def _says(self, target: str) -> list[list[int]]:
        """By the recipe that has no speculation, on one rank."""
        plain = next(
            recipe
            for recipe in map(loaded, NAMES)
            if recipe.model == target and recipe.speculation is None
        )
        return boot(plain.with_flags({"tensor-parallel-size": 1}), self)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    import shutil

    folder = tmp_path_factory.mktemp("twins")
    yield Twins(folder)
    shutil.rmtree(folder)


Booted = tuple[list[list[int]], int, int]
"""What was said, how many tokens were drafted, how many of them accepted."""


def boot(recipe: recipes.Recipe, made: Twins) -> Booted:
    """Start the recipe with its twins."""
    target, ranks = str(recipe.model), recipe.tensor_parallel_size
    extra = ["--tensor-parallel-size", str(ranks)]
    if recipe.speculation and recipe.speculation.model:
        draft = made.draft(recipe.speculation.method, recipe.speculation.model, target)
        extra += ["--speculative-config.model", draft] if draft else []
    for flag, (value, _) in ON_THE_CPU.items():
        match value:
            case True:
                extra.append(f"--{flag}")
            case str():
                extra += [f"--{flag}", value]
    command = prepare(recipe.name, extra, {"MODEL": made.target(target)}, starting=False)
    arguments = engine_arguments(command.argv[2:])
    for flag, (value, _) in ON_THE_CPU.items():
        if value is None:
            arguments.pop(flag.replace("-", "_"), None)
    assert arguments.get("tensor_parallel_size", 1) == ranks
    key = json.dumps(arguments, sort_keys=True, default=str)
    if key not in made.booted:  # what a recipe in FP8 leaves here is the recipe in bfloat16
        made.booted[key] = _run(arguments, ranks, made.folder / "log")
    print(f"\nBOOT {json.dumps([recipe.name, ranks, *made.booted[key][1:]])}")
    return made.booted[key]


def _run(arguments: dict[str, Any], ranks: int, log: Path) -> Booted:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    engine = Engine(log, env=env, **arguments)
    try:
        before = engine.counters()
        said = ids(engine.tokens(twins.PROMPTS, **ASKED))
        after = engine.counters()
        counted = [
            grown(before, after, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")
        ]
        return said, counted[0], counted[1]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), BOOTS)
def test_it_boots(name: str, ranks: int, made: Twins) -> None:
    recipe = loaded(name).with_flags({"tensor-parallel-size": ranks})
    said, drafted, accepted = boot(recipe, made)
    assert said == made.says(str(recipe.model))
    assert all(len(tokens) == 16 for tokens in said)
    assert 0 <= accepted <= drafted
    assert drafted == 0 or recipe.speculation is not None


@pytest.mark.timeout(300)
def test_one_recipe_boots(made: Twins) -> None:
    """The fast one of test_it_boots, and its twin says what it was made to say."""
    recipe = loaded(FAST)
    said, drafted, accepted = boot(recipe, made)
    assert said == made.says(str(recipe.model))
    assert said[1][:3] == [twins.PROMPTS[1][-1] + n for n in (1, 2, 3)]
    assert drafted >= accepted > 0


def test_the_table_of_flags_has_those_of_the_installed_vllm() -> None:
    """python -m vllm_specx.engine.serve_flags"""
    from vllm_specx.engine.serve_flags import of_installed_vllm
    from vllm_specx.recipes.flags import TABLE

    for name, said in of_installed_vllm().items():
        known = TABLE[name]
        assert known.get("type") == said.get("type"), name
        for kind in ("choices", "keys"):
            assert set(known.get(kind, ())) >= set(said.get(kind, ())) or kind not in known, name


def test_the_table_names_flags_that_there_are() -> None:
    from vllm_specx.recipes.flags import TABLE

    assert set(ON_THE_CPU) <= set(TABLE)
    assert all(flags.name_of(f"--{flag}") == flag for flag in ON_THE_CPU)
