"""The command line. Whatever is wrong with the input ends in one sentence and exit status 2."""

from vllm_specx.cli.main import main

__all__ = ["main"]
