"""The few places where we reach into vLLM. Each names its target, why, and when it can go."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any, get_args

from vllm_specx import config
from vllm_specx.config import ConfigError
from vllm_specx.engine import (
    contract,
    metrics_worker,
    padded_vocabulary,
    tree_graphs,
    tree_requests,
)
from vllm_specx.engine.patching import wrap
from vllm_specx.engine.steering import VARYING
from vllm_specx.engine.translate import SELECTED, translate
from vllm_specx.engine.v2 import seams as v2_seams

logger = logging.getLogger(f"vllm.{__name__}")


def install_entry_seams() -> None:
    """The seams that every process gets when the plugin is loaded."""
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.worker_base import WorkerWrapperBase
    except ImportError:
        return  # an unknown vLLM: quiet; the contract speaks up when specx is selected
    if hasattr(EngineArgs, "create_engine_config"):
        wrap(EngineArgs, "create_engine_config", _create_engine_config)
    if hasattr(WorkerWrapperBase, "init_device"):
        wrap(WorkerWrapperBase, "init_device", _init_device)
    v2_seams.install_entry_seams()


def install_runner_seams() -> None:
    """The seams of the worker, once specx is selected."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_specx.engine import draft_probs, step, trees

    wrap(
        GPUModelRunner,
        "propose_draft_token_ids",
        metrics_worker.timed(step.propose_draft_token_ids),
    )
    wrap(GPUModelRunner, "take_draft_token_ids", metrics_worker.told(step.take_draft_token_ids))
    wrap(GPUModelRunner, "_input_fits_in_drafter", step.input_fits_in_drafter)
    wrap(GPUModelRunner, "_prepare_inputs", trees.prepare_inputs)
    wrap(GPUModelRunner, "_get_spec_decode_draft_probs", draft_probs.spec_decode_draft_probs)
    wrap(
        GPUModelRunner,
        "_setup_eagle3_aux_hidden_state_outputs",
        step.setup_auxiliary_states,
    )


def activate_worker(vllm_config: Any) -> None:
    """Make this worker process ready for a configuration that selects specx."""
    from vllm_specx.engine import shims

    contract.check()
    if vllm_config.use_v2_model_runner:
        v2_seams.install_runner_seams()
        return
    install_runner_seams()
    shims.mend_expand_kernel()
    shims.mend_top_k_of_nothing()
    shims.spare_unused_work()
    padded_vocabulary.hold_back()


