"""Mended faults of vLLM, each behind a probe that shows the fault before we touch anything."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_specx.engine.patching import wrap

logger = logging.getLogger(f"vllm.{__name__}")

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand_is_wrong() -> bool:
    """Whether this vLLM's CPU rejection sampler loses the sampling parameters at T > 0.

    vllm/utils/cpu_triton_utils.py `_expand_kernel_impl` (0.32, 0.33) writes into a copy of its
    output when that is not int64, so temperature, top_p and top_k of drafted positions are whatever
    the memory held. The probe expands into memory of its own, filled with another value.
    """
    from vllm.v1.sample import rejection_sampler

    for dtype in (torch.float32, torch.int32, torch.int64):
        output = torch.full((3,), 7, dtype=dtype)
        values = torch.tensor([2, 5], dtype=dtype)
        cumulative = torch.tensor([1, 3], dtype=torch.int32)
        rejection_sampler.expand_kernel[(2,)](output, values, cumulative, 5, 4, MAX_NUM_TOKENS=128)
        if output.tolist() != [2, 4, 4]:
            return True
    return False


def expand_kernel(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Repeat each request's value by its number of draft tokens, into `output` itself.

    output: [total drafts]; input_val: [batch], the same dtype; cu_num_tokens: int [batch], cumulative.
    """
    values = torch.where(
        input_val == replace_from, torch.full_like(input_val, replace_to), input_val
    )
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(values, counts)
    output[: expanded.shape[0]] = expanded


def mend_expand_kernel() -> bool:
    """Stock fault 1: register a right `expand_kernel` on a CPU whose own is wrong.

    Goes when `expand_is_wrong()` is False on every supported vLLM. Returns whether it was needed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not expand_is_wrong():
        return False
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({EXPAND_KERNEL: expand_kernel})
    logger.info(
        "vllm_specx: mended vLLM's CPU rejection sampler, which is wrong at temperature > 0."
    )
    return True


def top_k_of_nothing_fails() -> bool:
    """Whether a batch without drafts ends the engine when a request has top_k.

    Every step of a speculating engine goes through the rejection sampler, a prefill too; on a CPU,
    vllm/v1/sample/ops/topk_topp_sampler.py `apply_top_k_only` (0.32, 0.33) then takes the maximum of
    no elements.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    try:
        topk_topp_sampler.apply_top_k_only(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return True
    return False


def mend_top_k_of_nothing() -> bool:
    """Stock fault 6: no rows have no top k. Goes when `top_k_of_nothing_fails()` is False on every
    supported vLLM. Returns whether it was needed."""
    from vllm.v1.sample.ops import topk_topp_sampler

    if not top_k_of_nothing_fails():
        return False
    wrap(topk_topp_sampler, "apply_top_k_only", _apply_top_k_only)
    return True


def _apply_top_k_only(original: Any, logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = original(logits, k) if logits.shape[0] else logits
    return result


def spare_unused_work() -> None:
    """Stock fault 7 (speed): every step of a speculating engine goes through the rejection sampler (0.32
    and 0.33; the runner asks whether speculation is configured, not whether anything is drafted).

    It copies the logits three times, also where nothing is drafted, and draws a whole vocabulary of
    random numbers for each request above T=0, drafted or not, for tokens that could replace rejected
    ones. At batch 32 on a CPU that is a third of a step. Can go when vLLM spares both.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner, "_sample", _sample)
    wrap(rejection_sampler, "sample_recovered_tokens", _sample_recovered_tokens)


def _sample(original: Any, runner: Any, logits: torch.Tensor | None, metadata: Any) -> Any:
    """With trees in the batch: theirs. Without a draft: the way of an engine that does not speculate.

    logits: [requests, vocabulary] then, one row a request in the batch's order. Gives
    `sampled_token_ids` int32 [requests, 1], as the rejection sampler does.
    """
    trees = getattr(getattr(runner, "drafter", None), "trees", None)
    if trees is not None and trees.running:
        return trees.sample(original, runner, logits, metadata)
    if metadata is None or any(metadata.num_draft_tokens):
        return original(runner, logits, metadata)
    output = original(runner, logits, None)
    output.sampled_token_ids = output.sampled_token_ids.to(torch.int32)
    return output


def _sample_recovered_tokens(
    original: Any,
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The same distribution from one random number a draft token, on a CPU.

    Requests with a seed keep vLLM's own way, whose random numbers go by the request's place; other
    devices keep it too, unless nothing is drafted.
    """
    drafted = [i for i, count in enumerate(num_draft_tokens) if count]
    if not drafted:
        return torch.empty_like(draft_token_ids)
    seeded = any(i in sampling_metadata.generators for i in drafted)
    if seeded or not draft_token_ids.is_cpu:
        recovered: torch.Tensor = original(
            max_spec_len,
            num_draft_tokens,
            cu_num_draft_tokens,
            draft_token_ids,
            draft_probs,
            target_probs,
            sampling_metadata,
            *args,
            **kwargs,
        )
        return recovered
    recovered = torch.zeros_like(draft_token_ids)
    counts = torch.tensor(num_draft_tokens)
    sampled = (sampling_metadata.temperature > 0).repeat_interleave(counts).nonzero()[:, 0]
    recovered[sampled] = sample_residual(
        target_probs[sampled],
        draft_token_ids[sampled],
        None if draft_probs is None else draft_probs[sampled],
    ).to(recovered.dtype)
    return recovered


def sample_residual(
    target_probs: torch.Tensor, draft_token_ids: torch.Tensor, draft_probs: torch.Tensor | None
) -> torch.Tensor:
    """int64 [N]: a token in place of each rejected draft token, from max(p - q, 0) made to sum to one.

    target_probs p: float32 [N, V], overwritten; draft_probs q: float32 [N, V], or None where the
    draft was certain of its token; draft_token_ids: int [N]. By the inverse of the cumulative
    distribution (arXiv 2211.17192, theorem 1).
    """
    size, vocab = target_probs.shape
    if draft_probs is None:
        # No draft token lies outside the vocabulary, but a grammar leaves -1 where it forbids one.
        rows = ((draft_token_ids >= 0) & (draft_token_ids < vocab)).nonzero()[:, 0]
        target_probs[rows, draft_token_ids[rows].long()] = 0.0
    else:
        target_probs.sub_(draft_probs).clamp_(min=0.0)
    below = target_probs.cumsum(dim=-1, dtype=torch.float64)
    at = torch.rand(size, 1, dtype=torch.float64) * below[:, -1:]
    chosen = torch.searchsorted(below, at, right=True)[:, 0]
    return chosen.clamp_(max=vocab - 1)
