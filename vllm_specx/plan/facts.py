"""What a config.json says of a dense decoder: its sizes, and what follows from them in bytes."""

from __future__ import annotations

import functools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_specx import documents
from vllm_specx.config import ConfigError
from vllm_specx.messages import clipped, shown
from vllm_specx.models import embedded
from vllm_specx.plan.quantization import Quantization, quantization_of

COMMITTED = Path(__file__).with_name("models") / "models.yaml"
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
}
TIMEOUT = 5.0
"""Seconds that a config.json may take to download."""
_MOST_BYTES = 2**22
_LARGEST = 2**31
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder of Llama's kind: grouped-query attention and a gated MLP in every layer.

    intermediate: of the MLP. vocab: rows of the embeddings, padding included. qkv_bias: whether q, k
    and v have biases. element: bytes of a value of its dtype. tokenizer, special: models.yaml; None:
    unknown. source: where the sizes are from.
    """

    name: str
    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    max_positions: int
    element: int
    quantization: Quantization | None
    source: str
    tokenizer: str | None = None
    special: str | None = None

    @property
    def linear_parameters(self) -> int:
        """Of the layers' matrices, which quantization makes smaller."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def embedding_parameters(self) -> int:
        """Of the embeddings alone."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings count once."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.model_type == "qwen3" else 0)
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return self.linear_parameters + self.layers * (biases + norms) + ends

    @property
    def weight_bytes(self) -> float:
        """Of all parameters as they lie in memory."""
        linear = self.linear_parameters
        packed = self.element if self.quantization is None else self.quantization.bytes_a_weight
        return linear * packed + (self.parameters - linear) * self.element

    @property
    def read_bytes(self) -> float:
        """What a step reads of them: of untied embeddings only the rows of its tokens."""
        rows = 0 if self.tied else self.embedding_parameters
        return self.weight_bytes - rows * self.element

    def kv_bytes(self, ranks: int = 1, element: float | None = None) -> float:
        """A token of context in the K/V cache of one of `ranks` tensor-parallel ranks, which share the
        key-value heads and, if these are fewer, have copies. element: bytes of a value."""
        heads = max(1, self.kv_heads // ranks)
        return 2 * self.layers * heads * self.head_dim * (element or self.element)


def read_facts(model: str, folders: Sequence[Path] = (), *, download: bool = True) -> ModelFacts:
    """Of a model by its folder, its config.json or its hub name.

    folders: what a relative path may be relative to. download: of a hub name that is neither among
    models.yaml nor in the local hub cache, its config.json is fetched. Raises ConfigError: one sentence.
    """
    config, source = read_config(model, folders, download=download)
    return facts_of(model, config, source, committed().get(model, {}))


def whole(config: Mapping[str, Any], key: str, name: str) -> int | None:
    """A size that a configuration may leave out. Raises ConfigError for what is none."""
    return None if config.get(key) is None else _size(config, key, name)


def facts_of(
    name: str, config: Mapping[str, Any], source: str, extra: Mapping[str, Any] | None = None
) -> ModelFacts:
    """From the mapping of a config.json. extra: the model's entry in models.yaml. Raises ConfigError."""
    extra = extra or {}
    text = config.get("text_config")
    flat = {**config, **text} if isinstance(text, Mapping) else dict(config)
    kind = str(flat.get("model_type", "llama"))
    for key in _NOT_DENSE:
        if flat.get(key):
            raise ConfigError(
                f"{name} has '{key}' in its config.json: the planner knows dense decoders only, not "
                "mixtures of experts or latent attention."
            )
    sizes = {key: _size(flat, key, name) for key in _SIZES}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    given = flat.get("head_dim")
    return ModelFacts(
        name=name,
        model_type=kind,
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=_size(flat, "num_key_value_heads", name, heads),
        head_dim=hidden // heads if given is None else _size(flat, "head_dim", name),
        hidden=hidden,
        intermediate=sizes["intermediate_size"],
        vocab=sizes["vocab_size"],
        tied=bool(flat.get("tie_word_embeddings", False)),
        qkv_bias=bool(flat.get("attention_bias", kind in ("qwen2", "qwen2_vl"))),
        max_positions=_size(flat, "max_position_embeddings", name, 2048),
        element=DTYPE_BYTES.get(str(flat.get("dtype", flat.get("torch_dtype", "bfloat16"))), 2),
        quantization=quantization_of(flat.get("quantization_config")),
        source=source,
        tokenizer=extra.get("tokenizer"),
        special=extra.get("special"),
    )


