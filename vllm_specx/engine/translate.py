"""From the one flag that users write to what vLLM understands.

`{"method": "specx:ngram", "num_speculative_tokens": 8, "pool": "off"}` becomes vLLM's
`custom_class` with our class, and `additional_config["specx"]` with our own keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm_specx import config
from vllm_specx.config import ConfigError

logger = logging.getLogger(f"vllm.{__name__}")

PREFIX = "specx:"
SELECTED = "specx"
CLASSES = {
    "ngram": "vllm_specx.NgramProposer",
    "medusa": "vllm_specx.MedusaProposer",
    "eagle": "vllm_specx.EagleProposer",
    "draft_model": "vllm_specx.DraftModelProposer",
    "auto": "vllm_specx.AutoProposer",
}
MODEL_KEY = {"medusa": "heads", "eagle": "heads", "draft_model": "draft", "auto": "heads"}
"""What `model`, which vLLM's methods have for a draft, is called in ours."""
PASSED_ON = frozenset({"num_speculative_tokens"})
MAX_SPECULATIVE_TOKENS = 128
"""vllm/v1/sample/rejection_sampler.py: MAX_SPEC_LEN."""


def settings_of(vllm_config: Any) -> config.SpecxConfig:
    """The validated `additional_config["specx"]` of a VllmConfig."""
    additional = vllm_config.additional_config
    return config.parse(additional.get(SELECTED, {}) if isinstance(additional, dict) else {})


