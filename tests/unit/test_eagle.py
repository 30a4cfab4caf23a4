"""EAGLE as a proposer, against a draft that recomputes everything each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support import eagle_engine as synthetic
from tests.support.eagle_engine import Told, chains, reference, text

Version = Literal[1, 3]


def prefill(name: str, tokens: list[int], **changes: Any) -> Told:
    """The whole prompt and the first sampled token, tokens[-1]."""
    return Told(name, tokens, 0, len(tokens) - 1, **changes)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("batch", [1, 5])
def test_chains_under_acceptance_of_any_length(version: Version, batch: int) -> None:
    """Prefill, then steps in which each request accepts another number of its drafts."""
    draft = synthetic.weights(version)
    drafter = synthetic.drafter(draft)
    known = [text(6 + 13 * i, i) for i in range(batch)]
    told = [prefill(f"r{i}", tokens) for i, tokens in enumerate(known)]
    rng = np.random.default_rng(1)
    for _ in range(14):
        drafts = chains(drafter.propose(synthetic.context(told, version)))
        for tokens, drafted in zip(known, drafts, strict=True):
            assert drafted == reference(draft, tokens, 4)
        for i, drafted in enumerate(drafts):
            accepted = int(rng.integers(0, 5))
            new = [*drafted[:accepted], int(rng.integers(0, synthetic.VOCAB))]
            position = len(known[i]) - 1
            known[i] = known[i] + new
            told[i] = Told(f"r{i}", known[i], position, 5, len(new))


def _variants() -> dict[str, tuple[Version, dict[str, Any]]]:
    torch.manual_seed(0)
    norms = tuple(torch.rand(synthetic.HIDDEN) + 0.5 for _ in range(synthetic.AUX))
    vocab = synthetic.reduced()
    return {
        "qwen2 bias": (3, {"bias": True}),
        "qwen2 bias 1": (1, {"bias": True}),
        "fc_norm": (3, {"fc_norms": norms}),
        "norm_before_fc": (3, {"input_norm": torch.cat(norms)}),
        "norm_before_residual": (3, {"norm_before_residual": True}),
        "norm_output": (3, {"norm_output": True}),
        "d2t": (3, {"vocab": vocab, "lm_head": torch.randn(40, synthetic.HIDDEN)}),
        "d2t, target's rows": (3, {"vocab": vocab}),
        "vocabulary of EAGLE-1": (1, {"vocab": vocab}),
        "own embeddings": (3, {"embeddings": torch.randn(synthetic.VOCAB, synthetic.HIDDEN)}),
        "two layers": (3, {"layers": 2}),
        "three layers of EAGLE-1": (1, {"layers": 3}),
        "four kv heads": (3, {"shape": dataclasses.replace(synthetic.SHAPE, heads=4, kv_heads=4)}),
    }


def test_the_vocabulary_is_cut_where_the_checkpoint_is_read() -> None:
    draft = synthetic.weights(3, vocab=synthetic.reduced())
    drafter = synthetic.drafter(draft, keys={"vocab": 3})
    known = text(9, 1)
    drafts = chains(drafter.propose(synthetic.context([prefill("a", known)], 3)))
    assert drafts == [reference(draft, known, 4)]


@pytest.mark.parametrize("name", _variants())
def test_variants(name: str) -> None:
    version, changes = _variants()[name]
    draft = synthetic.weights(version, **changes)
    drafter = synthetic.drafter(draft)
    known = [text(9, 1), text(40, 2)]
    told = [prefill("a", known[0]), prefill("b", known[1])]
    drafts = chains(drafter.propose(synthetic.context(told, version)))
    assert drafts == [reference(draft, tokens, 4) for tokens in known]
    longer = [tokens + drafted[:2] + [3] for tokens, drafted in zip(known, drafts, strict=True)]
    told = [
        Told(name, tokens, len(tokens) - 4, 5, 3) for name, tokens in zip("ab", longer, strict=True)
    ]
    drafts = chains(drafter.propose(synthetic.context(told, version)))
    assert drafts == [reference(draft, tokens, 4) for tokens in longer]


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ],
)
def test_scaled_rotary_embedding(rope: dict[str, Any]) -> None:
    """Against the frequencies of transformers' own Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=synthetic.HIDDEN,
        num_attention_heads=6,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    frequencies = LlamaRotaryEmbedding(config).inv_freq
    draft = synthetic.weights(3, shape=dataclasses.replace(synthetic.SHAPE, rope=rope))
    tokens = text(150)
    drafts = chains(synthetic.drafter(draft).propose(synthetic.context([prefill("a", tokens)], 3)))
    expected = reference(draft, tokens, 4, frequencies=frequencies)
    assert drafts[0] == expected
    assert expected != reference(draft, tokens, 4)


