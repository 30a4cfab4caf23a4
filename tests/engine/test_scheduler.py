"""Our schedulers in vLLM's own code, synchronous and asynchronous, with a scripted model and clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.scheduling import STEP, Stream, World, step_seconds
from tests.support.synthetic_heads import vllm_config, write
from tests.support.tiny import VOCAB, tiny_llama

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def goodput(chance: float, batch: int, k: int) -> float:
    """Tokens a second where all requests are alike."""
    tokens = batch * sum(chance**depth for depth in range(k + 1))
    return tokens / step_seconds(batch, batch * (1 + k), max(k, 1))


@BOTH
@pytest.mark.parametrize("batch", [1, 4])
def test_k_follows_a_change_of_workload_within_30_steps(
    model: str, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, batch: int
) -> None:
    """Drafts are accepted at 0.8, from some step on at 0.05, later at 0.8 again.

    30 steps after each change K is worth at least 0.95 of the best K, in the median of 15 steps of
    three runs.
    """
    reached: dict[int, list[float]] = {}
    now = {"chance": 0.0}
    for seed in range(3):
        world = World(model, monkeypatch, asynchronous=asynchronous, max_k=4, seed=seed)
        for i in range(batch):
            world.add(str(i), Stream(lambda said: now["chance"], tokens=490))
        for phase, (rate, steps) in enumerate(((0.8, 60), (0.05, 80), (0.8, 45))):
            now["chance"] = rate
            start = len(world.steps)
            for _ in range(steps):
                world.step()
            assert world.work(), "the requests ended before the test did"
            rates = [goodput(rate, batch, k) for k in range(world.max_k + 1)]
            late = [step.k for step in world.steps[start + 30 : start + 45]]
            reached.setdefault(phase, []).extend(rates[k] / max(rates) for k in late)
    for phase, ratios in reached.items():
        assert np.median(ratios) >= 0.95, (phase, ratios)


@BOTH
def test_steady_load_does_not_flap(
    model: str, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    world = World(model, monkeypatch, asynchronous=asynchronous)
    for i in range(8):
        world.add(str(i), Stream(lambda said: 0.6, tokens=450))
    for _ in range(100):
        world.step()
    before = world.controller.changes
    for _ in range(100):
        world.step()
    assert world.work()
    assert world.controller.changes - before <= 5


@BOTH
def test_a_long_prompt_beside_four_decodes(
    model: str, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Prompts in chunks of some 60 tokens: their steps, three times as long, teach nothing about the
    time of decode steps, and K stays where it was."""
    world = World(model, monkeypatch, asynchronous=asynchronous, batched_tokens=96)
    for i in range(4):
        world.add(str(i), Stream(lambda said: 0.75, tokens=480))
    for _ in range(80):
        world.step()
    usual = int(np.median([step.k for step in world.steps[-20:]]))
    known = world.controller.cost.time(4, 4 + 4 * usual)
    start = len(world.steps)
    for number in range(4):
        world.add(f"long-{number}", Stream(lambda said: 0.75, prompt=400, tokens=1))
        for _ in range(9):
            world.step()
    during = world.steps[start:]
    assert sum(step.prefill for step in during) >= 20
    assert world.work()
    assert world.controller.cost.time(4, 4 + 4 * usual) == pytest.approx(known, rel=0.1)
    moved = sum(a.k != b.k for a, b in itertools.pairwise(during))
    assert abs(int(np.median([step.k for step in during])) - usual) <= 1
    assert moved <= len(during) // 3
    world.run()
    assert [world.said[str(i)] for i in range(4)] == [480] * 4


@pytest.fixture
def head_world(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Stream], World]:
    """Two requests and drafts of up to 4 tokens that take as many forwards, of 4% of a step each."""
    heads = {f"blocks.{i}.layers.0.weight": torch.randn(128, 128) for i in range(4)}
    shape = {"hidden_size": 128, "vocab_size": VOCAB, "num_heads": 4, "num_hidden_layers": 1}
    tensors = {**heads, "lm_head.weight": torch.randn(VOCAB, 128)}
    method = {
        "method": "specx:medusa",
        "model": str(write(tmp_path / "heads", tensors, vllm_config(**shape))),
    }

    def start(stream: Stream) -> World:
        world = World(model, monkeypatch, asynchronous=False, method=method, max_k=4)
        for i in range(2):
            world.add(str(i), stream)
        return world

    return start


