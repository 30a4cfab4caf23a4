"""What an EAGLE draft says after any path, recomputed from nothing (support/eagle_engine.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.eagle_engine import _layers, _norm, features_of, states_of, target
from vllm_specx.draft.eagle_weights import EagleWeights
from vllm_specx.draft.tree import DraftTree


def said_after(draft: EagleWeights, tokens: Sequence[int], path: Sequence[int]) -> dict[int, float]:
    """Log-probability of every target id that can be drafted after `path`, which follows `tokens`: one
    forward a token, of a chain."""
    lm_head = target()[0] if draft.lm_head is None else draft.lm_head
    ids = torch.arange(len(lm_head))
    if draft.vocab is not None:
        ids = draft.vocab.token_ids
        lm_head = lm_head if draft.lm_head is not None else lm_head[ids]
    size = draft.shape.head_dim
    frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
    features = features_of(draft, states_of(list(tokens), draft.version))[: len(tokens) - 1]
    following = list(tokens[1:])
    for token in (*path, -1):
        output = _layers(draft, following, features, 0, frequencies)[-1:]
        normed = output
        if draft.norm is not None:
            normed = _norm(output, draft.norm, draft.shape.rms_norm_eps)
        features = torch.cat((features, normed if draft.norm_output else output))
        following.append(token)
    said = torch.log_softmax((normed @ lm_head.T)[0], -1)
    return dict(zip(ids.tolist(), said.tolist(), strict=True))


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Of every node, the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found
