"""Which of vLLM's two model runners serves a configuration with our proposers.

V2 is what vLLM takes on GPUs; it lists `custom_class`, and so our proposers, as unsupported and would
fall back to V1, which is deprecated and schedules synchronously.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from vllm_specx import config
from vllm_specx.config import ConfigError
from vllm_specx.engine.translate import CLASSES, SELECTED

GIVEN = "eagle3"
"""vLLM's method that serves a draft of ours on V2 (eagle.py)."""

logger = logging.getLogger(f"vllm.{__name__}")

Runner = Literal["v1", "v2"]
OF_CUSTOM_CLASS = "speculative method 'custom_class'"
"""How vLLM's VllmConfig._get_v2_model_runner_unsupported_features names it."""
V1_ONLY = ("suffix", "medusa", "mlp_speculator")
"""vLLM's methods that V2 does not serve, whatever else is asked for (the same function)."""


def obstacle(settings: config.SpecxConfig) -> str | None:
    """Why a proposer with these keys cannot be served by V2 at all; None: it can. Raises CheckpointError
    if it depends on a draft that cannot be read."""
    if config.tree_of(settings) is not None:
        return "drafts trees, whose rows, acceptance and commit V2 has no place for yet,"
    if isinstance(settings, config.NgramConfig | config.MedusaConfig):
        return None
    if isinstance(settings, config.AutoConfig):
        from vllm_specx.engine.heads import trained_part

        if isinstance(trained_part(settings), config.MedusaConfig):
            return None
    if isinstance(settings, config.EagleConfig | config.AutoConfig):
        return "is served with vLLM's own eagle3 only, where the checkpoint is one,"
    return "is not there yet"


def shortfall(settings: config.SpecxConfig) -> str | None:
    """What V2 would leave out of what these keys ask for; None: nothing."""
    found = []
    if getattr(settings, "min_probability", None):
        found.append("min_probability")
    if getattr(settings, "token_cost", None) is not None:
        found.append("token_cost")
    return ", ".join(found) or None


def runner_of(vllm_config: Any) -> Runner:
    """The runner that one of our own proposers gets; vLLM asks in every process."""
    return _choose(vllm_config)[0]


def reason_for_v1(vllm_config: Any) -> str | None:
    """Why V1 serves what vLLM would have given to V2, for the log; None if there is nothing to say."""
    return _choose(vllm_config)[1]


def _choose(vllm_config: Any) -> tuple[Runner, str | None]:
    settings = settings_if_ours(vllm_config)
    if settings is None:
        return "v1", None
    if vllm_config.speculative_config.method == GIVEN:
        return "v2", None
    if settings.runner != "auto":
        return settings.runner, None
    if not _vllm_would_take_v2(vllm_config):
        return "v1", None
    lacks = obstacle(settings)
    if lacks is not None:
        return "v1", f"specx:{settings.proposer} {lacks} on V2"
    lacks = shortfall(settings)
    if lacks is not None and not asked_for_v2():
        return "v1", f"V2 does without {lacks}; specx.runner 'v2' takes it nevertheless"
    return "v2", None


def settings_if_ours(vllm_config: Any) -> config.SpecxConfig | None:
    """Of one of our own proposers; None beside vLLM's methods."""
    additional = vllm_config.additional_config
    speculative = vllm_config.speculative_config
    raw = additional.get(SELECTED) if isinstance(additional, dict) else None
    if speculative is None or not isinstance(raw, Mapping):
        return None
    ours = speculative.model in CLASSES.values()
    if not ours and not (speculative.method == GIVEN and raw.get("proposer") == "auto"):
        return None
    return config.parse(raw)


def asked_for_v2() -> bool | None:
    """The environment's VLLM_USE_V2_MODEL_RUNNER; None if it is not set."""
    import vllm.envs as envs

    asked: bool | None = envs.VLLM_USE_V2_MODEL_RUNNER
    return asked


def expected(settings: config.SpecxConfig) -> Runner:
    """The runner that is asked for, or that vLLM takes by default, before there is a VllmConfig; whether
    it can serve the proposer is not asked."""
    if settings.runner != "auto":
        return settings.runner
    return "v2" if _by_default() else "v1"


def _by_default() -> bool:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    asked = asked_for_v2()
    return HAS_TRITON and not current_platform.is_cpu() if asked is None else asked


def _vllm_would_take_v2(vllm_config: Any) -> bool:
    if asked_for_v2() is not None:
        return _by_default()
    return _by_default() and vllm_config.parallel_config.prefill_context_parallel_size == 1


def check(settings: config.SpecxConfig, on_cpu: bool) -> None:
    """Raise ConfigError where the configuration asks for a runner that cannot be had.

    on_cpu: whether this platform is vLLM's CPU backend.
    """
    from vllm.triton_utils import HAS_TRITON

    if settings.proposer == "stock" and settings.runner != "auto":
        raise ConfigError(
            "'runner' in specx is for specx's own methods; set VLLM_USE_V2_MODEL_RUNNER for vLLM's."
        )
    asked = asked_for_v2()
    wants_v2 = settings.runner == "v2" or (settings.runner == "auto" and bool(asked))
    if settings.runner == "v1" and asked:
        raise ConfigError(
            "specx.runner is 'v1', but the environment has VLLM_USE_V2_MODEL_RUNNER=1; unset one of them."
        )
    if settings.runner == "v2" and asked is False:
        raise ConfigError(
            "specx.runner is 'v2', but the environment has VLLM_USE_V2_MODEL_RUNNER=0; unset one of them."
        )
    if not wants_v2 or settings.proposer == "stock":
        return
    name = f"specx:{settings.proposer}"
    if not HAS_TRITON:
        where = " and has none for the CPU" if on_cpu else ""
        raise ConfigError(
            f"Model Runner V2, asked for with {name}, needs Triton{where}; set specx.runner to 'v1'."
        )
    may_be_given = isinstance(settings, config.EagleConfig | config.AutoConfig)
    lacks = None if may_be_given else obstacle(settings)
    if lacks is not None:
        raise ConfigError(f"{name} {lacks} on Model Runner V2; set specx.runner to 'v1'.")
    if (left_out := shortfall(settings)) is not None:
        logger.warning("vllm_specx: on Model Runner V2 %s does without %s.", name, left_out)
