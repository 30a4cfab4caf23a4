"""Two drafts of one request as one tree."""

from __future__ import annotations

import numpy as np

from vllm_specx.draft.tree import DraftTree


def merged(one: DraftTree, other: DraftTree) -> DraftTree:
    """All paths of both, by descending reach, which both must have.

    What both say is as likely as the surer of them holds it to be: they are often sure for the same reason.
    """
    places: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    reach: list[float] = []
    for draft in (one, other):
        assert draft.reach is not None
        mine: list[int] = []
        for token, parent, chance in zip(
            draft.tokens.tolist(), draft.parents.tolist(), draft.reach.tolist(), strict=True
        ):
            above = mine[parent] if parent >= 0 else -1
            place = places.setdefault((above, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(above)
                reach.append(chance)
            else:
                reach[place] = max(reach[place], chance)
            mine.append(place)
    order = sorted(range(len(tokens)), key=lambda node: -reach[node])
    rank = {node: i for i, node in enumerate(order)} | {-1: -1}
    return DraftTree(
        np.array([tokens[node] for node in order], np.int32),
        np.array([rank[parents[node]] for node in order], np.int32),
        np.array([reach[node] for node in order], np.float32),
    )
