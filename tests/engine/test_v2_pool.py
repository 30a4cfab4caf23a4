"""The pool that requests share on the device: its Triton kernels, interpreted, against what they must
compute, and against V1's pool.

test_v2_ngram.py starts the process in which these run.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.v1_ngram import DRAFT, V1
from vllm_specx import config
from vllm_specx.engine.v2 import ngram_torch, pool_torch
from vllm_specx.engine.v2.pool_torch import BARRIER, NOBODY, DevicePool

VOCAB = 50
MINE, YOURS = pool_torch.owner_of("mine"), pool_torch.owner_of("yours")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_v2_ngram.py runs it in its process"
)


@pytest.fixture(scope="module")
def kernels() -> Any:
    from vllm_specx.engine.v2 import pool_kernels

    return pool_kernels


class Both:
    """One pool twice, by the kernels and by PyTorch. Rows of requests: 3."""

    def __init__(self, kernels: Any, places: int, sizes: list[int], longest: int) -> None:
        self.kernels, self.sizes, self.longest = kernels, sizes, longest
        self.tokens = torch.zeros(3, 400, dtype=torch.int32)
        self.lengths = torch.zeros(3, dtype=torch.int32)
        self.prompts = torch.zeros(3, dtype=torch.int32)
        self.owners = torch.zeros(3, dtype=torch.int64)
        self.pools = [DevicePool.empty(places, len(sizes), torch.device("cpu")) for _ in "ab"]
        self.wide = torch.tensor(sizes, dtype=torch.int32)

    def write(self, row: int, owner: int, prompt: list[int], output: list[int]) -> None:
        said = prompt + output
        self.tokens[row, : len(said)] = torch.tensor(said, dtype=torch.int32)
        self.lengths[row], self.prompts[row] = len(said), len(prompt)
        self.owners[row] = owner

    def end(self, row: int) -> None:
        texts = (self.tokens, self.lengths, self.prompts)
        self.kernels.append(self.pools[0], *texts, row, self.owners, self.wide, self.longest)
        owner = int(self.owners[row])
        pool_torch.append(self.pools[1], *texts, row, owner, self.sizes, self.longest)
        for name in ("tokens", "owners", "end", "table"):
            assert torch.equal(getattr(self.pools[0], name), getattr(self.pools[1], name)), name

    def look_up(
        self, rows: list[int], k: int, matched: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        found = [torch.full((len(rows), k + 3), -7)[:, :k] for _ in "ab"]
        lengths = [torch.full((len(rows),), matched, dtype=torch.int32) for _ in "ab"]
        texts = (self.tokens, self.lengths, torch.tensor(rows), self.owners)
        self.kernels.look_up(
            self.pools[0], *texts, self.wide, self.longest, lengths[0], found[0], VOCAB
        )
        pool_torch.look_up(
            self.pools[1], *texts, self.sizes, self.longest, lengths[1], found[1], VOCAB
        )
        assert found[0].tolist() == found[1].tolist()
        assert lengths[0].tolist() == lengths[1].tolist()
        return found[0].tolist(), lengths[0].tolist()


texts_of = st.lists(st.integers(0, 3), min_size=0, max_size=30)
owners_of = st.sampled_from([NOBODY, MINE, YOURS])


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    requests=st.lists(st.tuples(owners_of, texts_of, texts_of), min_size=1, max_size=6),
    asking=st.tuples(owners_of, texts_of),
    k=st.integers(1, 5),
    matched=st.integers(0, 3),
    min_match=st.integers(1, 3),
    longest=st.integers(3, 20),
    places=st.sampled_from([64, 100, 128]),
)
def test_kernels_compute_what_is_said(
    kernels: Any,
    requests: Any,
    asking: Any,
    k: int,
    matched: int,
    min_match: int,
    longest: int,
    places: int,
) -> None:
    """Small rings, so that documents are overwritten and windows collide; empty rows; outputs too short
    and too long to keep; rows that share with nobody."""
    both = Both(kernels, places, ngram_torch.windows(min_match, longest), longest)
    for number, (owner, prompt, output) in enumerate(requests):
        both.write(number % 3, owner, prompt, output)
        if owner != NOBODY:
            both.end(number % 3)
    both.write(1, asking[0], asking[1], [])
    both.look_up([1, 0, 2], k, matched)


@pytest.mark.parametrize("length", [4, 126, 127, 128, 129, 255, 256, 300])
def test_lengths_at_the_edges_of_blocks(kernels: Any, length: int) -> None:
    both = Both(kernels, 1024, [2, 4], 8)
    generator = torch.Generator().manual_seed(length)
    said = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    for _ in range(5):  # until the ring is full
        both.write(0, MINE, [7, 8, 9], said)
        both.end(0)
    both.write(1, MINE, said[: length // 2], [])
    drafts, _ = both.look_up([1], 4)
    following = said[length // 2 :][:4]
    assert drafts[0][: len(following)] == following


def test_only_longer_matches_of_the_same_owner_are_taken(kernels: Any) -> None:
    both = Both(kernels, 256, [1, 2, 4], 8)
    both.write(0, MINE, [1, 2], [3, 4, 5, 6, 7])
    both.end(0)
    both.write(1, MINE, [9, 3, 4, 5], [])
    both.write(2, YOURS, [9, 3, 4, 5], [])
    drafts, matched = both.look_up([1, 2], 4)
    assert drafts == [[6, 7, -1, -1], [-7] * 4] and matched == [3, 0]
    drafts, matched = both.look_up([1], 4, matched=3)
    assert drafts == [[-7] * 4] and matched == [3]


def test_what_follows_a_prompt_is_known_and_the_prompt_itself_is_not(kernels: Any) -> None:
    both = Both(kernels, 256, [1, 2], 8)
    both.write(0, MINE, [10, 11, 12, 13], [20, 21, 22, 23])
    both.end(0)
    both.write(1, MINE, [12, 13], [])
    both.write(2, MINE, [10, 11], [])
    drafts, matched = both.look_up([1, 2], 3)
    assert drafts == [[20, 21, 22], [-7] * 3] and matched == [2, 0]


def test_a_draft_ends_with_its_document(kernels: Any) -> None:
    both = Both(kernels, 256, [1, 2], 8)
    for output in ([20, 21, 22, 23], [30, 31, 32, 33]):
        both.write(0, MINE, [1], output)
        both.end(0)
    both.write(1, MINE, [21, 22], [])
    drafts, _ = both.look_up([1], 3)
    assert drafts == [[23, -1, -1]]


def test_memory_is_what_it_was_and_the_oldest_is_forgotten(kernels: Any) -> None:
    both = Both(kernels, 64, [2], 4)
    bytes_before = both.pools[0].bytes
    oldest, newest = list(range(40, 48)), list(range(30, 38))
    both.write(1, MINE, [41, 42], [])
    both.write(2, MINE, [31, 32], [])
    both.write(0, MINE, [], oldest)
    both.end(0)
    drafts, _ = both.look_up([1, 2], 2)
    assert drafts == [[43, 44], [-7, -7]]
    for _ in range(3):
        both.write(0, MINE, [], list(range(16)))
        both.end(0)
    both.write(0, MINE, [], newest)
    both.end(0)
    assert both.pools[0].bytes == bytes_before
    drafts, _ = both.look_up([1, 2], 2)
    assert drafts == [[-7, -7], [33, 34]]
    assert BARRIER in both.pools[0].tokens


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    order=st.permutations(range(VOCAB)),
    cut=st.integers(8, 30),
    start=st.integers(0, 20),
    length=st.integers(1, 6),
    shared=st.booleans(),
)
def test_drafts_are_those_of_v1(
    kernels: Any, order: list[int], cut: int, start: int, length: int, shared: bool
) -> None:
    """Where only one text can follow: V1 has votes beside it, and V2 has not."""
    from vllm_specx.engine.v2 import ngram_kernels

    said = order[:cut]
    start = min(start, cut - length - 1)
    again = said[start : start + length]
    ngram = config.NgramConfig(min_match=1, max_match=8)
    sizes = ngram_torch.windows(1, 8)
    both = Both(kernels, 1024, sizes, 8)
    v1 = V1(ngram, VOCAB)
    if shared:
        v1.propose("first", [], said)
        v1.finish("first")
        both.write(0, MINE, [], said)
        both.end(0)
        text = [*order[cut:], *again][-30:]
    else:
        text = [*said, *again]
    both.write(1, MINE, text, [])
    drafts = torch.full((1, DRAFT), -1)
    matched = torch.zeros(1, dtype=torch.int32)
    row = torch.tensor([1])
    ngram_kernels.propose(
        both.tokens,
        both.lengths,
        row,
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, len(sizes), 512, dtype=torch.int32),
        both.wide,
        8,
        drafts,
        VOCAB,
        matched,
    )
    texts = (both.tokens, both.lengths, row, both.owners)
    kernels.look_up(both.pools[0], *texts, both.wide, 8, matched, drafts, VOCAB)
    of_v1 = v1.propose("second", text, [])
    made = drafts[0].tolist()
    assert of_v1, "V1 has drafted nothing"
    assert made[: len(of_v1)] == of_v1
