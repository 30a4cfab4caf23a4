"""The compiled part of the n-gram lookahead: index, matching, voting, calibration, draft length.

Everything numba compiles is in this one file, because numba's cache notices a change of the file
that holds a function, and not a change of the files that hold what it calls.

The index is hash chains, as in LZ77 compressors: for windows of several lengths (`levels`), `head`
holds the latest place where a window with that hash ended and `prev` the place before it. A place
is written as c, the position of the token that FOLLOWS the window, so 0 means none.
"""

# Machine integers are typed as int here; numpy's scalar types would say the same at length.
# mypy: disable-error-code="no-any-return, return-value, arg-type, assignment"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile for the CPU, and keep the result on disk where some cache folder is writable."""
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        return numba.njit(function, nogil=True)


BARRIER = np.int32(-(2**31))
"""Stands between the pool's documents; equal to no token."""

# Fields of a request's record: int64 [requests, FIELDS].
OFFSET, CAPACITY, LENGTH, PROMPT, POOL, SHADOW, LEAD_SOURCE, LEAD, LEAD_LENGTH = range(9)
ALIGNED_SOURCE, ALIGNED, ANCHOR, AGREED, RUN, MISSES, WEIGHTS_AT = range(9, 16)
FIELDS = 16

# Fields of the pool's state: int64 [POOL_FIELDS]. Positions only grow; position & mask is the place.
TAIL, END, INDEXED, POOL_MASK, HEAD_MASK, DOC_MASK = range(6)
POOL_FIELDS = 6

# Fields of a document: int64 [documents, DOC_FIELDS].
DOC_OUTPUT, DOC_END, DOC_POOL, DOC_USED = range(4)
DOC_FIELDS = 4

# Where a candidate comes from. The last two continue what the output followed before it departed.
FROM_PROMPT, FROM_OUTPUT, FROM_POOL, ALIGNED_OWN, ALIGNED_POOL = range(5)
SOURCES = 4

# The features of a prediction: one of each kind, and each has a weight (calibration.py).
LENGTH_BUCKETS = 12
COUNT_BUCKETS = 6
VOTE_BUCKETS = 7
AGREEMENT_BUCKETS = 10
KINDS = 4
LENGTH_WEIGHTS = 0
COUNT_WEIGHTS = LENGTH_WEIGHTS + SOURCES * LENGTH_BUCKETS
VOTE_WEIGHTS = COUNT_WEIGHTS + SOURCES * COUNT_BUCKETS
AGREEMENT_WEIGHTS = VOTE_WEIGHTS + SOURCES * VOTE_BUCKETS
WEIGHTS = AGREEMENT_WEIGHTS + AGREEMENT_BUCKETS
"""Of requests of one kind (calibration.py: greedy, sampled); WEIGHTS_AT is where a request's begin."""

MAX_WALK = 32
"""Chain links followed at one level."""
MAX_CANDIDATES = 24
ENOUGH_CANDIDATES = 6
"""Shorter matches are not looked at once there are this many."""
LEARNING_RATE = 0.04
AGREEMENT_RATE = 0.1
SUREST = 1e-4
"""Estimates stay between this and one minus this."""
USEFUL = 4
"""A document of the pool was useful where this many of its tokens came true in a row."""
MAX_MISSES = 8
WINDOW = 12
CAUTION = 1.5
"""Reach is raised to this power where drafts are cut: those chosen for a high estimate are
overestimated, and the more so the deeper (benchmarks/ngram_offline.py)."""


class Requests(NamedTuple):
    """Per-request state. R request slots, A places in the arena, L levels, D draft depth.

    record: int64 [R, FIELDS].
    agreement: float64 [R], the recent share of predictions that came true.
    shadow_tokens: int32 [R, D]; shadow_features: int32 [R, D, KINDS]. What was predicted last
        step, drafted or not, and on which grounds: the evidence for the calibration.
    tokens: int32 [A]; prev: int32 [A, L]; head: int32 [A * L]; counts: int32 [A], how often a
        token (by its hash) is in the request. A request owns CAPACITY places from OFFSET on.
    """

    record: LongArray
    agreement: FloatArray
    shadow_tokens: IntArray
    shadow_features: IntArray
    tokens: IntArray
    prev: IntArray
    head: IntArray
    counts: IntArray


