"""n-gram or trained draft, chosen on the device: what it is chosen by, and that it is learned."""

from __future__ import annotations

import pytest
import torch

from vllm_specx.engine.v2.sources import NGRAM, TRAINED, Sources

CPU = torch.device("cpu")
ROWS, MAX_K, LENGTH = 6, 8, 400


class World:
    """Requests whose next tokens are known: row r says r, r + 1, ... modulo 97."""

    def __init__(self, acceptance: tuple[float, ...] = (0.5, 0.5)) -> None:
        self.sources = Sources(ROWS, MAX_K, acceptance, CPU)
        self.tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
        self.lengths = torch.full((ROWS,), 5, dtype=torch.int32)
        for row in range(ROWS):
            self.tokens[row] = (torch.arange(LENGTH) + row) % 97

    def right(self, row: int, count: int) -> list[int]:
        at = int(self.lengths[row])
        return self.tokens[row, at : at + count].tolist()

    def step(
        self, rows: list[int], found: list[list[int]], trained: list[list[int]], match: int = 1
    ) -> list[list[int]]:
        """The drafts that are chosen; then as many tokens are committed as were right."""
        which = torch.tensor(rows)
        matched = torch.full((len(rows),), match, dtype=torch.int32)
        drafts = self.sources.choose(
            which, self.lengths, matched, torch.tensor(found), torch.tensor(trained)
        ).tolist()
        committed = []
        for row, draft in zip(rows, drafts, strict=True):
            truth = self.right(row, len(draft))
            agree = [a == b for a, b in zip(draft, truth, strict=True)]
            committed.append(1 + (agree.index(False) if False in agree else len(agree)))
        sampled = torch.tensor(committed)
        self.lengths[which] += sampled.int()
        self.sources.learn(which, self.tokens, self.lengths, sampled)
        return drafts


def test_the_source_that_is_right_is_chosen_in_the_end() -> None:
    world = World()
    wrong = [96, 96, 96, 96]
    for source in (TRAINED, NGRAM):
        for _ in range(25):
            good = world.right(2, 4)
            both = [wrong, wrong]
            both[source] = good
            drafts = world.step([2], [both[NGRAM]], [both[TRAINED][:2]])
        assert drafts[0][:2] == good[:2]


def test_each_request_has_its_own_choice() -> None:
    world = World()
    for _ in range(25):
        first, second = world.right(0, 4), world.right(1, 4)
        drafts = world.step([0, 1], [first, [96] * 4], [[96, 96], second[:2]])
    assert drafts == [first, [*second[:2], -1, -1]]


def test_what_was_not_verified_is_learned_from_too() -> None:
    """The n-gram draft is right and never chosen: it is judged by what was committed."""
    world = World(acceptance=(0.98, 0.98))
    before = world.sources.all.clone()
    good = world.right(0, 4)
    world.step([0], [good], [[96, 96]])
    grown = world.sources.all - before
    assert grown[1, 0, 0] > 0.5, "the n-gram's first token was right"
    assert grown[1, -1, 0] <= 0.0 and grown[0, -1, 0] > 0.5, "the trained draft's was wrong"


def test_long_matches_are_told_apart_from_short_ones() -> None:
    world = World()
    for _ in range(40):
        world.step([0], [world.right(0, 4)], [world.right(0, 2)], match=16)
        world.step([1], [[96] * 4], [world.right(1, 2)], match=1)
    good = world.right(3, 4)
    assert world.step([3], [good], [[95, 95]], match=20)[0] == good
    assert world.step([4], [[94] * 4], [[95, 95]], match=1)[0][:2] == [95, 95]


def test_where_both_agree_the_longer_draft_is_taken() -> None:
    world = World(acceptance=(0.98, 0.98))
    good = world.right(0, 4)
    assert world.step([0], [good], [good[:2]])[0] == good


def test_nothing_found_leaves_the_trained_draft() -> None:
    world = World()
    assert world.step([0], [[-1] * 4], [[7, 8]], match=0)[0] == [7, 8, -1, -1]


def test_a_seeded_request_does_not_depend_on_others() -> None:
    """Its choice is that of a world in which nobody else has said anything."""
    taught, fresh = World(), World()
    for _ in range(60):
        taught.step([0], [[96] * 4], [taught.right(0, 2)])
    for world in (taught, fresh):
        world.sources.admit(5, alone=True)
    for _ in range(8):
        found, trained = [[3, *taught.right(5, 4)[1:]]], [[4, 4]]
        assert taught.step([5], found, trained) == fresh.step([5], found, trained)
    contexts = torch.tensor([[0, 5]])
    drafts = torch.ones(1, 2, 4, dtype=torch.long)
    rows = torch.tensor([5])
    promised = [w.sources.promise(rows, drafts, contexts) for w in (taught, fresh)]
    assert torch.equal(*promised)
    others = [w.sources.promise(torch.tensor([1]), drafts, contexts) for w in (taught, fresh)]
    assert not torch.equal(*others), "others depend on what was said before"


@pytest.mark.parametrize("change", ["another request", "a step without drafts"])
def test_a_draft_that_is_out_of_date_is_not_judged(change: str) -> None:
    world = World()
    sources, rows = world.sources, torch.tensor([0])
    sources.choose(
        rows, world.lengths, torch.ones(1).int(), torch.tensor([[96] * 4]), torch.tensor([[96] * 2])
    )
    if change == "another request":
        sources.admit(0, alone=False)
        sampled = torch.tensor([1])
        world.lengths[0] += 1
    else:
        world.lengths[0] += 2
        sampled = torch.tensor([1])
    before = sources.all.clone()
    sources.learn(rows, world.tokens, world.lengths, sampled)
    assert torch.equal(sources.all, before)


def test_a_chunk_of_a_prompt_says_nothing() -> None:
    world = World()
    before = world.sources.all.clone()
    world.sources.learn(torch.tensor([0]), world.tokens, world.lengths, torch.tensor([0]))
    assert torch.equal(world.sources.all, before)


def test_the_order_of_requests_changes_nothing() -> None:
    """So every tensor-parallel rank chooses alike."""
    one, other = World(), World()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        rows = [0, 1, 2, 3]
        found = torch.randint(0, 97, (4, 4), generator=generator).tolist()
        trained = [one.right(row, 2) for row in rows]
        assert [t for t in trained] == [other.right(row, 2) for row in rows]
        one.step(rows, found, trained)
        other.step(rows[::-1], found[::-1], trained[::-1])
    assert torch.equal(one.sources.all, other.sources.all)
    assert torch.equal(one.sources.own, other.sources.own)
