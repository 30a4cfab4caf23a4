"""The offline comparison of trees and chains counts what a target would accept."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks import tree_offline
from benchmarks.lib.greedy_texts import Text
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.tree import DraftTree


class Known:
    """Drafts the true next token as a second child, then the true one after it, then a wrong one."""

    needs_hidden_states: ClassVar[bool] = False
    needs_verified_rows: ClassVar[bool] = False
    draft_steps: ClassVar[int] = 0

    def __init__(self, text: Text) -> None:
        self.text = text
        self.seen: list[tuple[int, int, list[int]]] = []

    def propose(self, context: DraftContext) -> list[DraftTree]:
        n = int(context.num_tokens[0])
        verified: Any = context.verified
        self.seen.append(
            (int(verified.position[0]), int(verified.count[0]), list(context.sampled[0]))
        )
        assert context.hidden_states is not None
        assert int(context.hidden_states[0, 0]) == n - 2
        a, b = [*self.text.tokens[n : n + 2], 0, 0][:2]
        return [DraftTree(np.array([a + 1, a, b, 5], np.int32), np.array([-1, -1, 1, 2], np.int32))]


def test_paths_are_followed_and_ranks_counted() -> None:
    tokens = [*range(100, 110), *range(200, 217)]
    states = torch.arange(len(tokens)).float()[:, None]
    text = Text("set", tokens, 10, states, (states,))
    known = Known(text)
    counts = tree_offline.replay(known, [text], 4, 3)
    # 16 tokens follow the first of the answer, three a step.
    assert counts.steps == 6 and counts.accepted == 11
    assert known.seen[:3] == [(0, 10, [200]), (10, 3, [201, 202, 203]), (13, 3, [204, 205, 206])]
    assert counts.tried[0, :2].tolist() == [6, 6] and counts.right[0, :2].tolist() == [0, 6]
    summary = tree_offline.summary(
        {
            "x": {
                "chain": {"set": {**counts.record(), "accepted": 0}},
                "tree 4": {"set": counts.record()},
            }
        }
    )
    assert summary["x"]["tree 4"]["acceptance_length"] == round(1 + 11 / 6, 3)
    assert summary["x"]["tree 4"]["over_chain"] == round(1 + 11 / 6, 3)
