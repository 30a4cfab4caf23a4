"""What vLLM calls when it loads its general plugins: the entry point, nothing else."""

from __future__ import annotations


def register() -> None:
    """Install the seams of this process. vLLM may call it many times, in every process.

    Quiet and without effect on anybody who did not select specx: each seam looks at the
    configuration it is given, and calls vLLM's own code when specx is not in it.
    """
    from vllm_specx.engine import seams

    seams.install_entry_seams()
