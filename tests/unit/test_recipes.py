"""Recipes: what is accepted, what comes along, and the one sentence for what is not."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml

from vllm_specx import recipes
from vllm_specx.cli.serve import with_draft
from vllm_specx.config import ConfigError
from vllm_specx.draft.checkpoints import TargetShape, load_heads
from vllm_specx.recipes import flags, json_schema

MINIMAL = "speculation: {method: specx:ngram}\n"


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema.make())


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_of_the_checkout_is_valid(
    name: str, schema: jsonschema.Draft202012Validator
) -> None:
    path = recipes.find(name)
    loaded = recipes.load(path)
    assert loaded.name == name
    assert loaded.description
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    schema.validate(json.loads(json.dumps(yaml.safe_load(path.read_text()))))
    here = [machine for machine in loaded.hardware.tested_on if "CPU" not in machine]
    assert not here, "no recipe has run on a GPU yet"
    assert loaded.hardware.tested_on or any("Not run" in note for note in loaded.notes)


def test_the_checkout_has_its_recipes() -> None:
    names = set(recipes.names())
    assert {"smollm2-135m-ngram", "smollm2-135m-medusa", "smollm2-135m-auto", "ngram-any"} <= names
    used = {load.speculation.method for load in map(loaded, names) if load.speculation}
    ours = {f"specx:{name}" for name in ("ngram", "draft_model", "eagle", "medusa", "auto")}
    assert ours | {"draft_model"} <= used


def loaded(name: str) -> recipes.Recipe:
    return recipes.load(recipes.find(name))


def test_the_published_schema_is_current() -> None:
    """vllm-specx recipes --schema > recipes/schema.json"""
    assert (recipes.folder() / json_schema.FILE_NAME).read_text() == json_schema.text()


@pytest.mark.parametrize(
    "text",
    [
        "model: x\n",
        MINIMAL + "serve: {tensor-paralel-size: 2}\n",
        MINIMAL + "serve: {tensor-parallel-size: two}\n",
        MINIMAL + "serve: {dtype: float8}\n",
        MINIMAL + "controller: {k_min: -1}\n",
        MINIMAL + "gpus: {0: {}}\n",
        "speculation: {method: specx:ngram, max_mach: 3}\n",
        "speculation: {method: specx:ngram, model: x}\n",
        "speculation: {method: specx:eagle3, model: x, topology: tree}\n",
        "speculation: {method: specx:ngram, num_speculative_tokens: 200}\n",
    ],
)
def test_editors_and_the_command_refuse_the_same(
    tmp_path: Path, text: str, schema: jsonschema.Draft202012Validator
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(json.loads(json.dumps(yaml.safe_load(text))))
    from vllm_specx.cli import main

    assert (
        main(
            [
                "serve",
                str(write(tmp_path, "model: org/name\n" * ("model" not in text[:5]) + text)),
                "--dry-run",
            ]
        )
        == 2
    )


def test_the_heads_of_the_embedded_model_are_there_and_fit() -> None:
    path = recipes.find("smollm2-135m-medusa")
    speculation = recipes.load(path).speculation
    assert speculation is not None
    folder = Path(with_draft(speculation.flag(), path, "x")["model"])
    heads = load_heads(folder, TargetShape(576, 49152, torch.bfloat16))
    assert heads.depth >= (speculation.num_speculative_tokens or 0)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6


@pytest.mark.parametrize("method", ["specx:medusa", "specx:eagle", "specx:draft_model", "eagle3"])
def test_the_drafts_path_is_relative_to_the_recipe(tmp_path: Path, method: str) -> None:
    (tmp_path / "mine").mkdir()
    draft = {"method": method, "model": "mine", "num_speculative_tokens": 2}
    recipe = tmp_path / "r.yaml"
    assert with_draft(draft, recipe, "t") == {**draft, "model": str(tmp_path / "mine")}
    elsewhere = {**draft, "model": "org/heads"}
    assert with_draft(elsewhere, recipe, "t") == elsewhere
    with pytest.raises(ConfigError, match="there is no draft 'their'"):
        with_draft({**draft, "model": "their"}, recipe, "t")


def test_what_trains_missing_heads_is_named() -> None:
    path = recipes.find("qwen2.5-7b-medusa")
    speculation = recipes.load(path).speculation
    assert speculation is not None
    with pytest.raises(
        ConfigError, match=r"vllm-specx train medusa --target org/x --out \S*7b-medusa"
    ):
        with_draft(speculation.flag(), path, "org/x")


def test_a_recipe_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert recipes.find(str(path)) == path
    by_name = recipes.find("ngram-any")
    assert recipes.find("ngram-any.yaml") == by_name
    assert by_name.parent == recipes.folder()


def test_flag_names_may_be_written_with_underscores_or_dashes(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "serve: {max_model_len: 64, --dtype: float32}\n")
    assert recipes.load(path).serve == {"max-model-len": 64, "dtype": "float32"}


def test_a_variant_says_what_differs(tmp_path: Path) -> None:
    write(
        tmp_path,
        "description: the first\nmodel: org/name\nserve: {max-model-len: 64, seed: 3}\n"
        "speculation: {method: specx:medusa, model: a/b, num_speculative_tokens: 2}\nnotes: [one]\n",
        "base.yaml",
    )
    changed = write(
        tmp_path,
        "extends: base.yaml\nserve: {seed: null, max-num-seqs: 4}\n"
        "speculation: {num_speculative_tokens: 3}\n",
        "changed.yaml",
    )
    recipe = recipes.load(changed)
    assert (recipe.name, recipe.description, recipe.model) == ("changed", "", "org/name")
    assert recipe.serve == {"max-model-len": 64, "max-num-seqs": 4}
    assert recipe.speculation is not None
    assert recipe.speculation.flag() == {
        "method": "specx:medusa",
        "model": "a/b",
        "num_speculative_tokens": 3,
    }
    assert recipe.notes == ["one"]
    other = "extends: changed.yaml\nspeculation: {method: specx:ngram}\nnotes: []\n"
    again = recipes.load(write(tmp_path, other))
    assert again.speculation is not None
    assert again.speculation.flag() == {"method": "specx:ngram"}, "another method, another mapping"
    assert again.notes == []
    assert (
        recipes.load(write(tmp_path, "extends: base.yaml\nspeculation: null\n")).speculation is None
    )


def test_a_fault_of_the_recipe_beneath_is_told_as_its_own(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "modle: y\n", "base.yaml")
    with pytest.raises(ConfigError, match=r"base.yaml: unknown key 'modle'"):
        recipes.load(write(tmp_path, "extends: base.yaml\n"))


def test_flags_by_number_of_gpus(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "serve: {tensor-parallel-size: 2, seed: 1}\ngpus: {4: {tensor-parallel-size: 4, seed: 2}}\n"
    )
    recipe = recipes.load(write(tmp_path, text))
    assert recipe.on_gpus(2) == recipe
    assert recipe.on_gpus(4).serve == {"tensor-parallel-size": 4, "seed": 2}
    with pytest.raises(ValueError, match=r"settings for 2, 4 GPUs, not for 3; add 'gpus.3'"):
        recipe.on_gpus(3)


@pytest.mark.parametrize(("written", "said"), [("off", "off"), ("{k_max: 3}", {"k_max": 3})])
def test_the_controller_goes_where_the_method_has_it(
    tmp_path: Path, written: str, said: object
) -> None:
    recipe = recipes.load(write(tmp_path, MINIMAL + f"controller: {written}\n"))
    assert recipe.speculation is not None
    assert recipe.speculation.flag(recipe.controller) == {
        "method": "specx:ngram",
        "controller": said,
    }
    stock = recipes.load(
        write(tmp_path, f"speculation: {{method: ngram}}\ncontroller: {written}\n")
    )
    assert stock.speculation is not None
    assert stock.speculation.flag(stock.controller) == {
        "method": "ngram",
        "specx": {"controller": said},
    }


def test_a_draft_of_ours_is_whole_on_every_rank(tmp_path: Path) -> None:
    text = "speculation: {{method: {}, model: a/b, draft_tensor_parallel_size: {}}}\n"
    ours = recipes.load(write(tmp_path, text.format("specx:draft_model", 1))).speculation
    assert ours is not None and "draft_tensor_parallel_size" not in ours.flag()
    stock = recipes.load(write(tmp_path, text.format("draft_model", 2))).speculation
    assert stock is not None and stock.flag()["draft_tensor_parallel_size"] == 2


def test_every_flag_of_the_table_has_a_known_kind() -> None:
    assert len(flags.TABLE) > 250
    kinds = {said.get("type") for said in flags.TABLE.values()}
    assert kinds == {"boolean", "switch", "integer", "number", "json", None}


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m-ngram'"):
        recipes.find("smollm-135m-ngram")
    with pytest.raises(ConfigError, match=r"no recipe file '\./nowhere.yaml'"):
        recipes.find("./nowhere.yaml")
