"""vllm_specx: drop-in speculative decoding for stock vLLM."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["EagleProposer", "MedusaProposer", "NgramProposer", "__version__"]


def __getattr__(name: str) -> Any:
    """Resolve proposer classes on first use, so that importing the package stays cheap."""
    if name == "NgramProposer":
        from vllm_specx.engine.proposers import NgramProposer

        return NgramProposer
    if name == "MedusaProposer":
        from vllm_specx.engine.heads import MedusaProposer

        return MedusaProposer
    if name == "EagleProposer":
        from vllm_specx.engine.eagle import EagleProposer

        return EagleProposer
    raise AttributeError(f"module 'vllm_specx' has no attribute {name!r}")
