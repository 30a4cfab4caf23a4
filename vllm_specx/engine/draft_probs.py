"""What drafts were drawn from, from the step that made them to the one that verifies them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_specx.draft.sampling import SamplingRows, Source

_GREEDY = 1e-5
"""vllm/v1/sample: a temperature below this is 0 (_SAMPLING_EPS)."""


class DraftProbs:
    """Of the drafts that wait to be verified: what they were drawn from.

    A request that is not scheduled keeps its draft, and so what is known of it, until it is in a batch
    again; what stays for one is 64 numbers a token.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._waiting: dict[str, Source] = {}

    def made(
        self,
        requests: Sequence[str],
        drafts: Sequence[Sequence[int]],
        sources: Mapping[str, Source],
        live: Collection[str],
    ) -> None:
        """A step has proposed these drafts for its requests. sources: of those that were drawn. live: all
        requests of the runner."""
        for request in [each for each in self._waiting if each not in live]:
            del self._waiting[request]
        for request, draft in zip(requests, drafts, strict=True):
            self._waiting.pop(request, None)
            if draft and request in sources:
                self._waiting[request] = sources[request]

    def of(
        self, requests: Sequence[str], counts: Sequence[int], tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """float32 [N, V]: q of each draft token that is verified; None: none of them was drawn.

        counts: of each request's; tokens: int [N], all of them. A draft that was not drawn has all of q at
        its token. So has one that is not what was drawn: vLLM has put it there, whatever was drawn.
        """
        drafted = [(r, n) for r, n in zip(requests, counts, strict=True) if n]
        found = [self._waiting.get(request) for request, _ in drafted]
        known = [source for source in found if source is not None]
        if not known:
            return None
        width = known[0].ids.shape[1]
        tokens = tokens.to(torch.int64)
        # A grammar leaves -1 of a token that it forbids.
        ids = tokens.clamp(min=0)[:, None].repeat(1, width)
        q = torch.zeros(len(tokens), width, dtype=torch.float32, device=tokens.device)
        q[:, 0] = 1.0
        at = 0
        for (_, count), source in zip(drafted, found, strict=True):
            rows = slice(at, at + count)
            at += count
            if source is not None and len(source.tokens) >= count:
                same = (source.tokens[:count] == tokens[rows])[:, None]
                ids[rows] = torch.where(same, source.ids[:count], ids[rows])
                q[rows] = torch.where(same, source.probabilities[:count], q[rows])
        whole = torch.zeros(len(tokens), self._vocab_size, device=tokens.device)
        return whole.scatter_add_(1, ids, q)


def sampling_rows(params: Sequence[Any]) -> SamplingRows:
    """Of the vLLM SamplingParams of a batch; None where a request has none.

    What a grammar constrains is not drawn: vLLM cuts such a draft where it breaks the grammar, so by what
    was drawn, which would change the distribution of what is said there.
    """
    size = len(params)
    rows = SamplingRows(
        np.zeros(size, np.bool_),
        np.ones(size, np.float32),
        np.zeros(size, np.int64),
        np.ones(size, np.float32),
    )
    for i, each in enumerate(params):
        if each is None or each.temperature < _GREEDY or each.structured_outputs is not None:
            continue
        rows.drawn[i] = True
        rows.temperatures[i] = each.temperature
        rows.top_k[i] = max(each.top_k, 0)
        rows.top_p[i] = each.top_p
    return rows


def spec_decode_draft_probs(original: Callable[..., Any], runner: Any, metadata: Any) -> Any:
    """GPUModelRunner._get_spec_decode_draft_probs: those of our proposers, which vLLM only has of its
    own. Can go when custom_class can hand on probabilities by request."""
    probs: DraftProbs | None = getattr(getattr(runner, "drafter", None), "draft_probs", None)
    if probs is None:
        return original(runner, metadata)
    counts = metadata.num_draft_tokens
    return probs.of(runner.input_batch.req_ids[: len(counts)], counts, metadata.draft_token_ids)