class Shared(NamedTuple):
    """The pool: a ring of documents with one index. P places, L levels, M documents, H heads.

    state: int64 [POOL_FIELDS]; tokens: int32 [P]; document: int32 [P]; prev: int32 [P, L];
    head: int32 [L, H]; documents: int64 [M, DOC_FIELDS].
    """

    state: LongArray
    tokens: IntArray
    document: IntArray
    prev: IntArray
    head: IntArray
    documents: LongArray


@compiled
def _mix(h: int, n: int, seed: int) -> int:
    """Finish the hash of n tokens; int64 arithmetic that wraps around."""
    h = (h ^ (n * 1000003) ^ (seed * 40503)) * np.int64(-7046029254386353131)
    return np.int64(h ^ (h >> np.int64(29))) * np.int64(-4658895280553007687) >> np.int64(33)


@compiled
def _count_place(token: int, capacity: int) -> int:
    return (np.int64(token) * np.int64(2654435761) >> np.int64(7)) & np.int64(capacity - 1)


@compiled
def _insert_own(r: Requests, base: int, capacity: int, c: int, levels: LongArray) -> None:
    """Index the windows of one request that end before position c."""
    h = np.int64(0)
    n = 0
    mask = np.int64(capacity - 1)
    place = base + c - 1
    r.counts[base + _count_place(r.tokens[place], capacity)] += 1
    for level in range(levels.shape[0]):
        length = levels[level]
        if length > c:
            r.prev[place, level] = 0
            continue
        while n < length:
            h = h * np.int64(6364136223846793005) + np.int64(r.tokens[place - n]) + 1
            n += 1
        slot = base * levels.shape[0] + level * capacity + (_mix(h, n, np.int64(0)) & mask)
        r.prev[place, level] = r.head[slot]
        r.head[slot] = c


@compiled
def _clear_own(r: Requests, base: int, capacity: int, levels: LongArray) -> None:
    r.head[base * levels.shape[0] : (base + capacity) * levels.shape[0]] = 0
    r.counts[base : base + capacity] = 0


@compiled
def rebuild_own(r: Requests, slot: int, length: int, levels: LongArray) -> None:
    """Index the first `length` tokens of a request anew."""
    base = r.record[slot, OFFSET]
    capacity = r.record[slot, CAPACITY]
    _clear_own(r, base, capacity, levels)
    for c in range(1, length + 1):
        _insert_own(r, base, capacity, c, levels)
    r.record[slot, LENGTH] = length


@compiled
def index_pool(s: Shared, quota: int, levels: LongArray) -> None:
    """Index up to `quota` more of the pool's tokens.

    Only windows that an output token follows are indexed, so nothing else is ever drafted.
    """
    mask = s.state[POOL_MASK]
    c = max(s.state[INDEXED], s.state[TAIL])
    end = s.state[END]
    stop = min(end, c + quota)
    while c < stop:
        place = c & mask
        document = s.documents[s.document[place]]
        if c <= document[DOC_OUTPUT]:
            c = document[DOC_OUTPUT] + 1
            continue
        if c >= document[DOC_END]:
            c += 1
            continue
        h = np.int64(0)
        n = 0
        seed = document[DOC_POOL] + 1
        last = (c - 1) & mask
        fits = True
        for level in range(levels.shape[0]):
            while fits and n < levels[level]:
                token = s.tokens[(c - 1 - n) & mask]
                if token == BARRIER:
                    fits = False
                else:
                    h = h * np.int64(6364136223846793005) + np.int64(token) + 1
                    n += 1
            if not fits:
                s.prev[last, level] = 0
                continue
            slot = _mix(h, n, seed) & s.state[HEAD_MASK]
            s.prev[last, level] = s.head[level, slot]
            s.head[level, slot] = c
        c += 1
    s.state[INDEXED] = min(c, end)


@compiled
def length_bucket(length: int) -> int:
    """1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, 33-48, 49 and more."""
    if length <= 4:
        return max(length, 1) - 1
    if length <= 8:
        return 4 if length <= 6 else 5
    if length <= 16:
        return 6 if length <= 12 else 7
    if length <= 32:
        return 8 if length <= 24 else 9
    return 10 if length <= 48 else 11


@compiled
def aligned_bucket(agreed: int, run: int) -> int:
    """By tokens agreed since the mismatch (0, 1, more) and the length of the match before it."""
    first = min(agreed, 2) * 4
    if run < 4:
        return first
    if run < 8:
        return first + 1
    return first + 2 if run < 16 else first + 3


