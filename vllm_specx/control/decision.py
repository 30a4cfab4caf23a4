"""What the controller answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Decision:
    """K for each request of the batch.

    k: int32 [B], the most draft tokens of each request.
    uniform_k: the largest of them, 0 if there is no request: what `num_spec_tokens_to_schedule` takes.
    uniform: whether all requests that may draft have the same K by choice.
    expected_tokens, expected_seconds: of the step that verifies these drafts.
    probe: whether one K of it is a trial rather than the best known.
    """

    k: npt.NDArray[np.int32]
    uniform_k: int
    uniform: bool
    expected_tokens: float
    expected_seconds: float
    probe: bool = False
