"""Whatever is wrong with a file, a name or a variable: one sentence, exit status 2, no traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_specx.cli import main
from vllm_specx.control.policy import rule_for
from vllm_specx.engine.pools import pool_of
from vllm_specx.messages import shown

ROOT = Path(__file__).parents[2]
Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """Run a command line that must be refused; what it said."""
    for name in ("MODEL", "HOST", "PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, **environ: str) -> str:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert main(list(arguments)) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("vllm-specx: ")
        assert len(said.splitlines()) == 1, said
        assert len(said) < 1000, said
        assert "Traceback" not in said
        return said

    return run


def recipe(folder: Path, *lines: str) -> str:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    path = folder / "r.yaml"
    head = [f"model: {model}"]
    if not any(line.startswith("speculation") for line in lines):
        head.append("speculation: null")
    path.write_text("\n".join([*head, *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("description: 2024-99-99", "not valid YAML"),
        (f"serve: {{a: {'1' * 6000}}}", "digits"),
        (f"serve: {{a: 0x{'f' * 6000}}}", "hexadecimal digits"),
        (f"description: {'[' * 1500}", "not valid YAML"),
        (f"serve: {{a: {'[' * 60}{']' * 60}}}", "levels"),
        ("serve: {x: {a: 2024-01-01}}", "as a date"),
        ("serve: {x: [2024-01-01]}", "as a date"),
        ("serve: {x: !!binary aGk=}", "as a bytes"),
        ("serve: {x: !!set {a, b}}", "as a set"),
        ("serve: {2024-01-01: 3}", "is not text"),
        ("serve: {true: 3}", "is not text"),
        ("serve: {x: &a [*a]}", "levels"),
        ("speculation: &a {method: ngram, b: *a}", "levels"),
        ("serve: {a: .inf}", "finite"),
        ('env: {A: "a\\0b"}', "character"),
        ('serve: {a: "\\ud800"}', "character"),
        ("serve: {'a b': 1}", "no flag"),
        ("serve: {'': 1}", "no flag"),
        ("serve: {port: [1, 2]}", "'serve.port' is [1, 2]; it must be a whole number"),
        ("serve: {host: {a: 1}}", "one value"),
        ("serve: {port: true}", "'serve.port' is True; it must be a whole number"),
        ("speculation: {method: ngram, specx: {k: 1}}", "unknown key 'k'"),
        ("speculation: {method: ngram, specx: 3}", "mapping"),
        ("speculation: {method: 'specx:ngram', min_match: 40, max_match: 10}", "above max_match"),
        ("speculation: {method: 'specx:ngram', min-match: 2, min_match: 3}", "given twice"),
        ("speculation: {method: 'specx:ngram', proposer: medusa}", "'proposer' is not needed"),
        ("speculation: {method: 'specx:medusa', model: a, heads: b}", "given twice"),
        ("speculation: {method: 'specx:medusa'}", "'model'"),
        ("speculation: {method: 'specx:medusa', model: ./a}", "no draft './a'"),
        ("speculation: {method: 'specx:medusa', model: ~nobody/a}", "no draft '~nobody/a'"),
        ("speculation: {method: 'specx:eagle3'}", "'model'"),
        ("speculation: {method: 'specx:eagle', model: a, heads: b}", "given twice"),
        ("speculation: {method: 'specx:eagle3', model: ./a}", "no draft './a'"),
        ("speculation: {method: 'specx:eagle', heads: a/b, aux_layers: 3}", "'aux_layers' in specx is 3"),
        ("speculation: {method: 'specx:eagle', heads: a/b, aux_layers: [9, 2]}", "ascending"),
        ("speculation: {method: 'specx:ngram', pool: 'of'}", "pool must be"),
    ],
)  # fmt: skip
def test_recipes(refused: Refused, tmp_path: Path, line: str, said: str) -> None:
    assert said in refused("serve", recipe(tmp_path, line), "--dry-run")


def test_an_alias_bomb_ends_soon(refused: Refused, tmp_path: Path) -> None:
    bomb = ["a: &a0 [x, x]", *(f"b{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    lines = "\n".join(f"  {line}" for line in bomb)
    assert "100000 values" in refused("serve", recipe(tmp_path, "serve:\n" + lines), "--dry-run")


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "~nouser/x.yaml", "a\nb", "."])
def test_names_of_files(refused: Refused, name: str) -> None:
    assert "there is no recipe" in refused("serve", name)
    assert "there is no scenario file" in refused("simulate", name)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MODEL": "a" * 5000}, "neither a model folder nor a hub name"),
        ({"MODEL": "~nouser/x"}, "no model folder"),
        ({"MODEL": "/etc/passwd"}, "is a file"),
        ({"PORT": "8_140"}, "port number"),
        ({"PORT": "\uff18\uff11\uff14\uff10"}, "port number"),
        ({"PORT": " 8150 "}, "port number"),
        ({"PORT": "+8150"}, "port number"),
    ],
)
def test_variables(refused: Refused, tmp_path: Path, environ: dict[str, str], said: str) -> None:
    assert said in refused("serve", recipe(tmp_path), "--dry-run", **environ)


@pytest.mark.parametrize("host", ["a..b", "a" * 70, f"{'a' * 300}.b"])
def test_hosts(refused: Refused, tmp_path: Path, host: str) -> None:
    assert "not an address" in refused("serve", recipe(tmp_path), HOST=host)


def test_flags(refused: Refused, tmp_path: Path) -> None:
    path = recipe(tmp_path)
    deep = "[" * 5000
    assert "not valid JSON" in refused("serve", path, "--", "--speculative-config", deep)
    assert "the host is empty" in refused("serve", path, "--", "--host", "")


def test_what_no_process_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_specx.cli.network.check_free", lambda host, port: None)
    assert main(["serve", recipe(tmp_path, f"serve: {{revision: {'x' * 200_000}}}")]) == 2
    assert "cannot be started" in capsys.readouterr().err.splitlines()[-1]


def test_no_command(refused: Refused) -> None:
    assert "name a command" in refused()


def test_a_stock_method_beside_specx_is_no_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "speculation: {method: ngram, num_speculative_tokens: 8, prompt_lookup_max: 4, specx: {}}"
    )
    assert main(["serve", recipe(tmp_path, line), "--dry-run"]) == 0
    assert '"specx": {}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed: -1", "seed"),
        ("max_k: 1\nstatic_k: [5]", "static_k"),
        ("mix: {code: .inf}", "finite"),
        ("arrivals: {kind: poisson, per_second: 1.0e-320, requests: 3}", "per_second"),
        ("arrivals: {kind: levels, levels: [[1, 1000000]]}", "too many"),
        ("arrivals: {kind: trace, requests: [[-5, code, 10, 10]]}", "greater than or equal"),
        ("arrivals: {kind: trace, requests: [[.nan, code, 10, 10]]}", "finite"),
        ("cost: {kind: measured, ms: {1: {0: 1.0e-300}}}", "ms"),
        ("cost: {kind: measured, ms: {1: {0: 9.0}}, prefill_tokens_per_second: 1.0e-300}", "prefill"),
    ],
)  # fmt: skip
def test_scenarios(refused: Refused, tmp_path: Path, change: str, said: str) -> None:
    small = {
        "name": "s",
        "work": {"code": {"acceptance": [0.5]}},
        "arrivals": {"kind": "levels", "levels": [[1, 2]]},
        "cost": {"kind": "measured", "ms": {1: {0: 9.0, 4: 12.0}}},
    }
    key = change.split(":")[0]
    kept = {name: value for name, value in small.items() if name != key}
    path = tmp_path / "s.yaml"
    path.write_text("\n".join([*(f"{k}: {json.dumps(v)}" for k, v in kept.items()), change]))
    assert said in refused("simulate", str(path))


def test_plots(refused: Refused, tmp_path: Path) -> None:
    scenario = str(ROOT / "benchmarks" / "simulate" / "smollm2-2core-mixed.yaml")
    for name in (tmp_path, tmp_path / "x", "/dev/full"):
        assert "must name a file" in refused("simulate", scenario, "--plot", str(name))
    assert os.listdir(tmp_path) == []


def test_a_clients_values_are_shortened(caplog: pytest.LogCaptureFixture) -> None:
    for key in ("specx_k", "specx_scenario"):
        rule_for({key: "x" * 100_000}, 0.0, 8)
    assert pool_of({"specx_pool": ["a"] * 10_000}) is None
    assert len(caplog.records) == 3
    assert all(len(record.getMessage()) < 300 for record in caplog.records)
    assert "specx_pool" in caplog.records[-1].getMessage()
    assert shown("short") == "'short'"


def test_a_client_cannot_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import itertools

    from vllm_specx import messages

    monkeypatch.setattr(messages, "_warnings", itertools.count(1))
    for number in range(300):
        rule_for({"specx_k": -number - 1}, 0.0, 8)
    assert len(caplog.records) == 100
    assert caplog.records[-1].getMessage().endswith("Further ones are not logged.")
