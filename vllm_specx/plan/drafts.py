"""What a way of drafting takes: bytes that stay on every rank, bytes that a draft step reads, a cache."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_specx import documents
from vllm_specx.config import ConfigError
from vllm_specx.plan.facts import (
    ModelFacts,
    committed,
    facts_of,
    is_hub_name,
    local_file,
    read_config,
    read_facts,
    whole,
)

MEDUSA_HEADS = 4
DRAFT_VOCABULARY = 32_000
"""Of an EAGLE-3 draft that is not there yet: that of the published ones."""
CACHE_BYTES = {"draft_model": 2**31, "eagle": 2**30}
"""The most that a draft's K/V cache takes by default: engine/draft_model.py and engine/eagle.py."""
PAGE = 16
"""Entries in a page of it: draft/paged_cache.py."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Draft:
    """Of one rank. kind: none, model, eagle or medusa.

    resident: bytes of its weights. step: bytes that each of its steps reads; once: those that drafting
    reads once, however many tokens it is. kv: bytes of a token in a cache of its own, cache: bytes of
    that, allocated at the start. kv_shared: bytes of a token in vLLM's own K/V cache.
    most: the tokens that it can draft. max_positions: the longest request that it was made for.
    acceptance: by depth, as its checkpoint says. assumed: what was not known, in sentences.
    """

    kind: str
    name: str = ""
    resident: float = 0.0
    step: float = 0.0
    once: float = 0.0
    kv: float = 0.0
    cache: float = 0.0
    kv_shared: float = 0.0
    most: int | None = None
    max_positions: int | None = None
    acceptance: tuple[float, ...] = ()
    assumed: tuple[str, ...] = field(default=())

    def read_bytes(self, k: int) -> float:
        """Of drafting K tokens."""
        return k * self.step + (self.once if k else 0.0)


NONE = Draft("none")


@dataclass(frozen=True, slots=True)
class Room:
    """What decides the size of a draft's cache. requests: max_num_seqs; tokens: max_model_len;
    entries: the key cache_tokens."""

    requests: int
    tokens: int
    entries: int | None = None

    def cache_bytes(self, kv: float, longest: int, most: int) -> float:
        """kv: bytes of an entry; longest: of a request that is drafted for; most: the default limit."""
        whole = self.requests * -(-longest // PAGE) * PAGE
        usual = min(self.requests * longest, int(most // kv))
        entries = usual if self.entries is None else min(self.entries, whole)
        return -(-entries // PAGE) * PAGE * kv


def draft_model(
    facts: ModelFacts, room: Room, *, own: bool, ranks: int, max_model_len: int | None = None
) -> Draft:
    """A small language model. own: specx:draft_model, whole on every rank with a cache of its own; else
    vLLM's draft_model, on `ranks` ranks with its K/V in vLLM's cache."""
    if not own:
        return Draft(
            "model",
            facts.name,
            resident=facts.weight_bytes / ranks,
            step=facts.read_bytes / ranks,
            kv_shared=facts.kv_bytes(ranks),
            max_positions=facts.max_positions,
        )
    longest = min(max_model_len or facts.max_positions, room.tokens)
    kv = facts.kv_bytes()
    return Draft(
        "model",
        facts.name,
        resident=facts.weight_bytes,
        step=facts.read_bytes,
        kv=kv,
        cache=room.cache_bytes(kv, longest, CACHE_BYTES["draft_model"]),
        max_positions=max_model_len or facts.max_positions,
    )


def eagle(
    name: str,
    target: ModelFacts,
    room: Room,
    *,
    own: bool,
    ranks: int,
    version: int,
    folders: Sequence[Path] = (),
    download: bool = True,
) -> Draft:
    """An EAGLE draft, by its checkpoint, by models.yaml, or, where it is not there yet, of the usual
    sizes. version: taken where nothing else says it. own: specx:eagle, whole on every rank."""
    facts, extra, assumed = _eagle_facts(name, target, version, folders, download)
    version = extra["version"]
    hidden, element = facts.hidden, target.element
    of_target = extra.get("target_hidden_size") or target.hidden
    doubled = (facts.heads + 2 * facts.kv_heads) * facts.head_dim * hidden if version == 3 else 0
    fc = 3 * of_target * hidden if version == 3 else 2 * hidden * hidden
    rows = extra.get("draft_vocab_size") or target.vocab
    head = rows * hidden
    has_head = version == 3 or bool(extra.get("lm_head")) or rows != target.vocab
    embeddings = target.vocab * hidden if extra.get("embeddings") else 0
    layers = facts.linear_parameters + doubled
    resident = layers + fc + (head if has_head else 0) + embeddings
    if own and ranks > 1:
        # Every rank gathers what it has only a part of (engine/eagle.py).
        resident += (0 if embeddings else target.embedding_parameters) + (0 if has_head else head)
    shared = 1 if own else ranks
    kv = facts.kv_bytes(shared, element)
    edge = -(-hidden // PAGE) * element
    return Draft(
        "eagle",
        name,
        resident=resident * element / shared,
        step=(layers + head + (fc if version == 1 else 0)) * element / shared,
        once=fc * element / shared if version == 3 else 0.0,
        kv=kv + edge if own else 0.0,
        cache=room.cache_bytes(kv + edge, room.tokens, CACHE_BYTES["eagle"]) if own else 0.0,
        kv_shared=0.0 if own else kv,
        max_positions=facts.max_positions,
        acceptance=tuple(extra.get("acceptance", ())),
        assumed=assumed,
    )


def medusa(
    name: str,
    target: ModelFacts,
    *,
    own: bool,
    ranks: int,
    folders: Sequence[Path] = (),
    k: int = 0,
) -> Draft:
    """Draft heads, by their checkpoint or, where it is not there yet, of one block a head."""
    found = documents.first_there(name, (*folders, Path.cwd())) if name else None
    hidden, element = target.hidden, target.element
    config: dict[str, Any] = {}
    assumed: tuple[str, ...] = ()
    if found is None:
        heads = k or MEDUSA_HEADS
        assumed = (
            f"the heads '{name}' are not here: {heads} parallel heads of one block and the target's "
            "lm_head are assumed",
        )
        most: int | None = heads
        stored = blocks = heads * hidden * hidden
        rows = target.vocab
    else:
        config, shapes = checkpoint(found)
        head = _rows(shapes, hidden)
        stored = sum(_size(shape) for name, shape in shapes.items() if not _is_table(name))
        blocks = stored - head * hidden
        rows = _draft_rows(config, name) or head or target.vocab
        most = whole(config, "num_heads", name) or whole(config, "medusa_num_heads", name)
    if own and stored == blocks and (ranks > 1 or rows < target.vocab):
        # Rows of the target's lm_head that every rank keeps for itself (engine/heads.py).
        stored += rows * hidden
    read = (blocks + rows * hidden) * element
    sequential = is_sequential(config)
    return Draft(
        "medusa",
        name,
        resident=stored * element,
        step=read if sequential else 0.0,
        once=0.0 if sequential else read,
        most=most,
        acceptance=_acceptance(config),
        assumed=assumed,
    )


def kind_of(name: str, folders: Sequence[Path] = ()) -> str:
    """Of a trained draft: model, medusa or eagle, by its checkpoint, by models.yaml, or by its name."""
    found = documents.first_there(name, (*folders, Path.cwd())) if name else None
    if found is None:
        entry = committed().get(name)
        if entry is not None:
            return "eagle" if "eagle" in entry else "model"
        said = name.lower()
        return next((kind for kind in ("medusa", "eagle") if kind in said), "model")
    try:
        config, shapes = checkpoint(found)
    except ConfigError:
        return "eagle"
    own = config.get("specx")
    if config.get("model_type") == "medusa" or (isinstance(own, Mapping) and "conditioning" in own):
        return "medusa"
    names = " ".join(sorted(shapes))
    if ".self_attn." not in names:
        return "medusa" if shapes else "eagle"
    return "eagle" if "fc.weight" in names else "model"


def is_sequential(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds sequential heads, each of which reads the lm_head again."""
    own = config.get("specx")
    return isinstance(own, Mapping) and own.get("conditioning") == "hydra"


