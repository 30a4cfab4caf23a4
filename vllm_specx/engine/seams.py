"""The few places where we reach into vLLM. Each names its target, why, and when it can go."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, get_args

from vllm_specx.config import ConfigError
from vllm_specx.engine import contract
from vllm_specx.engine.patching import wrap
from vllm_specx.engine.translate import SELECTED, translate


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


def install_runner_seams() -> None:
    """The seams of the worker, once specx is selected."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_specx.engine import step

    wrap(GPUModelRunner, "propose_draft_token_ids", step.propose_draft_token_ids)
    wrap(GPUModelRunner, "_input_fits_in_drafter", step.input_fits_in_drafter)


def activate_worker(vllm_config: Any) -> None:
    """Make this worker process ready for a configuration that selects specx."""
    from vllm_specx.engine import shims

    contract.check()
    install_runner_seams()
    shims.mend_expand_kernel()
    shims.mend_top_k_of_nothing()


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
    except ConfigError as error:
        _refuse(error, usage)
    if SELECTED not in (engine_args.additional_config or {}):
        return original(engine_args, *args, **kwargs)
    try:
        return original(engine_args, *args, **kwargs)
    except Exception as error:
        error.add_note(f"vllm_specx: the speculative config was written as {before!r}")
        raise


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
    if additional[SELECTED].get("proposer") != "stock" and engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = "vllm_specx.engine.scheduler.SpecxScheduler"


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
