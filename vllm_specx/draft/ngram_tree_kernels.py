"""The compiled part of n-gram trees: the trie of what followed the same tokens, best nodes first.

Beside the chain's kernels (ngram_kernels.py), whose index, candidates and features it uses.
"""

# mypy: disable-error-code="no-any-return, return-value, arg-type, assignment"

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from vllm_specx.draft import ngram_kernels
from vllm_specx.draft.ngram_kernels import (
    AGREEMENT_BUCKETS,
    AGREEMENT_RATE,
    AGREEMENT_WEIGHTS,
    ALIGNED_OWN,
    ALIGNED_POOL,
    ALIGNED_SOURCE,
    DOC_USED,
    FROM_POOL,
    KINDS,
    LEAD,
    LEAD_LENGTH,
    LEAD_SOURCE,
    LENGTH,
    MAX_CANDIDATES,
    OFFSET,
    POOL_MASK,
    SHADOW,
    TAIL,
    USEFUL,
    VOTE_BUCKETS,
    VOTE_WEIGHTS,
    WEIGHTS_AT,
    FloatArray,
    IntArray,
    LongArray,
    Requests,
    Shared,
    _follow_alignment,
    _odds,
    all_candidates,
    compiled,
    estimate,
    learn,
    take_in,
    vote_bucket,
)


def _inside(function: Callable[..., Any]) -> Any:
    """Compile as a part of step_tree(), not to be kept by itself."""
    return numba.njit(function, nogil=True)


@_inside
def _learn_from_tree(
    r: Requests, s: Shared, parents: IntArray, slot: int, first: int, weights: FloatArray
) -> int:
    """Compare the last tree with what was committed from index `first` on: every child of a node that came
    true is judged.

    parents: int32 [D], of the request's shadow. Returns how many tokens of its first path agreed before one
    that did not, or -1 if none disagreed.
    """
    record = r.record[slot]
    base = record[OFFSET]
    known = record[SHADOW]
    pooled = record[LEAD_SOURCE] == FROM_POOL and record[LEAD] > s.state[TAIL]
    node = -1
    on_first = True
    mismatch = -1
    for j in range(record[LENGTH] - first):
        truth = r.tokens[base + first + j]
        best = -1
        following = -1
        for i in range(node + 1, known):
            if parents[i] != node:
                continue
            if best < 0:
                best = i
            agreed = r.shadow_tokens[slot, i] == truth
            learn(weights, r.shadow_features[slot, i], agreed)
            if agreed:
                following = i
        if best < 0:
            break
        right = 1.0 if following == best else 0.0
        r.agreement[slot] += AGREEMENT_RATE * (right - r.agreement[slot])
        if on_first and following != best:
            on_first = False
            mismatch = j
        if on_first and pooled and j + 1 == USEFUL:
            s.documents[s.document[record[LEAD] & s.state[POOL_MASK]], DOC_USED] = 1
        if following < 0:
            break
        node = following
    return mismatch


