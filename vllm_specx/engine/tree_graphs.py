"""CUDA graphs beside draft trees."""

from __future__ import annotations

import copy
import logging
from typing import Any

from vllm_specx import config
from vllm_specx.engine.translate import SELECTED

logger = logging.getLogger(f"vllm.{__name__}")


def leave_attention_out(engine_args: Any) -> None:
    """Set cudagraph_mode so that no graph has the attention in it: a full one is replayed without Python, hence
    without trees.

    Before vLLM makes its configuration from these EngineArgs, so that it does with the rest what belongs to
    PIECEWISE; what it makes of it is looked at again once it is settled (tree_gpu.can_be_ours). Can go when
    masks and plans are in buffers that graphs can be captured with.
    """
    raw = (engine_args.additional_config or {}).get(SELECTED)
    if raw is None or config.tree_of(config.parse(raw)) is None:
        return
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    asked = engine_args.compilation_config.cudagraph_mode
    if engine_args.enforce_eager or (asked is not None and not asked.has_full_cudagraphs()):
        return
    changed = copy.copy(engine_args.compilation_config)
    changed.cudagraph_mode = CUDAGraphMode.PIECEWISE
    engine_args.compilation_config = changed
    logger.info(
        "vllm_specx: cudagraph_mode is PIECEWISE, as full CUDA graphs cannot have draft trees in them."
    )