def checkpoint(path: Path) -> tuple[dict[str, Any], Shapes]:
    """The config.json ({} if there is none) and the shapes of the tensors of a folder or file: those of
    .safetensors by their headers; others are not looked into. Raises ConfigError."""
    folder = path if path.is_dir() else path.parent
    config: Any = {}
    if (folder / "config.json").is_file():
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} must be a JSON mapping.")
    files = [path] if path.is_file() else sorted(folder.glob("*.safetensors"))
    shapes: Shapes = {}
    for file in files:
        if file.suffix == ".safetensors":
            shapes |= header(file)
    return config, shapes


def header(file: Path) -> Shapes:
    """Names and shapes in a .safetensors file. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > 100 * 2**20:
                raise ValueError("its header is longer than any")
            data = json.loads(opened.read(length))
        return {n: tuple(each["shape"]) for n, each in data.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise ConfigError(f"{file} cannot be read; it may be truncated, copy it again.") from None


def _eagle_facts(
    name: str, target: ModelFacts, version: int, folders: Sequence[Path], download: bool
) -> tuple[ModelFacts, dict[str, Any], tuple[str, ...]]:
    """The sizes of its layers, what else is known of it, and what was assumed."""
    if (entry := committed().get(name)) is not None and "eagle" in entry:
        return facts_of(name, entry["config"], entry["source"]), dict(entry["eagle"]), ()
    found = documents.first_there(name, (*folders, Path.cwd())) if name else None
    file = None if found is None else local_file(name, "config.json", folders)
    if found is None and is_hub_name(name):
        try:
            config, source = read_config(name, folders, download=download)
            return facts_of(name, _flat(config), source), _said(name, config, {}, version), ()
        except ConfigError:
            pass
    if found is None or file is None:
        extra = {"version": version}
        if version == 3:
            extra["draft_vocab_size"] = min(DRAFT_VOCABULARY, target.vocab)
        said = (
            f"the draft '{name}' is not here: an EAGLE{'-3' if version == 3 else ''} draft of one of the "
            "target's layers is assumed"
        )
        sizes = {
            "model_type": "llama",
            "hidden_size": target.hidden,
            "intermediate_size": target.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab,
            "max_position_embeddings": target.max_positions,
        }
        return facts_of(name, sizes, "assumed"), extra, (said,)
    config, shapes = checkpoint(found)
    return facts_of(name, _flat(config), str(file)), _said(name, config, shapes, version), ()


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's sizes, which some layouts have under another key (draft/eagle_keys.py)."""
    for key in ("model", "transformer_layer_config"):
        if isinstance(inner := config.get(key), Mapping):
            return {**config, **inner}
    return dict(config)