@compiled
def vote_bucket(share: float, votes: int) -> int:
    """All agree (one, two or three, more candidates), or by the winner's share of the weight."""
    if share > 0.999:
        if votes == 1:
            return 0
        return 1 if votes < 4 else 2
    if share >= 0.85:
        return 3
    if share >= 0.65:
        return 4
    return 5 if share >= 0.45 else 6


@compiled
def _match_own(r: Requests, base: int, n: int, c: int, most: int) -> int:
    m = 0
    most = min(most, c)
    while m < most and r.tokens[base + c - 1 - m] == r.tokens[base + n - 1 - m]:
        m += 1
    return m


@compiled
def _match_pool(r: Requests, s: Shared, base: int, n: int, c: int, most: int) -> int:
    m = 0
    most = min(most, n)
    mask = s.state[POOL_MASK]
    while m < most and s.tokens[(c - 1 - m) & mask] == r.tokens[base + n - 1 - m]:
        m += 1
    return m


@compiled
def find_candidates(
    r: Requests,
    s: Shared,
    slot: int,
    levels: LongArray,
    max_match: int,
    use_pool: bool,
    source: LongArray,
    place: LongArray,
    length: LongArray,
) -> int:
    """Earlier places whose preceding tokens equal the request's last ones, longest level first.

    source, place, length: int64 [MAX_CANDIDATES], filled with where each candidate comes from, the
    position its continuation starts at, and its match length. Returns how many there are.
    """
    record = r.record[slot]
    base = record[OFFSET]
    n = record[LENGTH]
    prompt = record[PROMPT]
    count = 0
    own_end = n - 1
    pool = record[POOL]
    searching_pool = use_pool and pool >= 0 and s.state[TAIL] < s.state[END]
    hashes = np.zeros(levels.shape[0], np.int64)
    if searching_pool:
        h = np.int64(0)
        taken = 0
        for level in range(levels.shape[0]):
            if levels[level] > n:
                break
            while taken < levels[level]:
                h = h * np.int64(6364136223846793005) + np.int64(r.tokens[base + n - 1 - taken]) + 1
                taken += 1
            hashes[level] = _mix(h, taken, pool + 1)
    for level in range(levels.shape[0] - 1, -1, -1):
        if levels[level] > n:
            continue
        top = level == levels.shape[0] - 1
        above = max_match + 1 if top else levels[level + 1]
        own_room = min(MAX_CANDIDATES, count + MAX_CANDIDATES // 2)
        c = r.prev[base + own_end, level]
        steps = 0
        while c > 0 and steps < MAX_WALK and count < own_room:
            m = _match_own(r, base, n, c, max_match)
            if m >= levels[level] and m < above:
                source[count] = FROM_PROMPT if c < prompt else FROM_OUTPUT
                place[count] = c
                length[count] = m
                count += 1
            c = r.prev[base + c - 1, level]
            steps += 1
        if searching_pool:
            c = s.head[level, hashes[level] & s.state[HEAD_MASK]]
            steps = 0
            while c > s.state[TAIL] and steps < MAX_WALK and count < MAX_CANDIDATES:
                where = c & s.state[POOL_MASK]
                if s.documents[s.document[where], DOC_POOL] == pool:
                    m = _match_pool(r, s, base, n, c, max_match)
                    if m >= levels[level] and m < above:
                        source[count] = FROM_POOL
                        place[count] = c
                        length[count] = m
                        count += 1
                c = s.prev[(c - 1) & s.state[POOL_MASK], level]
                steps += 1
        if count >= ENOUGH_CANDIDATES:
            break
    return count


@compiled
def _source_token(r: Requests, s: Shared, slot: int, source: int, position: int) -> int:
    """The token at a position of a source, or BARRIER where there is none (any more)."""
    if position < 0:
        return BARRIER
    if source == FROM_POOL:
        if position <= s.state[TAIL] or position >= s.state[END]:
            return BARRIER
        return s.tokens[position & s.state[POOL_MASK]]
    if position >= r.record[slot, LENGTH]:
        return BARRIER
    return r.tokens[r.record[slot, OFFSET] + position]


@compiled
def _follow_alignment(r: Requests, s: Shared, slot: int, first: int, mismatch: int) -> None:
    """Keep the place in the source that the output was following before it departed.

    first: index of the first token committed this step; mismatch: how many of them agreed with
    the prediction, or -1 if all that could be compared did.
    """
    record = r.record[slot]
    base = record[OFFSET]
    n = record[LENGTH]
    if mismatch >= 0 and record[LEAD_SOURCE] >= 0:
        run = record[LEAD_LENGTH] + mismatch
        if record[ALIGNED_SOURCE] < 0 or run >= min(record[RUN], 6):
            record[ALIGNED_SOURCE] = record[LEAD_SOURCE]
            record[ANCHOR] = record[LEAD] + mismatch
            record[ALIGNED] = record[ANCHOR]
            record[AGREED] = 0
            record[RUN] = run
            record[MISSES] = 0
            first += mismatch
    source = record[ALIGNED_SOURCE]
    if source < 0:
        return
    for i in range(first, n):
        token = r.tokens[base + i]
        if record[MISSES] > 0 and token == _source_token(r, s, slot, source, record[ALIGNED]):
            record[ALIGNED] += 1
            record[AGREED] += 1
            continue
        record[AGREED] = 0
        record[MISSES] += 1
        record[ALIGNED] = record[ANCHOR] + 1
        for ahead in range(1, WINDOW):
            other = _source_token(r, s, slot, source, record[ANCHOR] + ahead)
            if other == BARRIER:
                break
            if other == token:
                record[ALIGNED] = record[ANCHOR] + ahead + 1
                record[AGREED] = 1
                break
    if record[MISSES] > MAX_MISSES or record[AGREED] > WINDOW:
        record[ALIGNED_SOURCE] = -1


@compiled
def count_bucket(count: int) -> int:
    """How often the predicted token is in the request already: 0, 1, 2, 3-4, 5-8, more."""
    if count <= 2:
        return count
    if count <= 4:
        return 3
    return 4 if count <= 8 else 5


@compiled
def estimate(weights: FloatArray, features: IntArray) -> float:
    """The probability that the target agrees: logistic in the weights of the features."""
    odds = 0.0
    for kind in range(KINDS):
        odds += weights[features[kind]]
    return min(max(1.0 / (1.0 + np.exp(-odds)), SUREST), 1.0 - SUREST)


@compiled
def learn(weights: FloatArray, features: IntArray, agreed: bool) -> None:
    """One step of stochastic gradient descent on the log loss of an estimate."""
    change = LEARNING_RATE * ((1.0 if agreed else 0.0) - estimate(weights, features))
    for kind in range(KINDS):
        weights[features[kind]] += change


@compiled
def _learn_from_step(
    r: Requests, s: Shared, slot: int, first: int, weights: FloatArray
) -> int:  # fmt: skip
    """Compare the last prediction with what was committed from index `first` on.

    Returns how many tokens agreed before the first that did not, or -1 if none disagreed.
    """
    record = r.record[slot]
    base = record[OFFSET]
    known = min(record[SHADOW], record[LENGTH] - first)
    pooled = record[LEAD_SOURCE] == FROM_POOL and record[LEAD] > s.state[TAIL]
    for j in range(known):
        agreed = r.tokens[base + first + j] == r.shadow_tokens[slot, j]
        learn(weights, r.shadow_features[slot, j], agreed)
        r.agreement[slot] += AGREEMENT_RATE * ((1.0 if agreed else 0.0) - r.agreement[slot])
        if not agreed:
            return j
        if pooled and j + 1 == USEFUL:
            s.documents[s.document[record[LEAD] & s.state[POOL_MASK]], DOC_USED] = 1
    return -1


@compiled
def _odds(
    r: Requests, slot: int, source: int, length: int, token: int, weights: FloatArray,
    features: IntArray,
) -> float:  # fmt: skip
    """What a candidate's vote for a token weighs; its features are written as well."""
    record = r.record[slot]
    kind = min(source, ALIGNED_OWN)
    bucket = aligned_bucket(length, record[RUN]) if kind == ALIGNED_OWN else length_bucket(length)
    count = r.counts[record[OFFSET] + _count_place(token, record[CAPACITY])]
    first = record[WEIGHTS_AT]
    features[0] = first + LENGTH_WEIGHTS + kind * LENGTH_BUCKETS + bucket
    features[1] = first + COUNT_WEIGHTS + kind * COUNT_BUCKETS + count_bucket(count)
    return np.exp(weights[features[0]] + weights[features[1]])


@compiled
def _predict(
    r: Requests,
    s: Shared,
    slot: int,
    count: int,
    source: LongArray,
    place: LongArray,
    length: LongArray,
    token: IntArray,
    vote: FloatArray,
    depth: int,
    floor: float,
    vocab_size: int,
    weights: FloatArray,
    out: IntArray,
    reach: FloatArray,
) -> int:
    """Follow the heaviest branch of the trie that the candidates' continuations form.

    Writes the request's shadow (tokens, features), `out` (tokens) and `reach` (the probability
    that all tokens up to here are accepted), each up to `depth`; stops where reach falls under
    `floor`. Returns how many tokens were predicted.
    """
    record = r.record[slot]
    base = record[OFFSET]
    n = record[LENGTH]
    first = record[WEIGHTS_AT]
    mask = s.state[POOL_MASK]
    bucket = min(AGREEMENT_BUCKETS - 1, int(r.agreement[slot] * AGREEMENT_BUCKETS))
    cumulative = 1.0
    lead = -1
    done = 0
    for d in range(depth):
        features = r.shadow_features[slot, d]
        alive = 0
        same = True
        for i in range(count):
            where = place[i] + d
            if source[i] == FROM_POOL or source[i] == ALIGNED_POOL:
                t = s.tokens[where & mask]
            elif where < n:
                t = r.tokens[base + where]
            else:
                t = out[where - n]
            if t < 0 or t >= vocab_size:
                continue
            source[alive] = source[i]
            place[alive] = place[i]
            length[alive] = length[i]
            token[alive] = t
            same = same and t == token[0]
            alive += 1
        count = alive
        if count == 0:
            break
        chosen = token[0]
        share = 1.0
        if not same:
            total = 0.0
            for i in range(count):
                vote[i] = _odds(r, slot, source[i], length[i] + d, token[i], weights, features)
                total += vote[i]
            heaviest = -1.0
            for i in range(count):
                mine = 0.0
                for j in range(i, count):
                    if token[j] == token[i]:
                        mine += vote[j]
                if mine > heaviest:
                    heaviest = mine
                    chosen = token[i]
            share = heaviest / total
        kept = 0
        lead = 0
        for i in range(count):
            if token[i] == chosen:
                source[kept] = source[i]
                place[kept] = place[i]
                length[kept] = length[i]
                if length[kept] > length[lead]:
                    lead = kept
                kept += 1
        count = kept
        _odds(r, slot, source[lead], length[lead] + d, chosen, weights, features)
        kind = min(source[lead], ALIGNED_OWN)
        features[2] = first + VOTE_WEIGHTS + kind * VOTE_BUCKETS + vote_bucket(share, kept)
        features[3] = first + AGREEMENT_WEIGHTS + bucket
        cumulative *= estimate(weights, features)
        out[d] = chosen
        reach[d] = cumulative
        r.shadow_tokens[slot, d] = chosen
        done = d + 1
        if cumulative < floor:
            break
    record[SHADOW] = done
    record[LEAD_SOURCE] = -1
    if done > 0:
        kind = source[lead]
        record[LEAD_LENGTH] = length[lead]
        record[LEAD_SOURCE] = record[ALIGNED_SOURCE] if kind >= ALIGNED_OWN else kind
        record[LEAD] = place[lead]
    return done


@compiled
def take_in(r: Requests, slot: int, row: IntArray, n: int, levels: LongArray) -> int:
    """Index the tokens of a request up to `n` that are new. Returns how many were known; 0: it is another
    request's slot now, or its text has changed, and all of it was read anew."""
    record = r.record[slot]
    base = record[OFFSET]
    seen = record[LENGTH]
    same = seen <= n
    if same:
        for i in range(max(0, seen - 16), seen):
            if r.tokens[base + i] != row[i]:
                same = False
                break
    if not same:
        _clear_own(r, base, record[CAPACITY], levels)
        record[SHADOW] = 0
        record[LEAD_SOURCE] = -1
        record[ALIGNED_SOURCE] = -1
        seen = 0
    capacity = record[CAPACITY]
    for i in range(seen, n):
        r.tokens[base + i] = row[i]
        _insert_own(r, base, capacity, i + 1, levels)
    record[LENGTH] = n
    return seen


@compiled
def all_candidates(
    r: Requests,
    s: Shared,
    slot: int,
    levels: LongArray,
    max_match: int,
    source: LongArray,
    place: LongArray,
    length: LongArray,
) -> int:
    """find_candidates(), and the place that the output followed before it departed. The arrays have room
    for MAX_CANDIDATES + 1."""
    record = r.record[slot]
    count = find_candidates(r, s, slot, levels, max_match, True, source, place, length)
    if record[ALIGNED_SOURCE] >= 0 and record[MISSES] > 0:
        pooled = record[ALIGNED_SOURCE] == FROM_POOL
        fresh = _source_token(r, s, slot, record[ALIGNED_SOURCE], record[ALIGNED]) != BARRIER
        for i in range(count):
            if place[i] == record[ALIGNED] and (source[i] == FROM_POOL) == pooled:
                fresh = False
        if fresh:
            source[count] = ALIGNED_POOL if pooled else ALIGNED_OWN
            place[count] = record[ALIGNED]
            length[count] = record[AGREED]
            count += 1
    return count


@compiled
def step(
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
    floor: float,
    weights: FloatArray,
    out: IntArray,
    reach: FloatArray,
    predicted: LongArray,
) -> None:
    """One decode step for a batch of B requests: learn, append to the index, predict.

    slots: int64 [B], -1 for requests that draft nothing. out: int32 [B, D], reach: float64 [B, D]
    and predicted: int64 [B] are filled with the predictions.
    """
    source = np.empty(MAX_CANDIDATES + 1, np.int64)
    place = np.empty(MAX_CANDIDATES + 1, np.int64)
    length = np.empty(MAX_CANDIDATES + 1, np.int64)
    token = np.empty(MAX_CANDIDATES + 1, np.int32)
    vote = np.empty(MAX_CANDIDATES + 1, np.float64)
    depth = out.shape[1]
    for b in range(slots.shape[0]):
        predicted[b] = 0
        slot = slots[b]
        if slot < 0:
            continue
        n = num_tokens[b]
        seen = take_in(r, slot, token_ids[rows[b]], n, levels)
        if seen > 0 and seen + num_sampled[b] == n:
            mismatch = _learn_from_step(r, s, slot, seen, weights)
            _follow_alignment(r, s, slot, seen, mismatch)
        elif seen != n:
            r.record[slot, ALIGNED_SOURCE] = -1
        count = all_candidates(r, s, slot, levels, max_match, source, place, length)
        predicted[b] = _predict(
            r, s, slot, count, source, place, length, token, vote, depth, floor, vocab_size,
            weights, out[b], reach[b],
        )  # fmt: skip


@compiled
def choose_lengths(
    reach: FloatArray,
    predicted: LongArray,
    budgets: LongArray,
    costs: FloatArray,
    minimum: float,
    lengths: LongArray,
) -> None:
    """How many of the predicted tokens to draft: the most expected tokens per unit of time.

    costs: float64 [N], the time of a step that verifies 0, 1, ... draft tokens in all, in any unit;
    beyond its end it goes on in a straight line. Reach falls with depth, so the n likeliest tokens
    of the batch are always whole drafts' beginnings, and the best n is found by trying each.
    minimum: if not negative, draft while reach is at least this instead.
    lengths: int64 [B], the answer.
    """
    size = predicted.shape[0]
    bar = minimum
    chosen = 0
    if minimum < 0.0:
        total = 0
        for b in range(size):
            total += max(0, min(predicted[b], budgets[b]))
        values = np.empty(total, np.float64)
        i = 0
        for b in range(size):
            for k in range(min(predicted[b], budgets[b])):
                values[i] = reach[b, k]
                i += 1
        values.sort()
        last = costs.shape[0] - 1
        slope = costs[last] - costs[last - 1] if last > 0 else 0.0
        gain = float(size)
        best = gain / costs[0]
        bar = 2.0
        for n in range(1, total + 1):
            gain += values[total - n] ** CAUTION
            cost = costs[n] if n <= last else costs[last] + slope * (n - last)
            if gain > best * cost:
                best = gain / cost
                bar = values[total - n]
                chosen = n
    for b in range(size):
        most = min(predicted[b], budgets[b])
        k = 0
        while k < most and (reach[b, k] > bar or (minimum >= 0.0 and reach[b, k] == bar)):
            k += 1
        lengths[b] = k
        chosen -= k
    for b in range(size):
        most = min(predicted[b], budgets[b])
        while chosen > 0 and lengths[b] < most and reach[b, lengths[b]] == bar:
            lengths[b] += 1
            chosen -= 1
