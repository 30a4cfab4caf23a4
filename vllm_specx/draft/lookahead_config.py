"""The key `lookahead`: a Jacobi window beside the drafts, whose outputs become n-grams to draft from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_specx.config_base import Strict


class LookaheadConfig(Strict):
    """Lookahead decoding (arXiv 2402.02057): needs `tree`, and is for greedy requests."""

    window: Annotated[int, Field(ge=2, le=32)] = 7
    """Columns: places ahead that are guessed at the same time, the paper's W."""
    ngram: Annotated[int, Field(ge=3, le=16)] = 5
    """Tokens of the n-grams that are made, the paper's N."""
    when: Literal["auto", "always"] = "auto"
    """`auto`: where the rows bring more tokens than they cost time, tried now and then; `always`: for
    tests and benchmarks."""

    @property
    def rows(self) -> int:
        """Rows of the target's forward that a window takes."""
        return self.window * (self.ngram - 1) - 1
