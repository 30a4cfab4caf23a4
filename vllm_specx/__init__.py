"""vllm_specx: drop-in speculative decoding for stock vLLM."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "AutoProposer",
    "DraftModelProposer",
    "EagleProposer",
    "MedusaProposer",
    "NgramProposer",
    "__version__",
]
_CLASSES = {
    "AutoProposer": "auto",
    "DraftModelProposer": "draft_model",
    "EagleProposer": "eagle",
    "MedusaProposer": "heads",
    "NgramProposer": "proposers",
}


def __getattr__(name: str) -> Any:
    """Resolve proposer classes on first use, so that importing the package stays cheap."""
    if name in _CLASSES:
        return getattr(import_module(f"vllm_specx.engine.{_CLASSES[name]}"), name)
    raise AttributeError(f"module 'vllm_specx' has no attribute {name!r}")
