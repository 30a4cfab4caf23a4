"""What ends a training command."""

from __future__ import annotations

from vllm_specx.config import ConfigError


class TrainError(ConfigError):
    """Training cannot go on; the message is one sentence that says what was wrong and how to mend it."""
