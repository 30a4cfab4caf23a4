"""`vllm-specx serve`: the command it becomes, and what it refuses."""

import json
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_specx.cli import flags, main, network
from vllm_specx.cli.serve import Command, prepare
from vllm_specx.config import ConfigError

SPECULATIVE = {"method": "specx:ngram", "num_speculative_tokens": 4}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def recipe(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"model: {model}\nspeculation: {json.dumps(SPECULATIVE)}\n"
        "serve:\n  served-model-name: served\n  max-model-len: 512\n  enforce-eager: true\n"
        "  enable-prefix-caching: false\n  additional-config: {specx: {min_match: 3}}\n"
        "  allowed-media-domains: [a, b]\n  seed: null\n"
        "gpus: {2: {tensor-parallel-size: 2}}\n"
        "env: {VLLM_LOGGING_LEVEL: ERROR}\n"
    )
    return path


def command(recipe: Path | str, *extra: str, **environ: str) -> Command:
    return prepare(str(recipe), extra, environ, starting=False)


def value(name: str, arguments: Sequence[str]) -> str | None:
    return flags.value_of(name, arguments)


def test_a_recipe_becomes_one_vllm_serve_command(recipe: Path, model: str) -> None:
    argv = command(recipe).argv
    assert Path(argv[0]).name == "vllm"
    assert argv[1:3] == ["serve", model]
    assert value("host", argv) == "127.0.0.1"
    assert value("port", argv) == "8000"
    assert value("served-model-name", argv) == "served"
    assert json.loads(value("speculative-config", argv) or "") == SPECULATIVE
    assert json.loads(value("additional-config", argv) or "") == {"specx": {"min_match": 3}}
    assert "--enforce-eager" in argv
    assert "--no-enable-prefix-caching" in argv
    origins = argv.index("--allowed-media-domains")
    assert argv[origins + 1 : origins + 3] == ["a", "b"]
    assert "--seed" not in argv


def test_the_shell_form_reads_back_as_the_same_command(recipe: Path) -> None:
    made = command(recipe, "--api-key", "it's $HOME; `x`")
    words = shlex.split(made.shell())
    assert words[-len(made.argv) + 1 :] == made.argv[1:]
    assert "VLLM_LOGGING_LEVEL=ERROR" in words


def test_the_environment_sets_model_host_and_port(recipe: Path, tmp_path: Path) -> None:
    argv = command(recipe, MODEL="org/name", HOST="0.0.0.0", PORT="9000").argv
    assert argv[2] == "org/name"
    assert value("host", argv) == "0.0.0.0"
    assert value("port", argv) == "9000"
    assert "--served-model-name" not in argv, "the recipe's name is not the name of another model"


def test_what_the_caller_has_set_wins_over_the_recipe_env(recipe: Path) -> None:
    assert "VLLM_LOGGING_LEVEL" not in command(recipe, VLLM_LOGGING_LEVEL="DEBUG").env


@pytest.mark.parametrize(
    ("extra", "name", "wanted"),
    [
        (["--max-model-len", "64"], "max-model-len", "64"),
        (["--max_model_len=64"], "max-model-len", "64"),
        (["--port", "1234"], "port", "1234"),
        (["--host=::1"], "host", "::1"),
    ],
)
def test_the_users_flag_wins_and_is_not_rendered_twice(
    recipe: Path, extra: list[str], name: str, wanted: str
) -> None:
    argv = command(recipe, *extra, HOST="0.0.0.0", PORT="9000").argv
    assert [flags.name_of(argument) for argument in argv].count(name) == 1
    assert value(name, argv) == wanted


def test_switches_and_short_forms_win_too(recipe: Path) -> None:
    argv = command(
        recipe, "--no-enforce-eager", "-sc", '{"method": "ngram"}', "--additional-config={}"
    ).argv
    assert "--enforce-eager" not in argv
    assert "--speculative-config" not in argv


def test_a_dotted_flag_changes_its_key_and_leaves_the_others(recipe: Path) -> None:
    argv = command(
        recipe, "--speculative-config.num_speculative_tokens", "2", "--speculative-config.pool=off"
    ).argv
    assert json.loads(value("speculative-config", argv) or "") == {
        "method": "specx:ngram",
        "num_speculative_tokens": 2,
        "pool": "off",
    }


def test_a_served_name_for_an_embedded_model() -> None:
    argv = command("ngram-any", MODEL="embedded:smollm2-135m-instruct").argv
    assert value("served-model-name", argv) == "smollm2-135m-instruct"
    assert (Path(argv[2]) / "model.safetensors").is_file()


def test_listening_beyond_this_machine_is_said_aloud(recipe: Path) -> None:
    assert any("--api-key" in note for note in command(recipe, HOST="0.0.0.0").notes)
    assert not any("--api-key" in note for note in command(recipe).notes)
    keyed = command(recipe, "--api-key", "k", HOST="0.0.0.0")
    assert not any("consider" in note for note in keyed.notes)


@pytest.mark.parametrize(
    ("extra", "environ", "said"),
    [
        ([], {"PORT": "eighty"}, "the port is 'eighty'"),
        (["--port", "70000"], {}, "the port is '70000'"),
        ([], {"MODEL": "/nowhere/model"}, "no model folder '/nowhere/model'"),
        ([], {"MODEL": "not a name!"}, "neither a model folder nor a hub name"),
        ([], {"MODEL": "embedded:smollm2-135m"}, "did you mean 'embedded:smollm2-135m-instruct'"),
        (["--speculative-config", "{bad"], {}, "--speculative-config is not valid JSON"),
        (["--speculative-config", "[1]"], {}, "must be a JSON mapping"),
        (["--speculative-config", '{"method": "specx:ngran"}'], {}, "did you mean 'specx:ngram'"),
        (["--speculative-config.poool", "off"], {}, "did you mean 'pool'"),
        (["--speculative-config.num_speculative_tokens", "0"], {}, "num_speculative_tokens"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    recipe: Path, extra: list[str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        command(recipe, *extra, **environ)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_without_a_model_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match="MODEL=Qwen"):
        command("ngram-any")


def test_a_busy_port_is_found_before_starting(recipe: Path) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            prepare(str(recipe), [], {"PORT": port}, starting=True)
        assert prepare(str(recipe), [], {"PORT": port}, starting=False).argv
    network.check_free("127.0.0.1", int(port))


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1.* is not an address of this machine"):
        network.check_free("203.0.113.1", 8000)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "no-such-recipe"],
        ["serve"],
        ["serve", "ngram-any", "--max-model-len", "3"],
        ["nonsense"],
        ["serve", "ngram-any", "--dry-run"],
    ],
)
def test_errors_of_the_command_line_are_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("vllm-specx: ")


def test_a_dry_run_prints_the_command_and_nothing_else(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(recipe), "--dry-run", "--", "--max-num-seqs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("--max-num-seqs 4")
    assert "vllm serve" in lines[0]
