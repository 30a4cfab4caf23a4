"""Where we reach into vLLM for Model Runner V2. Each names its target, why, and when it can go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_specx import config
from vllm_specx.config import ConfigError, SpecxConfig
from vllm_specx.engine.patching import wrap
from vllm_specx.engine.translate import CLASSES, SELECTED
from vllm_specx.engine.v2 import captured, choice

logger = logging.getLogger(f"vllm.{__name__}")
TABLE = "num_speculative_tokens_per_batch_size"


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
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    wrap(cudagraph_utils.CudaGraphManager, "_init_candidates", captured.complete_candidates)
    wrap(model_runner, "init_speculator", _init_speculator)
    wrap(model_runner.GPUModelRunner, "add_requests", _add_requests)
    wrap(model_runner.GPUModelRunner, "finish_requests", _finish_requests)


def ours(vllm_config: Any) -> bool:
    """Whether one of our own proposers drafts."""
    return choice.settings_if_ours(vllm_config) is not None


def check(engine_args: Any) -> None:
    """Raise ConfigError where a selected specx asks for a runner that cannot be had. An EAGLE-3 draft
    that V2 is to serve becomes vLLM's own method."""
    raw = (engine_args.additional_config or {}).get(SELECTED)
    if raw is None or engine_args.speculative_config is None:
        return
    from vllm.platforms import current_platform

    settings = config.parse(raw)
    choice.check(settings, current_platform.is_cpu())
    if choice.expected(settings) == "v1":
        return
    if isinstance(settings, config.EagleConfig):
        _give_to_vllm(engine_args, settings, settings)
    elif isinstance(settings, config.AutoConfig):
        from vllm_specx.engine.heads import trained_part

        part = trained_part(settings)
        if isinstance(part, config.EagleConfig):
            _give_to_vllm(engine_args, settings, part)
    _have_graphs_for_each_k(engine_args, settings)


def _give_to_vllm(
    engine_args: Any, settings: config.EagleConfig | config.AutoConfig, draft: config.EagleConfig
) -> None:
    from vllm_specx.engine.v2.eagle import as_stock, stock_obstacle

    reason = stock_obstacle(draft)
    if reason is None:
        speculative, own = as_stock(settings, engine_args.speculative_config)
        engine_args.speculative_config = speculative
        engine_args.additional_config = {**engine_args.additional_config, SELECTED: own}
        logger.info("vllm_specx: Model Runner V2, with vLLM's own EAGLE-3 and our controller.")
        return
    if settings.runner == "v2" or choice.asked_for_v2():
        raise ConfigError(
            f"specx:{settings.proposer} with this draft on Model Runner V2 takes vLLM's own speculator, "
            f"which {reason}; set specx.runner to 'v1'."
        )


def _have_graphs_for_each_k(engine_args: Any, settings: SpecxConfig) -> None:
    """The table from which vLLM knows the K to capture; captured.py says why."""
    speculative = engine_args.speculative_config
    most = speculative.get("num_speculative_tokens")
    if speculative.get(TABLE) is not None or not most or engine_args.data_parallel_size > 1:
        return  # vLLM takes no table with data parallelism
    if speculative.get("model") in CLASSES.values():
        may_be_v1 = settings.runner == "auto" and not choice.asked_for_v2()
        if may_be_v1 and (choice.obstacle(settings) or choice.shortfall(settings)):
            return
    elif speculative.get("method") in choice.V1_ONLY or speculative.get("parallel_drafting"):
        return
    if ks := captured.rungs(settings.controller, most):
        table = captured.table_of(ks, engine_args.max_num_seqs)
        engine_args.speculative_config = {**speculative, TABLE: table}


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
    runner = "v2" if vllm_config.use_v2_model_runner else "v1"
    vllm_config.additional_config[SELECTED]["runner"] = runner
    if runner == "v1":
        if vllm_config.speculative_config.method == choice.GIVEN:
            raise ConfigError(
                "specx:auto with an EAGLE-3 draft was made ready for Model Runner V2, but vLLM takes V1 for "
                "what else is asked for; set specx.runner to 'v1'."
            )
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
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


def _add_requests(original: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """GPUModelRunner.add_requests: a speculator that remembers is told which request takes which row, and
    its pool. Can go when vLLM tells speculators of requests."""
    original(runner, scheduler_output)
    speculator = runner.speculator
    if not hasattr(speculator, "admit"):
        return
    for data in scheduler_output.scheduled_new_reqs:
        row = runner.req_states.req_id_to_index[data.req_id]
        speculator.guard.run(partial(speculator.admit, row, data.sampling_params), None)


def _finish_requests(original: Callable[..., None], runner: Any, scheduler_output: Any) -> None:
    """GPUModelRunner.finish_requests: the last moment at which an ended request's text is in its row, and
    can be shared. Preempted requests come again. Can go when vLLM tells speculators of requests."""
    speculator = runner.speculator
    if hasattr(speculator, "end"):
        rows = runner.req_states.req_id_to_index
        # Sorted, so that every tensor-parallel rank remembers in the same order.
        for request_id in sorted(scheduler_output.finished_req_ids):
            if (row := rows.get(request_id)) is not None:
                speculator.guard.run(partial(speculator.end, row), None)
    original(runner, scheduler_output)
