"""Recipes: what is accepted, and the one sentence for what is not."""

from pathlib import Path

import pytest
import torch

from vllm_specx.cli import recipe as recipes
from vllm_specx.cli.serve import with_heads
from vllm_specx.config import ConfigError
from vllm_specx.draft.checkpoints import TargetShape, load_heads

MINIMAL = "name: x\nspeculative: {method: specx:ngram}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_of_the_checkout_is_valid(name: str) -> None:
    loaded = recipes.load(recipes.find(name))
    assert loaded.name == name
    assert loaded.description
    assert loaded.speculative


def test_the_checkout_has_its_recipes() -> None:
    assert {"smollm2-135m-ngram", "smollm2-135m-medusa", "ngram-any"} <= set(recipes.names())


def test_the_heads_of_the_embedded_model_are_there_and_fit() -> None:
    path = recipes.find("smollm2-135m-medusa")
    speculative = recipes.load(path).speculative
    assert speculative is not None
    folder = Path(with_heads(speculative, path)["model"])
    heads = load_heads(folder, TargetShape(576, 49152, torch.bfloat16))
    assert heads.depth >= speculative["num_speculative_tokens"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6


@pytest.mark.parametrize("method", ["specx:medusa", "specx:eagle", "specx:eagle3"])
def test_the_heads_path_is_relative_to_the_recipe(tmp_path: Path, method: str) -> None:
    (tmp_path / "mine").mkdir()
    heads = {"method": method, "model": "mine", "num_speculative_tokens": 2}
    assert with_heads(heads, tmp_path / "r.yaml") == {**heads, "model": str(tmp_path / "mine")}
    elsewhere = {**heads, "model": "org/heads"}
    assert with_heads(elsewhere, tmp_path / "r.yaml") == elsewhere
    with pytest.raises(ConfigError, match="there are no heads 'their'"):
        with_heads({**heads, "model": "their"}, tmp_path / "r.yaml")


def test_a_recipe_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert recipes.find(str(path)) == path
    by_name = recipes.find("ngram-any")
    assert recipes.find("ngram-any.yaml") == by_name
    assert by_name.parent == recipes.folder()


def test_flag_names_may_be_written_with_underscores_or_dashes(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "vllm: {max_model_len: 64, --dtype: float32}\n")
    assert recipes.load(path).vllm == {"max-model-len": 64, "dtype": "float32"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL + "modle: y\n", ["unknown key 'modle'", "did you mean 'model'"]),
        ("speculative: {}\n", ["'name' is missing"]),
        ("name: x\n", ["'speculative' is missing"]),
        ("name: [unclosed\n", ["line", "is not valid YAML"]),
        ("just text\n", ["must be a mapping"]),
        ("", ["must be a mapping"]),
        (MINIMAL + "vllm: 3\n", ["'vllm'", "3"]),
        (MINIMAL + "vllm: {model: y}\n", ["write model as the key 'model'"]),
        (MINIMAL + "vllm: {speculative_config: {}}\n", ["the key 'speculative'"]),
        (MINIMAL + "env: {'A B': 1}\n", ["A B"]),
        ("!!python/object/apply:os.system ['true']\n", ["is not valid YAML"]),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence(tmp_path: Path, text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(write(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "recipe.yaml" in message
    for part in said:
        assert part in message


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m-ngram'"):
        recipes.find("smollm-135m-ngram")
    with pytest.raises(ConfigError, match=r"no recipe file '\./nowhere.yaml'"):
        recipes.find("./nowhere.yaml")