def _said(name: str, config: Mapping[str, Any], shapes: Shapes, version: int) -> dict[str, Any]:
    own = config.get("specx")
    own = own if isinstance(own, dict) else {}
    named = f"{config.get('architectures')} {config.get('speculators_model_type')}"
    bare = {name.removeprefix("model.") for name in shapes}
    if (
        "eagle3" in named.lower()
        or "midlayer.hidden_norm.weight" in bare
        or own.get("version") == 3
    ):
        version = 3
    elif shapes or own.get("version") == 1:
        version = 1
    return {
        "version": version,
        "draft_vocab_size": _draft_rows(config, name),
        "target_hidden_size": whole(config, "target_hidden_size", name),
        "embeddings": "embed_tokens.weight" in bare,
        "lm_head": "lm_head.weight" in bare,
        "acceptance": _acceptance(config),
    }


def _draft_rows(config: Mapping[str, Any], name: str) -> int | None:
    """The size of the draft vocabulary; None: the target's."""
    keys = ("truncated_vocab_size", "draft_vocab_size")
    return next((rows for key in keys if (rows := whole(config, key, name))), None)


def _acceptance(config: Mapping[str, Any]) -> tuple[float, ...]:
    own = config.get("specx")
    said = own.get("acceptance") if isinstance(own, dict) else None
    if not isinstance(said, list):
        return ()
    right = (isinstance(a, int | float) and not isinstance(a, bool) and 0 <= a <= 1 for a in said)
    return tuple(map(float, said)) if all(right) else ()


def _is_table(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("token_map", "d2t", "t2d")


def _rows(shapes: Shapes, hidden: int) -> int:
    """Rows of all lm_heads in the file."""
    return sum(s[0] for n, s in shapes.items() if "lm_head" in n and len(s) == 2 and s[1] == hidden)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def read_draft_model(name: str, folders: Sequence[Path], *, download: bool = True) -> ModelFacts:
    """The facts of a draft model. Raises ConfigError."""
    return read_facts(name, folders, download=download)