@pytest.mark.parametrize("reading", [0.0, 0.4])
def test_the_cost_of_our_own_forwards_is_told_from_that_of_verifying(
    head_world: Callable[[Stream], World], reading: float
) -> None:
    """Steps in which a draft reads prompts, too, say nothing of it."""
    world = head_world(Stream(lambda said: 0.5, tokens=480))
    world.reading = reading
    for _ in range(200):
        world.step()
    cost = world.controller.cost
    assert cost.draft_step(2) == pytest.approx(0.04 * STEP, rel=0.25)
    for drafts in (0, 4, 8):
        assert cost.time(2, 2 + drafts) == pytest.approx(step_seconds(2, 2 + drafts, 0), rel=0.05)


def test_what_a_step_without_drafts_takes_is_measured_although_all_draft(
    head_world: Callable[[Stream], World],
) -> None:
    world = head_world(Stream(lambda said: 0.9, tokens=480))
    for _ in range(60):
        world.step()
    rests = [n for n, step in enumerate(world.steps) if not step.k and not step.prefill]
    assert 4 <= len(rests) <= 6
    assert max(rests) < 30, "once is enough"


@pytest.mark.parametrize(
    ("method", "asynchronous"),
    [("draft_model", False), ("draft_model", True), ("ngram", False), ("specx:ngram", False)],
)
def test_preemption_and_the_edges_of_the_batch(
    model: str, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, method: str
) -> None:
    """Few blocks, every batch size from 1 to the largest and back, requests that end at the end of
    max_model_len: no assertion of vLLM's, no draft longer than was asked for, all tokens said."""
    chosen = {"draft_model": None, "ngram": NGRAM, "specx:ngram": {"method": "specx:ngram"}}[method]
    world = World(
        model, monkeypatch, asynchronous=asynchronous, method=chosen, blocks=90, max_num_seqs=12
    )
    random = np.random.default_rng(5)
    number = 0
    extras = [{}, {}, {"specx_k": 0}, {"specx_k": 2}, {"specx_scenario": "code"}]
    for wave in (1, 3, 8, 16, 16, 4, 1):
        for _ in range(wave):
            prompt = int(random.integers(1, 120))
            world.add(
                f"r{number}",
                Stream(
                    lambda said: 0.7,
                    prompt=prompt,
                    tokens=int(random.integers(1, 100)) if number % 7 else 512 - prompt,
                    extra=extras[number % len(extras)],
                    temperature=float(number % 3 == 0),
                ),
            )
            number += 1
        for _ in range(12):
            world.step()
    world.run()
    assert sum(step.preempted for step in world.steps) > 0
    assert max(step.requests for step in world.steps) == 12
    asked = world.max_k
    for step in world.steps:
        assert max(step.drafted.values(), default=0) <= asked
        for name, drafted in step.drafted.items():
            assert drafted <= world.streams[name].extra.get("specx_k", world.max_k), name
        asked = step.k
    for name, stream in world.streams.items():
        assert world.said[name] == min(stream.tokens, 512 - stream.prompt), name
    assert world.controller.steps > 100


def test_asynchronous_requests_verify_their_own_k(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two populations: all draft the largest K, those that miss verify fewer."""
    world = World(model, monkeypatch, asynchronous=True)
    for i in range(6):
        world.add(str(i), Stream(lambda said, good=i < 3: 0.9 if good else 0.05, tokens=450))
    for _ in range(80):
        world.step()
    assert len(world.running()) == 6
    late = world.steps[-30:]
    good, bad = (
        np.mean([step.drafted.get(str(i), 0) for step in late for i in group])
        for group in (range(3), range(3, 6))
    )
    assert good >= 3
    assert bad <= 1
