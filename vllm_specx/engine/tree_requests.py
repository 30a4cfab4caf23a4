"""Which requests can have trees, and which models."""

from __future__ import annotations

from typing import Any

from vllm_specx.config import ConfigError


def why_a_chain(params: Any) -> str | None:
    """Why a request's drafts are chains, by its SamplingParams; None: they may be trees.

    What depends on the tokens before it (penalties, bad words), on a grammar, or on a state that vLLM keeps
    once a request, is right along one path only.
    """
    if params is None:
        return "pooling"
    if params.structured_outputs is not None:
        return "structured_output"
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.bad_words:
        return "bad_words"
    if params.min_tokens:
        return "min_tokens"
    if params.logit_bias:
        return "logit_bias"
    if params.allowed_token_ids:
        return "allowed_token_ids"
    if params.min_p:
        return "min_p"
    if params.logprobs is not None or getattr(params, "logprob_token_ids", None):
        return "logprobs"
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_token_budget"
    return None


def drawn_by_seed(params: Any) -> bool:
    """Whether a request's tokens come from random numbers of its own. Walked down as trees are, its drafts
    use these as decoding without drafts does; vLLM's rejection sampler uses them up by what was drafted."""
    return params is not None and params.seed is not None and params.temperature > 0


_PLAIN: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, -1, (-1, -1)),
    "alibi_slopes": (None,),
    "logits_soft_cap": (None, 0),
    "sinks": (None,),
    "attn_type": ("decoder",),
    "kv_sharing_target_layer_name": (None,),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
}
_PLAIN_IF_THERE: dict[str, Any] = {"use_alibi_sqrt": False, "chunk_lookback": -1}


def is_plain(impl: Any) -> bool:
    """Whether an attention implementation is nothing but softmax(q k) v over all that came before."""
    plain = all(hasattr(impl, n) and getattr(impl, n) in kinds for n, kinds in _PLAIN.items())
    return plain and all(getattr(impl, n, kind) == kind for n, kind in _PLAIN_IF_THERE.items())


def check_model(vllm_config: Any) -> None:
    """Raises ConfigError where trees cannot be verified; asked before anything is loaded."""
    for reason in _reasons(vllm_config):
        raise ConfigError(f"'tree' does not go with {reason}; take 'tree' out, or the other.")


def _reasons(vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    text = model.hf_text_config
    reasons = {
        "a KV connector (kv_transfer_config), which would save entries before they are final": (
            vllm_config.kv_transfer_config is not None
        ),
        "custom logits processors": bool(model.logits_processors),
        "sliding window attention": getattr(text, "sliding_window", None) is not None
        and getattr(text, "use_sliding_window", True),
        "sliding window attention beside the prompt (R-SWA)": (
            getattr(model, "rswa_window", None) is not None
        ),
        "latent attention (MLA)": bool(getattr(model, "use_mla", False)),
        "a soft cap of attention": bool(getattr(text, "attn_logit_softcapping", None)),
        "ALiBi": bool(getattr(text, "alibi", False)),
        "M-RoPE": bool(getattr(model, "uses_mrope", False)),
        "hybrid models": bool(getattr(model, "is_hybrid", False)),
        "an encoder": bool(getattr(model, "is_encoder_decoder", False)),
        "a quantized K/V cache (kv_cache_dtype)": (
            str(vllm_config.cache_config.cache_dtype) not in ("auto", str(model.dtype)[6:])
        ),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "decode context parallelism": (
            getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1
        ),
    }
    return [what for what, holds in reasons.items() if holds]