@_inside
def _predict_tree(
    r: Requests,
    s: Shared,
    slot: int,
    count: int,
    source: LongArray,
    place: LongArray,
    length: LongArray,
    branching: int,
    floor: float,
    vocab_size: int,
    weights: FloatArray,
    siblings: int,
    shadow_parents: IntArray,
    tokens: IntArray,
    parents: IntArray,
    reach: FloatArray,
) -> int:
    """The best nodes of the trie that the candidates' continuations form, in descending order of reach.

    siblings: how far behind a request's weights those of all children but the first are: what fewer
    candidates say comes true less often. Writes the request's shadow and tokens, parents, reach, [D] each;
    nodes of less reach than `floor` are left out. Returns how many nodes there are.
    """
    record = r.record[slot]
    base = record[OFFSET]
    n = record[LENGTH]
    mask = s.state[POOL_MASK]
    most = tokens.shape[0]
    bucket = min(AGREEMENT_BUCKETS - 1, int(r.agreement[slot] * AGREEMENT_BUCKETS))
    room = (most + 1) * branching
    # The frontier: nodes that could come next. who: which candidates say so, as bits.
    token = np.empty(room, np.int32)
    parent = np.empty(room, np.int32)
    chance = np.empty(room, np.float64)
    who = np.empty(room, np.int64)
    leader = np.empty(room, np.int64)
    features = np.empty((room, KINDS), np.int32)
    depth_of = np.empty(most, np.int64)
    said = np.empty(MAX_CANDIDATES + 1, np.int32)
    votes = np.empty(MAX_CANDIDATES + 1, np.float64)
    bits = np.empty(MAX_CANDIDATES + 1, np.int64)
    scratch = np.empty(KINDS, np.int32)
    size = 0
    made = 0
    tail = -1
    lead = -1
    node = -1
    mine = (np.int64(1) << np.int64(count)) - 1
    above = 1.0
    while True:
        d = depth_of[node] + 1 if node >= 0 else 0
        distinct = 0
        total = 0.0
        for i in range(count):
            if not (mine >> np.int64(i)) & 1:
                continue
            where = place[i] + d
            if source[i] == FROM_POOL or source[i] == ALIGNED_POOL:
                t = s.tokens[where & mask]
            elif where < n:
                t = r.tokens[base + where]
            else:
                ancestor = node
                while depth_of[ancestor] > where - n:
                    ancestor = parents[ancestor]
                t = tokens[ancestor]
            if t < 0 or t >= vocab_size:
                continue
            vote = _odds(r, slot, source[i], length[i] + d, t, weights, scratch)
            total += vote
            k = 0
            while k < distinct and said[k] != t:
                k += 1
            if k == distinct:
                said[k] = t
                votes[k] = 0.0
                bits[k] = 0
                distinct += 1
            votes[k] += vote
            bits[k] |= np.int64(1) << np.int64(i)
        last, left = 1.0, 1.0
        for rank in range(min(branching, distinct)):
            k = 0
            for other in range(1, distinct):
                if votes[other] > votes[k]:
                    k = other
            share = votes[k] / total
            votes[k] = -1.0
            kept = 0
            longest = -1
            for i in range(count):
                if (bits[k] >> np.int64(i)) & 1:
                    kept += 1
                    if longest < 0 or length[i] > length[longest]:
                        longest = i
            entry = features[size]
            _odds(r, slot, source[longest], length[longest] + d, said[k], weights, entry)
            kind = min(source[longest], ALIGNED_OWN)
            first = record[WEIGHTS_AT]
            entry[2] = first + VOTE_WEIGHTS + kind * VOTE_BUCKETS + vote_bucket(share, kept)
            entry[3] = first + AGREEMENT_WEIGHTS + bucket
            if rank > 0:
                for kind in range(KINDS):
                    entry[kind] += siblings
            last = min(last, left, estimate(weights, entry))
            left -= last
            if above * last < floor:
                break
            token[size] = said[k]
            parent[size] = node
            chance[size] = above * last
            who[size] = bits[k]
            leader[size] = longest
            size += 1
        best = -1
        for i in range(size):
            if chance[i] > 0.0 and (best < 0 or chance[i] > chance[best]):
                best = i
        if best < 0:
            break
        node = made
        tokens[node] = token[best]
        parents[node] = parent[best]
        reach[node] = chance[best]
        depth_of[node] = depth_of[parent[best]] + 1 if parent[best] >= 0 else 0
        r.shadow_tokens[slot, node] = token[best]
        r.shadow_features[slot, node] = features[best]
        shadow_parents[node] = parent[best]
        if parent[best] == tail:
            tail = node
            lead = leader[best]
        mine = who[best]
        above = chance[best]
        chance[best] = 0.0
        made += 1
        if made == most:
            break
    record[SHADOW] = made
    record[LEAD_SOURCE] = -1
    if lead >= 0:
        kind = source[lead]
        record[LEAD_LENGTH] = length[lead]
        record[LEAD_SOURCE] = record[ALIGNED_SOURCE] if kind >= ALIGNED_OWN else kind
        record[LEAD] = place[lead]
    return made


def _stamped(stamp: int) -> Callable[..., None]:
    """step_tree(), which numba's cache keeps for this stamp: it would not notice a change of the other file."""

    def step_tree(
        r: Requests,
        s: Shared,
        slots: LongArray,
        rows: IntArray,
        token_ids: IntArray,
        num_tokens: LongArray,
        num_sampled: LongArray,
        levels: LongArray,
        max_match: int,
        vocab_size: int,
        branching: int,
        floor: float,
        weights: FloatArray,
        siblings: int,
        shadow_parents: IntArray,
        out: IntArray,
        parents: IntArray,
        reach: FloatArray,
        predicted: LongArray,
    ) -> None:
        """ngram_kernels.step() with trees: out, parents int32 [B, D], reach float64 [B, D] and
        predicted int64 [B] are filled. shadow_parents: int32 [slots, D]; the others: see there and
        _predict_tree()."""
        if stamp < 0:
            return
        source = np.empty(MAX_CANDIDATES + 1, np.int64)
        place = np.empty(MAX_CANDIDATES + 1, np.int64)
        length = np.empty(MAX_CANDIDATES + 1, np.int64)
        for b in range(slots.shape[0]):
            predicted[b] = 0
            slot = slots[b]
            if slot < 0:
                continue
            n = num_tokens[b]
            seen = take_in(r, slot, token_ids[rows[b]], n, levels)
            if seen > 0 and seen + num_sampled[b] == n:
                mismatch = _learn_from_tree(r, s, shadow_parents[slot], slot, seen, weights)
                _follow_alignment(r, s, slot, seen, mismatch)
            elif seen != n:
                r.record[slot, ALIGNED_SOURCE] = -1
            count = all_candidates(r, s, slot, levels, max_match, source, place, length)
            predicted[b] = _predict_tree(
                r, s, slot, count, source, place, length, branching, floor, vocab_size, weights,
                siblings, shadow_parents[slot], out[b], parents[b], reach[b],
            )  # fmt: skip

    kept: Any = compiled(step_tree)
    return kept


step_tree = _stamped(zlib.crc32(Path(ngram_kernels.__file__).read_bytes()))