def selected(vllm_config: Any) -> bool:
    """Whether a VllmConfig selects specx."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and SELECTED in additional


def _init_device(original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """WorkerWrapperBase.init_device: the first call in a worker after plugins are loaded that knows
    the configuration. Can go when vLLM calls plugins with the configuration."""
    if selected(wrapper.vllm_config):
        activate_worker(wrapper.vllm_config)
    return original(wrapper, *args, **kwargs)


def _create_engine_config(
    original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """EngineArgs.create_engine_config: the one place where a configuration can be translated and
    refused before anything is loaded. Can go when vLLM lets plugins add methods."""
    usage = kwargs.get("usage_context", args[0] if args else None)
    before = engine_args.speculative_config
    try:
        _translate_engine_args(engine_args)
        v2_seams.check(engine_args)
        tree_graphs.leave_attention_out(engine_args)
    except ConfigError as error:
        _refuse(error, usage)
    if SELECTED not in (engine_args.additional_config or {}):
        return original(engine_args, *args, **kwargs)
    asked_async = v2_seams.hold_async(engine_args)
    try:
        with padded_vocabulary.held_back():
            vllm_config = original(engine_args, *args, **kwargs)
    except Exception as error:
        error.add_note(f"vllm_specx: the speculative config was written as {before!r}")
        raise
    finally:
        engine_args.async_scheduling = asked_async
    try:
        settings = config.parse(vllm_config.additional_config[SELECTED])
        v2_seams.settle(vllm_config, settings, engine_args, asked_async)
        _choose_scheduler(vllm_config, settings)
        _check_draft(vllm_config, settings)
        padded_vocabulary.check(vllm_config.speculative_config)
        _install_metrics()
    except ConfigError as error:
        _refuse(error, usage)
    return vllm_config


def _install_metrics() -> None:
    from vllm_specx.engine import metrics_logger

    metrics_logger.install()


def _choose_scheduler(vllm_config: Any, settings: config.SpecxConfig) -> None:
    """Our scheduler, synchronous or not as vLLM decided."""
    scheduler = vllm_config.scheduler_config
    if vllm_config.speculative_config is None:
        return
    if scheduler.scheduler_cls is not None:
        logger.warning(
            "vllm_specx: the scheduler is %s, so the draft length does not follow acceptance, and "
            "cache_salt does not separate the n-gram pools.",
            scheduler.scheduler_cls,
        )
        return
    _refuse_diverging_ranks(vllm_config, settings)
    name = "SpecxAsyncScheduler" if scheduler.async_scheduling else "SpecxScheduler"
    scheduler.scheduler_cls = v2_seams.scheduler_of(vllm_config, name)


def _check_draft(vllm_config: Any, settings: config.SpecxConfig) -> None:
    """A draft that does not fit is refused here, before the target is loaded."""
    if config.tree_of(settings) is not None:
        tree_requests.check_model(vllm_config)
    if isinstance(settings, config.NgramConfig | config.StockConfig):
        return
    from vllm_specx.draft.checkpoints import load_heads
    from vllm_specx.engine.draft_model import read_draft_model
    from vllm_specx.engine.eagle import read_draft, target_shape
    from vllm_specx.engine.heads import local_folder, trained_part

    model = vllm_config.model_config
    part = trained_part(settings)
    if isinstance(part, config.DraftModelConfig):
        read_draft_model(part, model, values=False)
        return
    shape = target_shape(model, model.dtype)
    if isinstance(part, config.MedusaConfig):
        load_heads(local_folder(part.heads), shape)
    elif part is not None and (layers := read_draft(part, shape).aux_layers):
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{part.heads} reads states of the target's inner layers, which vLLM's V1 runner does not "
                "pass on from one pipeline stage to the next: serve it with tensor parallelism, or use "
                "an EAGLE-1 or Medusa draft, or specx:ngram."
            )
        # The target's compiled graph has these outputs, and this is part of its hash.
        vllm_config.additional_config[SELECTED]["aux_layers"] = list(layers)


def _refuse_diverging_ranks(vllm_config: Any, settings: config.SpecxConfig) -> None:
    """Ranks that step together must draft equally often; each has a controller of its own."""
    parallel = vllm_config.parallel_config
    together = parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe
    chosen = settings.controller.enabled and settings.controller.static_k is None
    drafts_by_forward = vllm_config.speculative_config.method not in VARYING
    if settings.proposer == "stock" and together and chosen and drafts_by_forward:
        raise ConfigError(
            f"data parallelism of {parallel.data_parallel_size} with a mixture of experts steps all ranks "
            "together, and each would choose its own draft length: set specx.controller.static_k."
        )


def _translate_engine_args(engine_args: Any) -> None:
    from vllm.config import SpeculativeConfig

    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    written = engine_args.speculative_config
    flags = {
        "method": getattr(engine_args, "spec_method", None),
        "model": getattr(engine_args, "spec_model", None),
        "num_speculative_tokens": getattr(engine_args, "spec_tokens", None),
    }
    ours = str((written or {}).get("method", flags["method"])).startswith("specx:")
    if ours:
        for key, value in flags.items():
            if value is not None:
                if key in (written or {}):
                    raise ConfigError(
                        f"'{key}' is given both as a flag and in the speculative config; keep one."
                    )
                written = {**(written or {}), key: value}
    speculative, additional = translate(
        written,
        engine_args.additional_config,
        vllm_methods=_methods(),
        vllm_keys=frozenset(fields),
    )
    if SELECTED not in additional:
        return
    contract.check()
    if ours:
        engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = speculative
    engine_args.additional_config = additional


def _methods() -> frozenset[str]:
    from vllm.config import speculative

    def flatten(value: Any) -> set[str]:
        return (
            {value}
            if isinstance(value, str)
            else {m for arg in get_args(value) for m in flatten(arg)}
        )

    return frozenset(flatten(speculative.SpeculativeMethod))


def _refuse(error: ConfigError, usage: Any) -> None:
    """In `vllm serve`: one sentence and exit status 2. In `LLM(...)`: the exception."""
    if getattr(usage, "name", "") == "OPENAI_API_SERVER":
        print(f"vllm_specx: {error}", file=sys.stderr)
        raise SystemExit(2)
    raise error
