"""vLLM's own draft_model with a draft whose vocabulary is padded otherwise than the target's.

vLLM (0.32 and 0.33, SpeculativeConfig.verify_equal_vocab_size_if_draft_model) compares the sizes with
their padding, and so refuses Qwen2.5-0.5B (151936) for Qwen2.5-72B (152064), which have one tokenizer
(vLLM issue 42775). Beside specx, tokens that mean the same are enough, if drafts are greedy, which is the
default, and no id of the draft lies outside of the target's vocabulary. Goes when vLLM compares tokenizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_specx.config import ConfigError
from vllm_specx.draft.vocabularies import draftable, read_vocabulary
from vllm_specx.engine.patching import wrap

logger = logging.getLogger(f"vllm.{__name__}")
_held_back = False


@contextmanager
def held_back() -> Iterator[None]:
    """vLLM does not compare meanwhile: check() does, once the configuration is there."""
    global _held_back
    before = _held_back
    hold_back()
    try:
        yield
    finally:
        _held_back = before


def hold_back() -> None:
    """From now on vLLM does not compare; for workers, whose configuration was checked."""
    global _held_back
    from vllm.config import SpeculativeConfig

    wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _verify)
    _held_back = True


def _verify(original: Any, speculative: Any) -> None:
    if not _held_back:
        original(speculative)


def check(speculative: Any) -> None:
    """A SpeculativeConfig that selects specx. Raises ConfigError where its draft does not go together
    with the target."""
    if speculative is None or speculative.method != "draft_model":
        return
    if getattr(speculative, "use_heterogeneous_vocab", False):
        return
    target, draft = speculative.target_model_config, speculative.draft_model_config
    rows = target.get_vocab_size(), draft.get_vocab_size()
    if rows[0] == rows[1]:
        return
    greedy = getattr(speculative, "draft_sample_method", "greedy") == "greedy"
    if rows[1] > rows[0] or not greedy:
        raise ConfigError(
            f"{draft.model} has {rows[1]} rows of vocabulary and the target {rows[0]}, and vLLM's "
            "draft_model needs as many, or fewer and greedy drafts; use specx:draft_model."
        )
    vocabularies = [
        read_vocabulary(target.tokenizer, target.tokenizer_revision),
        # Its `tokenizer` is the target's.
        read_vocabulary(draft.model, draft.revision),
    ]
    if None in vocabularies:
        raise ConfigError(
            f"{draft.model} has {rows[1]} rows of vocabulary and the target {rows[0]}, and without both "
            "tokenizers nothing says which tokens are the same; use a draft with as many rows."
        )
    ids = draftable(*vocabularies, rows=rows, names=(target.model, draft.model))
    if ids.never:
        raise ConfigError(
            f"{draft.model} has other tokens than the target, the first of {len(ids.never)} with id "
            f"{ids.never[0]}, which vLLM's draft_model would draft; use specx:draft_model."
        )
    logger.info(
        "vllm_specx: the draft has %d rows of vocabulary and the target %d, with the same %d tokens.",
        rows[1],
        rows[0],
        ids.size,
    )
