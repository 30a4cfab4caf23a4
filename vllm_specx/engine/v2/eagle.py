"""EAGLE-3 drafts on Model Runner V2: vLLM's own speculator there, under our controller."""

from __future__ import annotations

from typing import Any

from vllm_specx import config
from vllm_specx.draft.checkpoint_files import read_checkpoint
from vllm_specx.engine.heads import local_folder

_NOT_STOCK = ("vocab", "min_probability", "token_cost", "cache_tokens", "aux_layers")


def stock_obstacle(settings: config.EagleConfig) -> str | None:
    """What keeps vLLM's own `eagle3` from serving this draft; None: nothing.

    Raises CheckpointError if the checkpoint cannot be read.
    """
    if given := [key for key in _NOT_STOCK if getattr(settings, key) is not None]:
        return f"knows no {given[0]}"
    tensors, written = read_checkpoint(local_folder(settings.heads))
    if not any("Eagle3" in str(name) for name in written.get("architectures") or ()):
        return (
            f"is taken for EAGLE-3 checkpoints in vLLM's layout only, which {settings.heads} is not"
        )
    if not any(name.endswith("lm_head.weight") for name in tensors):
        # vLLM would load it without a word, and draft from weights that nobody has set.
        return f"needs the draft's own lm_head, and {settings.heads} takes rows of the target's"
    return None


def as_stock(
    settings: config.EagleConfig | config.AutoConfig, speculative: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(speculative_config, specx) that have vLLM draft and our controller choose K; of AutoConfig, with
    the n-gram lookahead beside it (auto_eagle.py)."""
    drafts = {
        "method": "eagle3",
        "model": str(local_folder(settings.heads)),
        "num_speculative_tokens": speculative["num_speculative_tokens"],
    }
    if isinstance(settings, config.AutoConfig):
        return drafts, settings.model_dump(exclude_unset=True) | {"proposer": "auto"}
    controller = settings.controller.model_dump(exclude_unset=True)
    return drafts, {"proposer": "stock", "controller": controller}