def read_config(
    model: str, folders: Sequence[Path] = (), *, download: bool = True
) -> tuple[dict[str, Any], str]:
    """The mapping of a model's config.json and where it is from. Raises ConfigError."""
    if (entry := committed().get(model)) is not None:
        return dict(entry["config"]), f"committed: {entry['source']}"
    if embedded.is_embedded(model):
        raise ConfigError(
            f"nothing is known of '{model}'; the embedded models are {', '.join(embedded.MODELS)}."
        )
    file = local_file(model, "config.json", folders)
    if file is None and not is_hub_name(model):
        raise ConfigError(
            f"nothing is known of the model '{clipped(model)}': give the path of its folder or of its "
            "config.json, or a hub name."
        )
    try:
        if file is None:
            text, source = _downloaded(model, download)
        else:
            text, source = file.read_text(encoding="utf-8"), str(file)
        config = json.loads(text)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file or model} cannot be read: {clipped(str(error))}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source} must be a JSON mapping.")
    return config, source


def is_hub_name(model: str) -> bool:
    """Whether it has the form of one."""
    return model.count("/") == 1 and not model.startswith((".", "~", "/"))


@functools.cache
def committed() -> dict[str, dict[str, Any]]:
    """models.yaml: by name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMMITTED.read_text(encoding="utf-8"))
    return found


def local_file(model: str, name: str, folders: Sequence[Path] = ()) -> Path | None:
    """The file of that name in a model's folder, or beside a file that `model` names; also of a hub
    name that is in the local cache. None: there is none here."""
    found = documents.first_there(model, (*folders, Path.cwd()))
    if found is not None:
        folder = found if found.is_dir() else found.parent
        if found.is_file() and found.suffix == ".json" and name == "config.json":
            return found
        there = folder / name
        return there if there.is_file() else None
    if embedded.is_embedded(model):
        there = embedded.cache_root() / model.removeprefix(embedded.PREFIX) / name
        return there if there.is_file() else None
    return _cached(model, name)


def _cached(model: str, name: str) -> Path | None:
    if not is_hub_name(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, name)
    except Exception:
        # Whatever the hub's library says of the name: it is not in the cache.
        return None
    return Path(found) if isinstance(found, str) else None


def _downloaded(model: str, download: bool) -> tuple[str, str]:
    """The text of a hub model's config.json, and its address. The hub's own client would try for half a
    minute where there is no network."""
    unknown = f"the sizes of '{clipped(model)}' are neither in plan/models/models.yaml nor in the hub cache"
    if not download:
        raise ConfigError(f"{unknown}; give the path of its config.json.")
    try:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        address = hf_hub_url(model, "config.json")
        asked = urllib.request.Request(address, headers=build_hf_headers())
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return answer.read(_MOST_BYTES).decode("utf-8"), address
    except Exception as error:
        # The hub's client and urllib raise what they like: there is no config.json to be had.
        reason = clipped(str(error).split("\n")[0], 120)
        raise ConfigError(
            f"{unknown}, and its config.json cannot be downloaded ({reason}); give the path of one."
        ) from None


def _size(flat: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = flat.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        said = "has no" if value is None else f"has {shown(value)} for"
        raise ConfigError(
            f"the config.json of {name} {said} '{key}'; it must be a whole number from 1."
        )
    return value
