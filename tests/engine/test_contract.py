"""The names of vLLM that we stand on, in the installed vLLM and in 0.33's Python sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.vllm_0_33 import sources
from vllm_specx.config import ConfigError
from vllm_specx.engine import contract
from vllm_specx.models.embedded import checkpoint


def run(*paths: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "vllm_specx.engine.contract"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_installed_vllm_has_every_hook() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert f"all {len(contract.HOOKS)} hooks are there" in done.stdout


def test_vllm_0_33_has_every_hook() -> None:
    done = run(sources())
    assert done.returncode == 0, done.stderr
    assert "vLLM 0.33.0: all" in done.stdout


def without(name: str, module: str, tree: Path, folder: Path) -> Path:
    """A copy of a vllm package, by links, in which the function `name` of `module` is called otherwise."""
    for source in tree.rglob("*"):
        link = folder / "vllm" / source.relative_to(tree)
        if source.is_dir():
            link.mkdir(parents=True, exist_ok=True)
        elif source.suffix != ".pyc":
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    changed = folder / "vllm" / module
    text = changed.read_text()
    assert f"def {name}(" in text
    changed.unlink()
    changed.write_text(text.replace(f"def {name}(", f"def {name}_of_tomorrow("))
    return folder


RUNNER = "v1/worker/gpu_model_runner.py"


def test_a_hook_that_0_33_lacks_is_named(tmp_path: Path) -> None:
    done = run(without("propose_draft_token_ids", RUNNER, sources() / "vllm", tmp_path))
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if "vllm_specx" in line]
    assert "vllm.v1.worker.gpu_model_runner.GPUModelRunner.propose_draft_token_ids" in sentence
    assert sentence.count("(for: ") == 1, "nothing else is missing"
    assert "Traceback" not in done.stderr


CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext

load_general_plugins()
arguments = EngineArgs(model=sys.argv[1], speculative_config=json.loads(sys.argv[2]))
arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
print("CONFIGURED")
"""


def test_a_vllm_without_a_hook_is_refused_only_where_specx_is_selected(tmp_path: Path) -> None:
    import vllm

    tree = without(
        "propose_draft_token_ids", RUNNER, Path(vllm.__file__).parent, tmp_path / "changed"
    )
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    model = str(checkpoint("embedded:smollm2-135m-instruct"))

    def configure(config: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CONFIGURE, model, config],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )

    refused = configure('{"method": "specx:ngram"}')
    assert refused.returncode == 2, refused.stderr[-2000:]
    assert "GPUModelRunner.propose_draft_token_ids" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "CONFIGURED" not in refused.stdout

    other = configure('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}')
    assert "CONFIGURED" in other.stdout, other.stderr[-2000:]


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = (
        contract.Hook("vllm.config", "SpeculativeConfig.no_such_name", "a test"),
        contract.Hook("vllm.no_such_module", "Thing", "a test"),
        contract.Hook("vllm.no_such_attention", "Impl", "a test", if_there=True),
        contract.Hook("vllm.config", "NoSuchAttention", "a test", if_there=True),
        contract.Hook("vllm.config", "SpeculativeConfig", "a test", ("no_such_parameter",)),
    )
    monkeypatch.setattr(contract, "HOOKS", hooks)
    with pytest.raises(ConfigError) as refused:
        contract.check()
    message = str(refused.value)
    assert "vllm.config.SpeculativeConfig.no_such_name" in message
    assert "vllm.no_such_module" in message
    assert "vllm.no_such_attention" not in message and "vllm.config.NoSuchAttention" in message
    assert "parameter 'no_such_parameter' of vllm.config.SpeculativeConfig" in message
