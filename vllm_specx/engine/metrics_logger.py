"""Our stat logger in the API server, beside vLLM's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_specx.engine.metrics import take_report
from vllm_specx.engine.translate import SELECTED
from vllm_specx.metrics.export import Exporter

logger = logging.getLogger(f"vllm.{__name__}")


class SpecxStatLogger(AggregateStatLoggerBase):
    """Takes our reports off SchedulerStats and exports them."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._exporter: Exporter | None = None
        try:
            speculative = vllm_config.speculative_config
            self._exporter = Exporter(
                vllm_config.model_config.served_model_name,
                engine_indexes,
                method_of(vllm_config),
                speculative.num_speculative_tokens,
            )
        except Exception:
            self._give_up()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        try:
            report = take_report(scheduler_stats)
            if report is not None and self._exporter is not None:
                self._exporter.apply(report, engine_idx)
        except Exception:
            self._give_up()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def _give_up(self) -> None:
        self._exporter = None
        logger.exception("vllm_specx: its metrics failed and are switched off; serving goes on.")


def method_of(vllm_config: Any) -> str:
    """`specx:NAME`, or the name of vLLM's own method."""
    proposer = (vllm_config.additional_config or {}).get(SELECTED, {}).get("proposer", "ngram")
    return str(
        vllm_config.speculative_config.method if proposer == "stock" else f"specx:{proposer}"
    )


def add_logger(
    original: Callable[..., None], manager: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """StatLoggerManager.__init__: ours before vLLM's own, where specx is selected and stats are not
    switched off. vLLM's entry point for stat loggers would switch them on for everybody who has the
    plugin installed; can go when it knows the configuration."""
    additional = vllm_config.additional_config
    chosen = isinstance(additional, dict) and SELECTED in additional
    if chosen and vllm_config.speculative_config is not None:
        if len(args) > 1:
            args = (args[0], [SpecxStatLogger, *(args[1] or [])], *args[2:])
        else:
            given = kwargs.get("custom_stat_loggers") or []
            kwargs["custom_stat_loggers"] = [SpecxStatLogger, *given]
    original(manager, vllm_config, *args, **kwargs)


def install() -> None:
    """In a process that makes an engine's configuration and may serve it."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_specx.engine.patching import wrap

    wrap(StatLoggerManager, "__init__", add_logger)
