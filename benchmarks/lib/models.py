"""The `model` of a scenario: a path, a hub name, `embedded:NAME`, or `twin:LAYERS`."""

from __future__ import annotations

from benchmarks.lib.errors import BenchError
from vllm_specx.config import ConfigError
from vllm_specx.models import embedded

TWIN = "twin:"


def resolve(model: str) -> str:
    """What vLLM's `model` takes; embedded models and cost twins are made on first use."""
    try:
        if model.startswith(TWIN):
            from benchmarks.cost_twin import make_twin

            layers = model.removeprefix(TWIN)
            if not layers.isdecimal():
                raise BenchError(f"model '{model}': write the number of layers, as in 'twin:170'.")
            return str(make_twin(int(layers)))
        return str(embedded.checkpoint(model)) if embedded.is_embedded(model) else model
    except ConfigError as error:
        raise BenchError(str(error)) from None
