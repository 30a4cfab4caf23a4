"""Where we reach into vLLM for Model Runner V2. Each names its target, why, and when it can go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_specx import config
from vllm_specx.config import ConfigError, SpecxConfig
from vllm_specx.engine.patching import wrap
from vllm_specx.engine.translate import CLASSES, SELECTED
from vllm_specx.engine.v2 import choice

logger = logging.getLogger(f"vllm.{__name__}")


def install_entry_seams() -> None:
    """In every process, as each asks its VllmConfig anew which runner it has."""
    try:
        from vllm.config import VllmConfig
    except ImportError:
        return
    if hasattr(VllmConfig, "_get_v2_model_runner_unsupported_features"):
        wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features)


def install_runner_seams() -> None:
    """In a worker whose runner is V2. model_runner has imported the function by its name."""
    from vllm.v1.worker.gpu import model_runner

    wrap(model_runner, "init_speculator", _init_speculator)


def ours(vllm_config: Any) -> bool:
    """Whether one of our own proposers drafts."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.model in CLASSES.values()


def check(engine_args: Any) -> None:
    """Raise ConfigError where a selected specx asks for a runner that cannot be had. An EAGLE-3 draft
    that V2 is to serve becomes vLLM's own method."""
    raw = (engine_args.additional_config or {}).get(SELECTED)
    if raw is None or engine_args.speculative_config is None:
        return
    from vllm.platforms import current_platform

    settings = config.parse(raw)
    choice.check(settings, current_platform.is_cpu())
    if isinstance(settings, config.EagleConfig) and choice.expected(settings) == "v2":
        _give_to_vllm(engine_args, settings)


def _give_to_vllm(engine_args: Any, settings: config.EagleConfig) -> None:
    from vllm_specx.engine.v2.eagle import as_stock, stock_obstacle

    reason = stock_obstacle(settings)
    if reason is None:
        speculative, own = as_stock(settings, engine_args.speculative_config)
        engine_args.speculative_config = speculative
        engine_args.additional_config = {**engine_args.additional_config, SELECTED: own}
        logger.info("vllm_specx: Model Runner V2, with vLLM's own EAGLE-3 and our controller.")
        return
    if settings.runner == "v2" or choice.asked_for_v2():
        raise ConfigError(
            f"specx:eagle on Model Runner V2 is vLLM's own speculator, which {reason}; set specx.runner to 'v1'."
        )


def hold_async(engine_args: Any) -> bool | None:
    """EngineArgs.async_scheduling as the user wrote it. True is taken out for our own methods, which
    vLLM would refuse; settle() sees to it."""
    asked: bool | None = engine_args.async_scheduling
    speculative = engine_args.speculative_config or {}
    if asked and speculative.get("model") in CLASSES.values():
        engine_args.async_scheduling = None
    return asked


def settle(vllm_config: Any, settings: SpecxConfig, engine_args: Any, asked_async: Any) -> None:
    """Once a configuration is made: say what was chosen, keep it for the other processes, and schedule
    asynchronously where vLLM would have.

    asked_async: EngineArgs.async_scheduling as the user wrote it; None: not at all.
    """
    if not ours(vllm_config):
        return
    reason = choice.reason_for_v1(vllm_config)
    if reason is not None:
        logger.warning("vllm_specx: vLLM's V1 model runner, as %s.", reason)
    runner = choice.runner_of(vllm_config)
    vllm_config.additional_config[SELECTED]["runner"] = runner
    if runner == "v1" and asked_async:
        raise ConfigError(
            "asynchronous scheduling with our methods needs Model Runner V2; take out --async-scheduling, "
            "or set specx.runner to 'v2'."
        )
    if runner == "v2" and asked_async is not False and _can_be_asynchronous(vllm_config):
        vllm_config.scheduler_config.async_scheduling = True
        logger.info("vllm_specx: Model Runner V2, with asynchronous scheduling all the same.")
        if getattr(engine_args, "disable_nccl_for_dp_synchronization", None) is None:
            vllm_config.parallel_config.disable_nccl_for_dp_synchronization = True


def scheduler_of(vllm_config: Any, name: str) -> str:
    """The dotted name of our scheduler that is called `name` for V1."""
    if ours(vllm_config) and choice.runner_of(vllm_config) == "v2":
        return f"vllm_specx.engine.v2.scheduler.{name.replace('Specx', 'SpecxV2')}"
    return f"vllm_specx.engine.scheduler.{name}"


def _can_be_asynchronous(vllm_config: Any) -> bool:
    """As VllmConfig.__post_init__, which knows only vLLM's own methods as fit for it."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.abstract import Executor

    if current_platform.is_cpu() or not Executor.get_class(vllm_config).supports_async_scheduling():
        return False
    parallel = vllm_config.parallel_config
    deepep = parallel.enable_dbo and parallel.all2all_backend == "deepep_high_throughput"
    return not (current_platform.is_rocm() and deepep)


def _unsupported_features(original: Callable[..., list[str]], vllm_config: Any) -> list[str]:
    """VllmConfig._get_v2_model_runner_unsupported_features: `custom_class` is none where it is ours and
    V2 serves it. Can go when vLLM lets plugins register speculators."""
    listed = original(vllm_config)
    if choice.OF_CUSTOM_CLASS not in listed or not ours(vllm_config):
        return listed
    if choice.runner_of(vllm_config) == "v1":
        return listed
    return [feature for feature in listed if feature != choice.OF_CUSTOM_CLASS]


def _init_speculator(
    original: Callable[..., Any], vllm_config: Any, device: Any, req_states: Any
) -> Any:
    """init_speculator, which knows vLLM's own methods only. Can go when it takes a class."""
    if not ours(vllm_config):
        return original(vllm_config, device, req_states)
    from vllm_specx.engine.v2.speculators import build

    return build(vllm_config, device, req_states)