def test_yarn_scales_queries_and_keys() -> None:
    from vllm_specx.draft.decoder import Rotary

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    shape = dataclasses.replace(synthetic.SHAPE, rope=rope)
    rotary = Rotary(shape, 32, dtype=torch.float32)
    x = torch.randn(1, 2, 16)
    y = x.clone()
    rotary.rotate(y, rotary(torch.tensor([0])))
    assert torch.allclose(y, x * (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("layers", [1, 2])
def test_chunked_prefill(version: Version, layers: int) -> None:
    """A prompt read three tokens at a time is drafted from as if read at once."""
    draft = synthetic.weights(version, layers=layers)
    drafter = synthetic.drafter(draft)
    tokens = text(50)
    for begin in range(0, 49, 3):
        end = min(begin + 3, 49)
        last = end == 49
        step = Told("a", tokens if last else tokens[:49], begin, end - begin, int(last), 4 * last)
        drafts = chains(drafter.propose(synthetic.context([step], version)))
        assert drafts == ([reference(draft, tokens, 4)] if last else [[]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_long_chunks_go_through_in_blocks(
    monkeypatch: pytest.MonkeyPatch, layers: int, bias: bool
) -> None:
    """Several blocks, several groups by length, contexts gathered again at each depth."""
    from vllm_specx.draft import attention, eagle, paged_layers

    monkeypatch.setattr(eagle, "_BLOCK", 32)
    monkeypatch.setattr(paged_layers, "_BLOCK", 32)
    monkeypatch.setattr(paged_layers, "_FUSED", 4)
    monkeypatch.setattr(attention, "_MASK", 2000)
    monkeypatch.setattr(attention, "_WASTE", 10)
    monkeypatch.setattr(attention, "_SCRATCH", 4000)
    masks: list[int] = []
    attend = attention.attend

    def watched(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        masks.append(0 if mask is None else mask.numel())
        return attend(q, kv, mask)

    monkeypatch.setattr(attention, "attend", watched)
    draft = synthetic.weights(3, layers=layers, bias=bias)
    drafter = synthetic.drafter(draft)
    known = [text(n, n) for n in (120, 7, 45, 118)]
    told = [prefill(f"r{i}", tokens) for i, tokens in enumerate(known)]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts == [reference(draft, tokens, 4) for tokens in known]
    assert max(masks) <= 2000


@pytest.mark.parametrize("version", [1, 3])
def test_drafting_after_not_drafting(version: Version) -> None:
    """Features of steps without drafts wait, and are used when drafting begins again."""
    draft = synthetic.weights(version)
    drafter = synthetic.drafter(draft)
    known = [text(20, 1), text(30, 2)]
    told = [prefill("a", known[0], budget=0), prefill("b", known[1], budget=0)]
    assert chains(drafter.propose(synthetic.context(told, version))) == [[], []]
    assert drafter.cache_use()["used"] == 0
    for step in range(30):
        known = [[*tokens, step] for tokens in known]
        told = [
            Told("a", known[0], len(known[0]) - 2, 1, budget=4 * (step == 29)),
            Told("b", known[1], len(known[1]) - 2, 1, budget=4 * (step % 7 == 6)),
        ]
        drafts = chains(drafter.propose(synthetic.context(told, version)))
        for each, drafted in zip(told, drafts, strict=True):
            assert drafted == reference(draft, each.tokens, each.budget)


@pytest.mark.parametrize("bound", ["_WAITING", "_WAITING_BYTES"])
def test_many_waiting_features_go_through(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    from vllm_specx.draft import eagle

    monkeypatch.setattr(eagle, bound, 12 if bound == "_WAITING" else 20 * 3 * 4 * synthetic.HIDDEN)
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    absent, tokens = text(8, 3), text(9)
    told = [prefill("a", tokens, budget=0), prefill("absent", absent, budget=0)]
    drafter.propose(synthetic.context(told, 3))
    for step in range(20):
        tokens = [*tokens, step]
        told = [Told("a", tokens, len(tokens) - 2, 1, budget=0)]
        drafter.propose(synthetic.context(told, 3))
    assert drafter.cache_use()["used"] >= 1
    (kept,) = drafter._requests._requests["absent"].kept
    owns_only_its_rows = kept.states[0].shape[0] == kept.count
    assert owns_only_its_rows == (bound == "_WAITING_BYTES")
    absent = [*absent, 5]
    told = [
        Told("absent", absent, len(absent) - 2, 1),
        Told("a", [*tokens, 1], len(tokens) - 1, 1),
    ]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts == [reference(draft, absent, 4), reference(draft, [*tokens, 1], 4)]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("bound", ["_WAITING", "_WAITING_BYTES"])
def test_while_hardly_anybody_drafts_little_is_read(
    monkeypatch: pytest.MonkeyPatch, version: Version, bound: str
) -> None:
    """Then only the latest features stay, and drafting begins with them; once it goes on, all are read."""
    from vllm_specx.draft import eagle

    monkeypatch.setattr(eagle, "_WAITING", 20)
    monkeypatch.setattr(eagle, "_RECENT", 12)
    if bound == "_WAITING_BYTES":
        monkeypatch.setattr(eagle, bound, 100 * 3 * 4 * synthetic.HIDDEN)
    draft = synthetic.weights(version)
    drafter = synthetic.drafter(draft)
    tokens = text(9)
    drafter.propose(synthetic.context([prefill("a", tokens, budget=0)], version))

    def go_on(budget: int) -> list[list[int]]:
        nonlocal tokens
        tokens = [*tokens, len(tokens) % synthetic.VOCAB]
        told = [Told("a", tokens, len(tokens) - 2, 1, budget=budget)]
        return chains(drafter.propose(synthetic.context(told, version)))

    while not drafter._resting:
        go_on(0)
    assert drafter.cache_use()["used"] > 0
    for step in range(50):
        go_on(0)
        assert step < 20 or drafter.cache_use()["used"] == 0
    waiting = drafter._requests._requests["a"].waiting + 1
    assert 12 < waiting <= 20
    (drafted,) = go_on(4)
    assert drafted == reference(draft, tokens, 4, start=len(tokens) - 1 - waiting)

    prompt = text(60, 4)
    drafter.propose(synthetic.context([prefill("b", prompt, budget=0)], version))
    prompt = [*prompt, 7]
    step = Told("b", prompt, len(prompt) - 2, 1)
    drafts = chains(drafter.propose(synthetic.context([step], version)))
    assert drafts == [reference(draft, prompt, 4, start=len(prompt) - 2 - 12)]

    for _ in range(10):
        go_on(4)
    drafter.propose(synthetic.context([prefill("c", prompt, budget=0)], version))
    prompt = [*prompt, 8]
    step = Told("c", prompt, len(prompt) - 2, 1)
    drafts = chains(drafter.propose(synthetic.context([step], version)))
    assert drafts == [reference(draft, prompt, 4)]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("again", [0, 32, 37])
def test_preempted_requests_start_again_lower(waits: bool, again: int) -> None:
    """All is read again from `again` on (a prefix hit of its own blocks, or nothing)."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    tokens = text(50)
    drafter.propose(synthetic.context([prefill("a", tokens, budget=0 if waits else 4)], 3))
    other = prefill("b", text(12, 3))
    drafter.propose(synthetic.context([other], 3))
    step = Told("a", tokens, again, 10, 0, 0)
    assert chains(drafter.propose(synthetic.context([step], 3))) == [[]]
    tokens = [*tokens, 7]
    step = Told("a", tokens, again + 10, 50 - again - 10)
    drafts = chains(drafter.propose(synthetic.context([step], 3)))
    assert drafts == [reference(draft, tokens, 4)]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("same_next", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_a_prefix_hit_drafts_as_if_all_had_been_read(
    version: Version, layers: int, same_next: bool, finished: bool
) -> None:
    """The target reads only what comes after 48 tokens that another request began with."""
    draft = synthetic.weights(version, layers=layers)
    drafter = synthetic.drafter(draft)
    first = text(70, 1)
    drafter.propose(synthetic.context([prefill("a", first)], version))
    following = first[48] if same_next else (first[48] + 1) % synthetic.VOCAB
    second = [*first[:48], following, *text(9, 2)]
    step = Told("b", second, 48, len(second) - 49)
    ended = ["a"] if finished else []
    drafts = chains(drafter.propose(synthetic.context([step], version, finished=ended)))
    assert drafts == [reference(draft, second, 4)]
    if finished:
        return
    # The first request's own entries are what they were.
    first = [*first, 11]
    step = Told("a", first, 69, 1)
    drafts = chains(drafter.propose(synthetic.context([step], version)))
    assert drafts == [reference(draft, first, 4)]


def test_a_third_request_finds_the_page_of_its_own_next_token() -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    prefix, tails = text(32, 1), [text(20, 2), text(20, 3)]
    for name, tail in zip("ab", tails, strict=True):
        drafter.propose(synthetic.context([prefill(name, prefix + tail)], 3))
    for name, tail in zip("cd", tails, strict=True):
        tokens = prefix + tail[:17] + [1]
        step = Told(name, tokens, 48, len(tokens) - 49)
        drafts = chains(drafter.propose(synthetic.context([step], 3)))
        assert drafts == [reference(draft, tokens, 4)]


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("hit", [16, 48, 53])
def test_what_cannot_be_found_is_a_hole(version: Version, hit: int) -> None:
    """The context starts where features are known, at its true positions."""
    draft = synthetic.weights(version)
    drafter = synthetic.drafter(draft)
    other = prefill("other", text(100, 9))
    drafter.propose(synthetic.context([other], version))
    tokens = text(70)
    told = [Told("a", tokens, hit, 69 - hit), Told("other", [*other.tokens, 4], 99, 1)]
    drafts = chains(drafter.propose(synthetic.context(told, version)))
    assert drafts[0] == reference(draft, tokens, 4, start=hit)
    assert drafts[1] == reference(draft, [*other.tokens, 4], 4)
    for step in range(3):
        tokens = [*tokens, step]
        drafts = chains(
            drafter.propose(synthetic.context([Told("a", tokens, len(tokens) - 2, 1)], version))
        )
        assert drafts == [reference(draft, tokens, 4, start=hit)]


@pytest.mark.parametrize("waits", [False, True])
def test_steps_that_the_drafter_did_not_see_are_a_hole(waits: bool) -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    tokens = text(30)
    step = prefill("a", tokens, budget=0 if waits else 4)
    drafter.propose(synthetic.context([step], 3))
    tokens = tokens + text(11, 3)
    drafts = chains(drafter.propose(synthetic.context([Told("a", tokens, 36, 4)], 3)))
    assert drafts == [reference(draft, tokens, 4, start=36)]


def test_without_the_last_feature_nothing_is_drafted() -> None:
    """Rows that end before the last committed token say nothing about the next one."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    tokens = text(30)
    drafts = chains(drafter.propose(synthetic.context([Told("a", tokens, 0, 20)], 3)))
    assert drafts == [[]]
    drafts = chains(drafter.propose(synthetic.context([Told("a", tokens, 20, 9)], 3)))
    assert drafts == [reference(draft, tokens, 4)]


def test_among_equals_the_youngest_gives_way() -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft, cache_tokens=128)
    known = [text(50, i) for i in range(3)]
    told = [prefill(f"r{i}", tokens) for i, tokens in enumerate(known[:2])]
    drafter.propose(synthetic.context(told, 3))
    drafts = chains(drafter.propose(synthetic.context([prefill("r2", known[2])], 3)))
    assert drafts == [[]]
    longer = [[*tokens, 1] for tokens in known[:2]]
    told = [Told(f"r{i}", tokens, 49, 1) for i, tokens in enumerate(longer)]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts == [reference(draft, tokens, 4) for tokens in longer]


def test_requests_come_and_go_in_any_order() -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    known = {name: text(10 + 7 * i, i) for i, name in enumerate("abcdef")}
    told = [prefill(name, tokens) for name, tokens in known.items()]
    drafter.propose(synthetic.context(told, 3))
    rng = np.random.default_rng(0)
    for step in range(12):
        ended = ["c"] if step == 5 else []
        for name in ended:
            del known[name]
        told = []
        for name in rng.permutation(list(known)):
            if rng.random() < 0.7:
                known[name] = [*known[name], step]
                told.append(Told(name, known[name], len(known[name]) - 2, 1))
        drafts = chains(drafter.propose(synthetic.context(told, 3, finished=ended)))
        assert drafts == [reference(draft, each.tokens, 4) for each in told]
    ending = synthetic.context([prefill("z", text(4), budget=0)], 3, finished=list(known))
    drafter.propose(ending)
    assert drafter.cache_use()["used"] == 0


def test_the_last_place_before_max_model_len() -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    tokens = text(synthetic.LENGTH)
    drafts = chains(drafter.propose(synthetic.context([prefill("a", tokens)], 3)))
    assert drafts == [reference(draft, tokens, 4)]
    drafts = chains(drafter.propose(synthetic.context([Told("a", tokens, 398, 1)], 3)))
    assert drafts == [reference(draft, tokens, 4)]


def test_a_full_cache_takes_the_pages_of_the_least_accepted() -> None:
    """Three requests of 60 tokens and room for 160: one loses what it had, and begins again."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft, cache_tokens=160)
    known = {name: text(60, i) for i, name in enumerate("abc")}
    for name in "ab":
        drafter.propose(synthetic.context([prefill(name, known[name])], 3))
    # Drafts of a are accepted, those of b are not.
    for _ in range(3):
        told = []
        for name in "ab":
            drafted = reference(draft, known[name], 4) if name == "a" else []
            known[name] = [*known[name], *drafted, 3]
            read = len(drafted) + 1
            told.append(Told(name, known[name], len(known[name]) - 1 - read, 5, read))
        drafts = chains(drafter.propose(synthetic.context(told, 3)))
        assert drafts == [reference(draft, known[name], 4) for name in "ab"]
    told = [prefill("c", known["c"]), *_one_more(known, "ab", 4)]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts[0] == reference(draft, known["c"], 4)
    assert drafts[1] == reference(draft, known["a"], 4)
    assert drafts[2] == [], "b had the lowest acceptance"
    assert drafter.cache_use()["used"] <= 10
    told = _one_more(known, "abc", 5)
    begin = len(known["b"]) - 2
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts[0] == reference(draft, known["a"], 4)
    assert drafts[1] == reference(draft, known["b"], 4, start=begin), "a page was free again"
    assert drafts[2] == reference(draft, known["c"], 4)
    told = _one_more(known, "bc", 6)
    drafts = chains(drafter.propose(synthetic.context(told, 3, finished=["a"])))
    assert drafts[0] == reference(draft, known["b"], 4, start=begin)


def _one_more(known: dict[str, list[int]], names: Iterable[str], token: int) -> list[Told]:
    for name in names:
        known[name] = [*known[name], token]
    return [Told(name, known[name], len(known[name]) - 2, 1) for name in names]


def test_a_prompt_that_the_cache_cannot_hold_takes_nothing_from_others() -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft, cache_tokens=64)
    small, large = text(20, 1), text(100, 2)
    told = [prefill("small", small), prefill("large", large)]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts == [reference(draft, small, 4), []]
    told = [Told("small", [*small, 1], 19, 1), Told("large", [*large, 1], 99, 1)]
    drafts = chains(drafter.propose(synthetic.context(told, 3)))
    assert drafts[0] == reference(draft, [*small, 1], 4)
    assert drafts[1] == reference(draft, [*large, 1], 4, start=99)


def test_short_drafts_stop_early_and_the_others_go_on() -> None:
    """min_probability ends each draft by itself; budgets too."""
    draft = synthetic.weights(3, logit_scale=0.3)
    known = [text(10 + i, i) for i in range(8)]
    told = [prefill(f"r{i}", tokens, budget=1 + i) for i, tokens in enumerate(known)]
    for floor in (0.0, 0.02, 0.2, 0.5, 1.0):
        drafter = synthetic.drafter(draft, keys={"min_probability": floor})
        drafts = chains(drafter.propose(synthetic.context(told, 3)))
        whole = [reference(draft, tokens, 8) for tokens in known]
        for i, (drafted, chain) in enumerate(zip(drafts, whole, strict=True)):
            assert drafted == chain[: len(drafted)] and len(drafted) <= i + 1
        if floor == 0.0:
            assert [len(drafted) for drafted in drafts] == list(range(1, 9))
        if floor == 1.0:
            assert drafts == [[]] * 8


def test_costs_decide_the_length() -> None:
    draft = synthetic.weights(3, acceptance=(0.5,) * 4)
    tokens = text(20)
    lengths = []
    for price in (0.0, 100.0):
        drafter = synthetic.drafter(draft, keys={"min_probability": None})
        costs = 1.0 + price * np.arange(8.0)
        step = synthetic.context([prefill("a", tokens)], 3, costs=costs)
        lengths.append(len(drafter.propose(step)[0].tokens))
    assert lengths == [4, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    """Drafts that bfloat16 makes are, for the most part, those of float32."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(synthetic.cast(draft, dtype), dtype=dtype)
    known = [text(30 + i, i) for i in range(8)]
    told = [prefill(f"r{i}", tokens) for i, tokens in enumerate(known)]
    step = synthetic.context(told, 3)
    assert step.verified is not None
    states = tuple(state.to(dtype) for state in step.verified.states)
    verified = dataclasses.replace(step.verified, states=states)
    drafts = chains(drafter.propose(dataclasses.replace(step, verified=verified)))
    right = [d[0] == reference(draft, t, 1)[0] for d, t in zip(drafts, known, strict=True)]
    assert sum(right) >= 6 and all(len(d) == 4 for d in drafts)


def test_memory_counts_weights_and_cache() -> None:
    draft = synthetic.weights(3)
    small = synthetic.drafter(draft, cache_tokens=160).memory()
    large = synthetic.drafter(draft, cache_tokens=320).memory()
    page = 16 * 4 * 16 * 4 + synthetic.HIDDEN * 4
    assert large - small == 10 * page
    assert small > 10 * page + 4 * sum(
        part.numel() for part in vars(draft.layers[0]).values() if part is not None
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_the_bound_of_the_default_cache_counts_all_of_it(layers: int) -> None:
    from vllm_specx.engine.eagle import _bytes_a_token

    draft = synthetic.weights(3, layers=layers)
    cache = synthetic.drafter(draft, cache_tokens=160)._cache
    assert cache.nbytes == 160 * _bytes_a_token(draft, 4)


def test_two_drafters_with_the_same_input_answer_the_same() -> None:
    """As on two tensor-parallel ranks, also when the cache is full."""
    draft = synthetic.weights(3)
    both = [synthetic.drafter(draft, cache_tokens=192) for _ in range(2)]
    known = {f"r{i}": text(30 + 9 * i, i) for i in range(6)}
    told = [prefill(name, tokens) for name, tokens in known.items()]
    rng = np.random.default_rng(3)
    empty = 0
    for _ in range(25):
        answers = [chains(each.propose(synthetic.context(told, 3))) for each in both]
        assert answers[0] == answers[1]
        empty += sum(not drafted for drafted in answers[0])
        names = [str(name) for name in rng.permutation(list(known))[:4]]
        told = []
        for name in names:
            told += _one_more(known, [name], int(rng.integers(0, 50)))
    assert empty, "the cache was never full"


@pytest.mark.parametrize(
    ("keys", "shared"),
    [(("a", "a"), True), (("a", "b"), False), ((None, None), False), (("a", None), False)],
)
def test_a_prefix_is_shared_within_a_key(keys: tuple[str | None, str | None], shared: bool) -> None:
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    first = text(70, 1)
    step = synthetic.context([prefill("a", first)], 3, state_keys=[keys[0]])
    drafter.propose(step)
    second = [*first[:49], *text(9, 2)]
    step = synthetic.context([Told("b", second, 48, len(second) - 49)], 3, state_keys=[keys[1]])
    drafts = chains(drafter.propose(step))
    assert drafts == [reference(draft, second, 4, start=0 if shared else 48)]


@pytest.mark.parametrize("waits", [False, True])
def test_after_a_fault_nothing_is_read_that_was_half_done(waits: bool) -> None:
    """States of a wrong width end a step; what follows is right, and no page is lost."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    tokens, other = text(50), text(20, 1)
    told = [prefill("a", tokens, budget=0 if waits else 4), prefill("other", other)]
    drafter.propose(synthetic.context(told, 3))
    step = synthetic.context([Told("a", [*tokens, 1], 49, 1)], 3, finished=["other"])
    assert step.verified is not None
    narrow = tuple(state[:, :-1] for state in step.verified.states)
    broken = dataclasses.replace(step.verified, states=narrow)
    with pytest.raises(RuntimeError):
        drafter.propose(dataclasses.replace(step, verified=broken))
    assert drafter.cache_use() | {"used": 0, "requests": 0} == drafter.cache_use()
    tokens = [*tokens, 1, 2]
    drafts = chains(drafter.propose(synthetic.context([Told("a", tokens, 50, 1)], 3)))
    assert drafts == [reference(draft, tokens, 4, start=50)]
    second = [*tokens[:48], 3, 4]
    drafts = chains(drafter.propose(synthetic.context([Told("b", second, 48, 1)], 3)))
    assert drafts == [reference(draft, second, 4, start=48)]


@pytest.mark.parametrize("placeholder", [synthetic.VOCAB, 10**6, -1])
def test_placeholders_outside_of_the_vocabulary(placeholder: int) -> None:
    """As some multimodal targets have them where an image is."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    known = [text(20, 1), text(30, 2)]
    told = [prefill("image", known[0]), prefill("text", known[1])]
    step = synthetic.context(told, 3)
    step.token_ids[step.rows[0], 3:7] = placeholder
    drafts = chains(drafter.propose(step))
    assert len(drafts[0]) == 4
    assert drafts[1] == reference(draft, known[1], 4)


def test_an_id_that_is_used_again_is_another_request() -> None:
    """It is among the ended and among the present; a prefix hit of what others wrote."""
    draft = synthetic.weights(3)
    drafter = synthetic.drafter(draft)
    old, new = text(70, 1), text(60, 2)
    drafter.propose(synthetic.context([prefill("a", old), prefill("b", new)], 3))
    tokens = [*new[:48], 7, 8, 9]
    step = synthetic.context([Told("a", tokens, 48, 2)], 3, finished=["a"])
    assert chains(drafter.propose(step)) == [reference(draft, tokens, 4)]
