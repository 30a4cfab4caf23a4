"""A recipe as the planner and the doctor look at it: the target, the way of drafting, the flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.engine.translate import PREFIX, proposer_of
from vllm_specx.plan import drafts
from vllm_specx.plan.drafts import Draft, Room
from vllm_specx.plan.facts import DTYPE_BYTES, ModelFacts, read_facts
from vllm_specx.plan.memory import UTILIZATION, Use
from vllm_specx.plan.quantization import ONLINE
from vllm_specx.recipes.schema import Recipe, Speculation

DEFAULT_K = 5
REQUESTS, BATCHED_TOKENS = 256, 2048
"""vllm/engine/arg_utils.py: max_num_seqs and max_num_batched_tokens of a server, on most GPUs."""
LARGE_REQUESTS, LARGE_BATCHED_TOKENS = 1024, 8192
"""Of GPUs from 70 GiB on that are no A100."""
_HUMAN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([kKmMgG]?)")
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""vllm/utils/argparse_utils.py: human_readable_int."""
_STOCK_DRAFTS = {"draft_model": "model", "eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}
_OUR_DRAFTS = {"draft_model": "model", "eagle": "eagle", "medusa": "medusa", "auto": "auto"}


@dataclass(frozen=True, slots=True)
class Pairing:
    """folders: what relative paths are relative to.

    kind: none, ngram, model, eagle, medusa, or other for methods that the planner does not know; of
    specx:auto that of its trained draft, and auto is set. own: drafted by this package, so whole on every rank. with_specx: one of vLLM's methods with `specx`
    beside it. draft_ranks: draft_tensor_parallel_size. k: the most draft tokens; None: not said.
    """

    recipe: Recipe
    folders: tuple[Path, ...]
    kind: str
    auto: bool
    own: bool
    with_specx: bool
    draft_ranks: int
    k: int | None

    @property
    def method(self) -> str | None:
        """As the recipe writes it."""
        return None if self.recipe.speculation is None else self.recipe.speculation.method

    @property
    def draft_name(self) -> str:
        """The draft's checkpoint; empty if there is none."""
        speculation = self.recipe.speculation
        if speculation is None:
            return ""
        extra = speculation.model_extra or {}
        for value in (speculation.model, extra.get("heads"), extra.get("draft")):
            if isinstance(value, str):
                return value
        return ""

    @property
    def ranks(self) -> int:
        """Tensor-parallel ones of the target."""
        return max(1, self.recipe.tensor_parallel_size)

    @property
    def stages(self) -> int:
        """Pipeline-parallel ones."""
        return self.integer("pipeline-parallel-size") or 1

    def integer(self, flag: str) -> int | None:
        """The value of a flag of vllm serve, also as vLLM lets it be written (`32k`, `1.5M`); None: not
        set, no number, or not from 1 up (`auto`, -1)."""
        value = self.recipe.serve.get(flag)
        match = _HUMAN.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is not None:
            value = int(float(match[1]) * _TIMES[match[2]])
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return int(value) if whole else None  # type: ignore[arg-type]

    def number(self, flag: str, default: float) -> float:
        """As integer(), also with a fraction."""
        value = self.recipe.serve.get(flag)
        return float(value) if isinstance(value, int | float) and value else default

    def key(self, name: str) -> Any:
        """A key of the method's mapping."""
        speculation = self.recipe.speculation
        return None if speculation is None else (speculation.model_extra or {}).get(name)

    def target(self, *, download: bool = True) -> ModelFacts:
        """The target as its flags make it: dtype and `quantization`. Raises ConfigError."""
        if self.recipe.model is None:
            raise ConfigError(
                f"recipe '{self.recipe.name}' names no model; set MODEL to a folder or a hub name."
            )
        facts = read_facts(self.recipe.model, self.folders, download=download)
        return self._as_served(facts)

    def _as_served(self, facts: ModelFacts) -> ModelFacts:
        dtype = self.recipe.serve.get("dtype")
        facts = replace(facts, element=DTYPE_BYTES.get(str(dtype), facts.element))
        online = ONLINE.get(str(self.recipe.serve.get("quantization")))
        if online is not None and facts.quantization is None:
            facts = replace(facts, quantization=online)
        return facts

    def max_model_len(self, target: ModelFacts) -> int:
        """Of the server: the flag, else what the target says."""
        return self.integer("max-model-len") or target.max_positions

    def room(self, target: ModelFacts, *, large: bool = False) -> Room:
        """What decides the size of the draft's cache. large: see LARGE_REQUESTS."""
        requests = self.integer("max-num-seqs") or (LARGE_REQUESTS if large else REQUESTS)
        entries = self.key("cache_tokens")
        return Room(
            requests,
            self.max_model_len(target),
            entries if isinstance(entries, int) else None,
        )

    def use(self, *, large: bool = False) -> Use:
        """How the target is served."""
        kv = str(self.recipe.serve.get("kv-cache-dtype", "auto"))
        batched = self.integer("max-num-batched-tokens")
        return Use(
            ranks=self.ranks,
            stages=self.stages,
            batched_tokens=batched or (LARGE_BATCHED_TOKENS if large else BATCHED_TOKENS),
            requests=self.integer("max-num-seqs") or (LARGE_REQUESTS if large else REQUESTS),
            k=self.k or 0,
            utilization=self.number("gpu-memory-utilization", UTILIZATION),
            kv_element=1.0 if kv.startswith("fp8") or kv == "int8" else None,
        )

    def draft(self, target: ModelFacts, *, large: bool = False, download: bool = True) -> Draft:
        """What drafting takes. Raises ConfigError."""
        room, name = self.room(target, large=large), self.draft_name
        if self.kind == "model":
            return drafts.draft_model(
                self.draft_facts(download=download),
                room,
                own=self.own,
                ranks=self.draft_ranks,
                max_model_len=self.key("max_model_len"),
            )
        if self.kind == "medusa":
            return drafts.medusa(
                name, target, own=self.own, ranks=self.ranks, folders=self.folders, k=self.k or 0
            )
        if self.kind == "eagle":
            return drafts.eagle(
                name,
                target,
                room,
                own=self.own,
                ranks=self.ranks if self.own else self.draft_ranks,
                version=3 if "3" in (self.method or "") or "eagle3" in name.lower() else 1,
                folders=self.folders,
                download=download,
            )
        return replace(drafts.NONE, kind=self.kind)

    def draft_facts(self, *, download: bool = True) -> ModelFacts:
        """Of a draft model. Raises ConfigError."""
        facts = drafts.read_draft_model(self.draft_name, self.folders, download=download)
        given = DTYPE_BYTES.get(str(self.key("dtype")))
        if self.own and given is None:
            given = DTYPE_BYTES.get(str(self.recipe.serve.get("dtype")))
        return replace(facts, element=given or facts.element)


def pairing(recipe: Recipe, folders: Sequence[Path] = ()) -> Pairing:
    """The recipe, looked at. folders: what its relative paths may be relative to."""
    speculation = recipe.speculation
    if speculation is None:
        return Pairing(recipe, tuple(folders), "none", False, False, False, 1, None)
    own = speculation.method.startswith(PREFIX)
    kind = _kind(speculation, own)
    ranks = (
        1 if own else speculation.draft_tensor_parallel_size or max(1, recipe.tensor_parallel_size)
    )
    found = Pairing(
        recipe,
        tuple(folders),
        kind,
        kind == "auto",
        own,
        not own and "specx" in (speculation.model_extra or {}),
        ranks,
        speculation.num_speculative_tokens,
    )
    if not found.auto:
        return found
    return replace(found, kind=drafts.kind_of(found.draft_name, found.folders))


def _kind(speculation: Speculation, own: bool) -> str:
    if own:
        name = proposer_of(speculation.method)
        return _OUR_DRAFTS.get(name, name)
    if speculation.method in ("ngram", "suffix", "ngram_gpu"):
        return "ngram"
    return _STOCK_DRAFTS.get(speculation.method, "other")
