"""Full CUDA graphs for each K that the controller chooses on Model Runner V2.

vLLM captures graphs of uniform decoding for the K that its table of K by batch size names
(v1/worker/gpu/cudagraph_utils.py, CudaGraphManager._init_candidates), and for no other. So we give it a
table that names ours, over and over, so that each is there for batches of every size; the scheduler never
follows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import log
from typing import Any

from vllm_specx.control.settings import ControllerConfig

ALL_UP_TO = 4
"""From here on only powers of two: every K costs a graph for each batch size."""
USUAL_MAX_NUM_SEQS = 1024
"""Batch sizes in the table where the user does not say how many requests may run."""
Table = list[tuple[int, int, int]]


def rungs(settings: ControllerConfig, max_k: int) -> list[int]:
    """The K that are chosen from, the ones to capture first in front; empty: all are max_k.

    max_k: num_speculative_tokens.
    """
    if not settings.enabled:
        return []
    if settings.static_k is not None:
        static = min(settings.static_k, max_k)
        return [static, 0] if 0 < static < max_k else []
    most = max_k if settings.k_max is None else min(settings.k_max, max_k)
    found = [most, 0, *(k for k in (1, 2, 4, 3) if k < most)]
    k = 2 * ALL_UP_TO
    while k < most:
        found.append(k)
        k *= 2
    return list(dict.fromkeys(found))


def table_of(ks: Sequence[int], max_num_seqs: int | None) -> Table:
    """num_speculative_tokens_per_batch_size that has vLLM capture these K for all batch sizes.

    Where fewer requests may run than there are K, the last ones have no place in it, and run without
    full graphs.
    """
    size = max_num_seqs or USUAL_MAX_NUM_SEQS
    return [(batch, batch, ks[(batch - 1) % len(ks)]) for batch in range(1, size + 1)]


def nearest(ks: Sequence[int], k: int) -> int:
    """The K of ks that is nearest to k by ratio; k itself if ks is empty."""
    return min(ks, key=lambda each: (abs(log((1 + each) / (1 + k))), -each), default=k)


@contextmanager
def cut_to(speculative_config: Any, depth: int) -> Iterator[None]:
    """Within it, the table names no K above depth."""
    table = speculative_config.num_speculative_tokens_per_batch_size
    if table is not None:
        cut = [(first, last, min(k, depth)) for first, last, k in table]
        speculative_config.num_speculative_tokens_per_batch_size = cut
    try:
        yield
    finally:
        speculative_config.num_speculative_tokens_per_batch_size = table


def complete_candidates(original: Callable[..., None], manager: Any) -> None:
    """CudaGraphManager._init_candidates: where graphs of several K are captured, vLLM looks for a batch's
    graph among those of the next larger number of tokens only, of whichever K they are. We add to each
    number of tokens the next larger graph of every K. Can go when vLLM does."""
    original(manager)
    from vllm.config.compilation import CUDAGraphMode

    ladders: dict[tuple[int, int, int], list[Any]] = {}
    for desc in reversed(manager._capture_descs.get(CUDAGraphMode.FULL, ())):
        if desc.uniform_token_count is not None:
            kind = (desc.num_active_loras, desc.uniform_token_count, desc.num_ubatches)
            ladders.setdefault(kind, []).append(desc)
    for (tokens, loras), candidates in manager._candidates.items():
        for kind, ladder in ladders.items():
            at = bisect_left(ladder, tokens, key=lambda desc: desc.num_tokens)
            if kind[0] == loras and at < len(ladder) and ladder[at] not in candidates:
                candidates.insert(0, ladder[at])