def translate(
    speculative: Mapping[str, Any] | None,
    additional: Mapping[str, Any] | None,
    vllm_methods: frozenset[str] | None,
    vllm_keys: frozenset[str],
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """vLLM's (speculative_config, additional_config) for what the user wrote.

    Configurations without specx come back as they are. vllm_methods and vllm_keys are the methods
    and keys that this vLLM knows; None: it will judge the method itself. Raises ConfigError.
    """
    speculative = None if speculative is None else dict(speculative)
    additional = dict(additional or {})
    if speculative is None:
        if SELECTED in additional:
            _parse_stock(additional[SELECTED])
        return speculative, additional
    method = speculative.get("method")
    if method == "medusa" and vllm_methods is not None and "medusa" not in vllm_methods:
        logger.info(
            "vllm_specx: this vLLM has no method 'medusa' any more; taking it as 'specx:medusa'."
        )
        method = "specx:medusa"
    if isinstance(method, str) and method.startswith(PREFIX):
        return _short_form(method, speculative, additional, vllm_keys)
    if speculative.get("model") in CLASSES.values():
        return _long_form(speculative, additional)
    if SELECTED in speculative:
        if SELECTED in additional:
            raise ConfigError(
                "specx is given both in the speculative config and in the additional config; keep one."
            )
        additional[SELECTED] = speculative.pop(SELECTED)
    if SELECTED in additional:
        if isinstance(method, str) and vllm_methods is not None and method not in vllm_methods:
            raise ConfigError(
                f"unknown method '{method}'; {config.nearest(method, sorted(vllm_methods))}"
            )
        additional[SELECTED] = _parse_stock(additional[SELECTED])
    return speculative, additional


def proposer_of(method: str) -> str:
    """The proposer that `specx:NAME` means."""
    name = method.removeprefix(PREFIX)
    return config.ALIASES.get(name, name)


def _short_form(
    method: str, speculative: dict[str, Any], additional: dict[str, Any], vllm_keys: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    name = proposer_of(method)
    model = config.proposer_config(name)
    if name == "stock":
        raise ConfigError(
            "method 'specx:stock' cannot be chosen; name one of vLLM's methods and put \"specx\": {} beside it."
        )
    own: dict[str, Any] = {"proposer": name}
    passed: dict[str, Any] = {}
    for written, value in speculative.items():
        key = written.replace("-", "_")
        key = MODEL_KEY.get(name, key) if key == "model" else key
        if key == "method":
            continue
        if key == "proposer":
            raise ConfigError(f"'{written}' is not needed: method '{method}' says it; take it out.")
        if key in own or key in passed:
            raise ConfigError(f"'{written}' is given twice for method '{method}'; keep one.")
        if key in model.model_fields:
            own[key] = value
        elif key in PASSED_ON:
            passed[key] = value
        elif key == SELECTED:
            raise ConfigError(
                f"'specx' is not needed beside method '{method}'; write its keys next to 'method'."
            )
        else:
            known = sorted((set(model.model_fields) | PASSED_ON) - {"proposer"})
            of_vllm = " is a key of vLLM's other methods and" if key in vllm_keys else ""
            raise ConfigError(
                f"'{written}'{of_vllm} is unknown to method '{method}'; {config.nearest(key, known)}"
            )
    extra = additional.get(SELECTED) or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"specx in the additional config must be a mapping of keys, not {extra!r}."
        )
    for key in extra:
        if key in own and extra[key] != own[key]:
            raise ConfigError(
                f"'{key}' is {own[key]!r} in the speculative config and {extra[key]!r} in the additional config; keep one."
            )
    own = {**extra, **own}
    _set_num_speculative_tokens(passed, config.parse(own), name)
    additional[SELECTED] = own
    return {"method": "custom_class", "model": CLASSES[name], **passed}, additional


def _long_form(
    speculative: dict[str, Any], additional: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    name = next(n for n, path in CLASSES.items() if path == speculative["model"])
    if speculative.get("method") not in (None, "custom_class"):
        raise ConfigError(
            f"model '{speculative['model']}' needs method 'custom_class', not {speculative['method']!r}."
        )
    given = speculative.pop(SELECTED, None)
    own = additional.get(SELECTED, given)
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise ConfigError(f"specx must be a mapping of keys, not {own!r}.")
    if proposer_of(str(own.get("proposer", name))) != name:
        raise ConfigError(
            f"specx.proposer is {own['proposer']!r}, but model is '{speculative['model']}'; keep one."
        )
    own = {**own, "proposer": name}
    _set_num_speculative_tokens(speculative, config.parse(own), name)
    additional[SELECTED] = own
    return {**speculative, "method": "custom_class"}, additional


def _parse_stock(own: Any) -> dict[str, Any]:
    if own is True or own is None:
        own = {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"specx must be a mapping of keys, not {own!r}.")
    if own.get("proposer", "stock") != "stock":
        raise ConfigError(
            f"specx.proposer is {own['proposer']!r} beside another method; "
            f"write method 'specx:{own['proposer']}' in the speculative config instead."
        )
    parsed: dict[str, Any] = {"proposer": "stock", **own}
    config.parse(parsed)
    return parsed


def _set_num_speculative_tokens(
    speculative: dict[str, Any], settings: config.SpecxConfig, name: str
) -> None:
    """By default the proposer's usual number, or as many as a tree has nodes and a window of lookahead
    decoding has rows: each takes a place."""
    tree, rows = config.tree_of(settings), config.window_rows(settings)
    usual = config.DEFAULT_NUM_SPECULATIVE_TOKENS[name]
    needed = usual if tree is None else tree.nodes + rows
    if needed > MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"'lookahead' takes window * (ngram - 1) - 1 = {rows} rows beside the {needed - rows} of tree.nodes, "
            f"and there are {MAX_SPECULATIVE_TOKENS}; lower lookahead.window, lookahead.ngram or tree.nodes."
        )
    value = speculative.setdefault("num_speculative_tokens", needed)
    _check_num_speculative_tokens(value)
    if rows and value < needed:
        raise ConfigError(
            f"'num_speculative_tokens' is {value}, and tree.nodes and the rows of 'lookahead' are {needed}, each of "
            "which takes a draft token's place; leave num_speculative_tokens out, or lower these."
        )
    if tree is not None and value < tree.nodes:
        raise ConfigError(
            f"'num_speculative_tokens' is {value}, and tree.nodes is {tree.nodes}, each of which takes a draft "
            "token's place; leave num_speculative_tokens out, or lower tree.nodes."
        )


def _check_num_speculative_tokens(value: Any) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 1 <= value <= MAX_SPECULATIVE_TOKENS
    ):
        raise ConfigError(
            f"'num_speculative_tokens' is {value!r}; it must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}."
        )
