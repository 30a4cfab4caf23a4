"""A draft model as a proposer, against transformers, which reads everything anew each time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.eagle_engine import chains
from tests.support.twins import FAMILIES, SIZES, continuation, twin
from vllm_specx.draft import paged_layers
from vllm_specx.draft.draft_model import DraftModelDrafter
from vllm_specx.draft.draft_model_checkpoint import load_draft_model
from vllm_specx.draft.draft_model_config import DraftModelConfig
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.draft.vocabularies import Draftable

LENGTH, VOCAB = 400, SIZES["vocab_size"]
Model = tuple[str, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A checkpoint, and the model as transformers reads it."""
    return made(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(tmp_path_factory.mktemp("qwen"), "qwen2")


def made(folder: Path, family: str, **changes: Any) -> Model:
    from transformers import AutoModelForCausalLM

    path = twin(folder / family, family, **changes)
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def drafter(path: str, **changes: Any) -> DraftModelDrafter:
    """Drafts of full length unless said otherwise."""
    keys = {"min_probability": 0.0, **changes.pop("keys", {})}
    weights = load_draft_model(path, changes.pop("dtype", torch.float32))
    ids = changes.pop("ids", Draftable(len(weights.lm_head)))
    sizes = {"max_batch": 8, "max_model_len": LENGTH, "cache_tokens": 8 * LENGTH, **changes}
    return DraftModelDrafter(DraftModelConfig(draft=path, **keys), weights, ids, **sizes)


def step(known: dict[str, list[int]], **changes: Any) -> DraftContext:
    """All requests have sampled their last token; `budgets` may be a number for all."""
    size = len(known)
    table = np.full((size + 2, LENGTH), -7, np.int32)
    rows = np.arange(size, dtype=np.int32)[::-1].copy() + 1
    for row, tokens in zip(rows, known.values(), strict=True):
        table[row, : len(tokens)] = tokens
    budgets = changes.pop("budgets", 4)
    fields: dict[str, Any] = {
        "request_ids": list(known),
        "rows": rows,
        "token_ids": table,
        "num_tokens": np.array([len(tokens) for tokens in known.values()], np.int32),
        "num_prompt_tokens": np.full(size, 1, np.int32),
        "sampled": [tokens[-1:] for tokens in known.values()],
        "budgets": np.broadcast_to(np.array(budgets, np.int32), size).copy(),
        "temperatures": np.zeros(size, np.float32),
        "pools": [None] * size,
        "finished": [],
        "vocab_size": VOCAB,
        **changes,
    }
    return DraftContext(**fields)


def text(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, VOCAB, length)]


def drafted(each: DraftModelDrafter, known: dict[str, list[int]], **changes: Any) -> list[Any]:
    return chains(each.propose(step(known, **changes)))


def wanted(reference: Any, known: dict[str, list[int]], count: int = 4) -> list[list[int]]:
    return [continuation(reference, tokens, count) for tokens in known.values()]


@pytest.mark.parametrize("batch", [1, 5])
def test_it_says_what_transformers_says_under_acceptance_of_any_length(
    model: Model, batch: int
) -> None:
    path, reference = model
    each = drafter(path)
    known = {f"r{i}": text(2 + 17 * i, i) for i in range(batch)}
    rng = np.random.default_rng(1)
    for turn in range(12):
        drafts = drafted(each, known)
        assert drafts == wanted(reference, known), turn
        for tokens, draft in zip(known.values(), drafts, strict=True):
            tokens += [*draft[: rng.integers(0, 5)], int(rng.integers(0, VOCAB))]
    assert each.draft_steps == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {"rope_theta": 1e6},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"max_shard_size": "20KB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_variants(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path, reference = made(tmp_path, family, **changes)
    if "max_shard_size" in changes:
        assert len(list(Path(path).glob("*.safetensors"))) > 2
    known = {"a": text(70, 1), "b": text(9, 2)}
    each = drafter(path)
    assert drafted(each, known) == wanted(reference, known)
    known["a"] += [3, 4]
    known["b"] += [5]
    assert drafted(each, known) == wanted(reference, known)


def test_a_long_prompt_is_read_in_parts_while_others_draft(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {"short": text(20, 1), "long": text(300, 2), "longer": text(330, 3)}
    reads = []
    for _ in range(14):
        drafts = drafted(each, known)
        reads.append([bool(draft) for draft in drafts])
        for draft, right in zip(drafts, wanted(reference, known), strict=True):
            assert draft in ([], right)
        assert set(each.missed) == {
            name for name, draft in zip(known, drafts, strict=True) if not draft
        }
        assert (each.draft_steps < 0) == (len(reads) <= 11)
        for tokens in known.values():
            tokens.append(7)
    # The first step reads 20 of "short" and 32 of the 44 that are left, "long" before "longer".
    assert all(short for short, _, _ in reads)
    assert [long for _, long, _ in reads].index(True) == 5
    assert [longer for _, _, longer in reads].index(True) == 10


def test_who_came_first_is_read_first(qwen: Model) -> None:
    each = drafter(qwen[0], keys={"read_tokens": 64})
    known = {"first": text(150, 1), "second": text(150, 2)}
    drafted(each, known)
    for _ in range(2):
        known = {name: [*known[name], 7] for name in reversed(sorted(known))}
        drafts = drafted(each, {name: known[name] for name in ("second", "first")})
    assert [bool(draft) for draft in drafts] == [False, True]


def test_nothing_new_to_read(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"a": text(50, 1), "b": text(60, 2)}
    for _ in range(2):
        assert drafted(each, known) == wanted(reference, known)


def test_what_the_target_reads_in_a_step_is_read_with_it(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {f"r{i}": text(100, i) for i in range(4)}
    assert drafted(each, known, tokens_read=400) == wanted(reference, known)


def test_a_prompt_is_read_while_the_target_reads_it(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {"short": text(20, 1), "long": text(300, 2)}
    sampled: list[list[int]] = [[7], []]
    for turn in range(6):
        drafts = drafted(each, known, sampled=sampled, budgets=[4, 0], reading=[1], tokens_read=100)
        assert drafts == [wanted(reference, known)[0], []]
        assert each.missed == set()
        assert (each.draft_steps < 0) == (turn < 4)
        known["short"].append(7)
    known["long"].append(7)
    assert drafted(each, known, tokens_read=2) == wanted(reference, known)


def test_no_prompt_is_read_while_nobody_is_drafted_for(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"short": text(20, 1), "long": text(300, 2)}
    sampled: list[list[int]] = [[7], []]
    for _ in range(2):
        drafted(each, known, sampled=sampled, budgets=0, reading=[1])
        drafted(each, {"long": known["long"]}, sampled=[[]], budgets=0, reading=[0])
        assert each.cache_use()["used"] == 0
    drafted(each, known, sampled=sampled, budgets=[4, 0], reading=[1])
    drafted(each, {"long": known["long"]}, sampled=[[]], budgets=0, reading=[0])
    assert each.cache_use()["used"] == 2 + 19
    assert drafted(each, known) == wanted(reference, known)


@pytest.mark.parametrize("block", [32, 1024])
def test_reading_in_blocks(qwen: Model, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_layers, "_BLOCK", block)
    path, reference = qwen
    each = drafter(path)
    known = {f"r{i}": text(150 - 40 * i, i) for i in range(4)}
    assert drafted(each, known) == wanted(reference, known)


def test_after_a_pause_what_was_said_meanwhile_is_read(qwen: Model) -> None:
    """Also what does not fit into a step."""
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {"a": text(30, 1), "b": text(40, 2)}
    drafted(each, known)
    for length in (3, 20, 100):
        known = {name: [*tokens, *text(length, length)] for name, tokens in known.items()}
        assert drafted(each, known, budgets=0) == [[], []]
        assert set(each.missed) == set()
        assert each.draft_steps == 0
        for _ in range(4):
            drafts = drafted(each, known)
            for tokens in known.values():
                tokens.append(11)
        right = {name: tokens[:-1] for name, tokens in known.items()}
        assert drafts == wanted(reference, right)


@pytest.mark.parametrize(
    ("keys", "shared"),
    [(("a", "a"), True), (("a", "b"), False), ((None, None), False), (("a", None), False)],
)
def test_a_common_prefix_is_read_once(
    qwen: Model, keys: tuple[str | None, str | None], shared: bool
) -> None:
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 96})
    prefix = text(80, 1)
    first = {"a": [*prefix, *text(10, 2)]}
    assert drafted(each, first, state_keys=[keys[0]]) == wanted(reference, first)
    second = {"b": [*prefix, *text(60, 3)]}
    drafts = drafted(each, second, state_keys=[keys[1]])
    assert drafts == (wanted(reference, second) if shared else [[]])
    used = each.cache_use()["used"]
    assert used == (6 + 9 - 5 if shared else 6 + 9)
    # The pages of one that has ended can still be found.
    third = {"c": [*prefix, *text(40, 4)]}
    drafts = drafted(each, third, state_keys=[keys[0]], finished=["a", "b"])
    assert drafts == (wanted(reference, third) if keys[0] else [[]])


def test_two_with_the_same_prompt_at_once(qwen: Model) -> None:
    """The second goes on where the first has got to, each time."""
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {"a": text(200, 1), "b": text(200, 1)}
    for turn in range(4):
        drafts = drafted(each, known)
        if turn < 3:
            assert drafts[0] == []
    assert drafts == wanted(reference, known)
    assert each.cache_use()["used"] == 14


@pytest.mark.parametrize("length", [79, 80, 81])
def test_the_same_prompt_again(qwen: Model, length: int) -> None:
    path, reference = qwen
    each = drafter(path)
    for name in "ab":
        known = {name: text(length, 1)}
        assert drafted(each, known) == wanted(reference, known)


def test_another_gets_ahead_with_the_same_prompt(qwen: Model) -> None:
    """Then the rest is not read again, and the pages that were meant for it are given back."""
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 64})
    known = {"slow": text(200, 1), "fast": text(200, 1)}
    assert drafted(each, {"slow": known["slow"]}) == [[]]
    fast = {"fast": known["fast"]}
    assert drafted(each, fast, tokens_read=1000) == wanted(reference, fast)
    assert drafted(each, known, tokens_read=0) == wanted(reference, known)
    assert each.cache_use()["used"] == 12 + 2
    drafted(each, {"x": [1]}, budgets=0, finished=["slow", "fast"])
    assert each.cache_use() | {"used": 0, "requests": 0} == each.cache_use()


def test_what_finds_no_room_takes_no_time_from_others(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, cache_tokens=10 * 16, keys={"read_tokens": 64})
    known = {"large": text(170, 1), "small": text(40, 2)}
    for _ in range(3):
        assert drafted(each, known) == [[], wanted(reference, known)[1]]
        known["small"] += text(18, len(known["small"]))


def test_a_full_cache_takes_the_pages_of_the_least_accepted(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, cache_tokens=10 * 16)
    known = {"good": text(50, 1), "bad": text(50, 2)}
    for _ in range(10):
        drafts = drafted(each, known)
        assert drafts == wanted(reference, known)
        known["good"] += [*drafts[0], 1]
        known["bad"] += [(drafts[1][0] + 1) % VOCAB]
    drafts = drafted(each, known)
    assert drafts == [wanted(reference, known)[0], []]
    assert set(each.missed) == {"bad"}
    del known["good"]
    for _ in range(2):
        known["bad"] += [5]
        drafts = drafted(each, known, finished=["good"])
    assert drafts == wanted(reference, known)


def test_what_the_cache_cannot_hold_takes_nothing_from_others(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, cache_tokens=10 * 16)
    known = {"small": text(60, 1), "large": text(161, 2)}
    for _ in range(3):
        assert drafted(each, known) == [wanted(reference, known)[0], []]
        known["small"] += [5]


@pytest.mark.parametrize("keys", [{"max_model_len": 64}, {}])
def test_longer_than_the_draft_can_read(keys: dict[str, int], tmp_path: Path) -> None:
    changes = {} if keys else {"max_position_embeddings": 64}
    path, reference = made(tmp_path, "llama", **changes)
    each = drafter(path, keys=keys)
    known = {"a": text(64, 1), "b": text(65, 2)}
    drafts = drafted(each, known)
    assert drafts == [continuation(reference, known["a"], 4), []]
    assert each.cache_use()["requests"] == 1


def test_the_last_place_before_max_model_len(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"a": text(LENGTH, 1), "b": text(LENGTH - 2, 2)}
    assert drafted(each, known, budgets=[16, 2], tokens_read=1000) == [
        continuation(reference, known["a"], 16),
        continuation(reference, known["b"], 2),
    ]


def test_requests_come_and_go_in_any_order(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path, keys={"read_tokens": 48}, cache_tokens=30 * 16)
    rng = np.random.default_rng(5)
    live: dict[str, list[int]] = {}
    prefixes = [text(40, 90), text(64, 91)]
    right = empty = 0
    for turn in range(120):
        gone = [name for name in live if rng.random() < 0.08]
        ended = list(gone)
        for name in gone:
            del live[name]
        while len(live) < 5:
            prefix = prefixes[int(rng.integers(2))] if rng.random() < 0.6 else []
            # An id may be used again at once.
            name = gone.pop() if gone and rng.random() < 0.5 else f"r{turn}-{len(live)}"
            live[name] = [*prefix, *text(int(rng.integers(1, 90)), turn)]
        names = [str(name) for name in rng.permutation(list(live))[: int(rng.integers(1, 6))]]
        batch = {name: live[name] for name in names}
        budgets = rng.integers(0, 5, len(batch))
        drafts = drafted(each, batch, budgets=budgets, finished=ended)
        for name, draft, budget in zip(names, drafts, budgets.tolist(), strict=True):
            if draft:
                right += 1
                assert draft == continuation(reference, live[name], budget)
            else:
                empty += budget > 0
            accepted = int(rng.integers(0, len(draft) + 1))
            live[name] = [*live[name], *draft[:accepted], int(rng.integers(0, VOCAB))]
    assert right > 120
    assert empty > 10
    each.propose(step({"x": [1]}, budgets=0, finished=list(each._requests._requests)))
    assert each.cache_use() == {"pages": 30, "used": 0, "requests": 0}


def test_a_reused_id_in_the_same_step_is_another_request(qwen: Model) -> None:
    path, reference = qwen
    each = drafter(path)
    drafted(each, {"a": text(50, 1)})
    known = {"a": text(60, 2)}
    assert drafted(each, known, finished=["a"]) == wanted(reference, known)


def test_ids_that_are_not_common_are_never_drafted(qwen: Model) -> None:
    path, reference = qwen
    free = drafter(path)
    known = {f"r{i}": text(10 + i, i) for i in range(8)}
    firsts = [draft[0] for draft in drafted(free, known)]
    never = tuple(token for token in firsts if token < 80)
    each = drafter(path, ids=Draftable(80, never))
    seen = []
    for _ in range(8):
        drafts = drafted(each, known)
        seen += [token for draft in drafts for token in draft]
        for tokens, draft in zip(known.values(), drafts, strict=True):
            tokens += draft
    assert max(seen) < 80 and not set(never) & set(seen)
    assert max(token for draft in drafted(free, known) for token in draft) < VOCAB
    bounded = drafter(path, ids=Draftable(80))
    known = {f"r{i}": text(10 + i, i) for i in range(8)}
    assert drafted(bounded, known) == [
        continuation(reference, tokens, 4, ids=80) for tokens in known.values()
    ]


def test_short_drafts_stop_early_and_the_others_go_on(qwen: Model) -> None:
    path, reference = qwen
    known = {f"r{i}": text(10 + i, i) for i in range(8)}
    each = drafter(path, keys={"min_probability": 0.4})
    drafts = drafted(each, known, budgets=8)
    lengths = {len(draft) for draft in drafts}
    assert len(lengths) > 2, lengths
    assert each.draft_steps == min(8, max(lengths) + 1)
    for draft, tokens in zip(drafts, known.values(), strict=True):
        assert draft == continuation(reference, tokens, len(draft))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype(qwen: Model, dtype: torch.dtype) -> None:
    path, reference = qwen
    each = drafter(path, dtype=dtype)
    known = {f"r{i}": text(30 + i, i) for i in range(8)}
    drafts = drafted(each, known)
    right = [d[0] == w[0] for d, w in zip(drafts, wanted(reference, known), strict=True)]
    assert sum(right) >= 6 and all(len(draft) == 4 for draft in drafts)


@pytest.mark.parametrize("placeholder", [VOCAB, 10**6, -1])
def test_placeholders_outside_of_the_vocabulary(qwen: Model, placeholder: int) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"image": [*text(10), placeholder, *text(5)], "text": text(20, 1)}
    drafts = drafted(each, known)
    assert drafts[1] == wanted(reference, known | {"image": [1]})[1]
    assert len(drafts[0]) == 4


def test_after_a_fault_nothing_is_read_that_was_half_done(
    qwen: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = qwen
    each = drafter(path)
    known = {"a": text(50, 1), "b": text(60, 2)}
    drafted(each, known)
    known["a"] += text(30, 3)
    with monkeypatch.context() as patched:
        patched.setattr(each._net.layers[1], "_down", None)
        with pytest.raises(TypeError):
            drafted(each, known)
    assert each.cache_use() | {"used": 0, "requests": 0} == each.cache_use()
    known["a"] += [1]
    known["b"] += [1]
    assert drafted(each, known) == wanted(reference, known)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [VOCAB, 60])
def test_memory_is_what_is_allocated(tmp_path: Path, tied: bool, size: int) -> None:
    path = twin(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    each = drafter(path, ids=Draftable(size))
    drafted(each, {"a": text(20)})
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Any] = [each]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif not callable(thing) or isinstance(thing, torch.nn.Module):
            stack += gc.get_referents(thing)
    assert each.memory() == pytest.approx(sum(found.values()), rel=0.05)


def test_the_bound_of_the_default_cache_counts_all_of_it(qwen: Model) -> None:
    from vllm_specx.engine.draft_model import _bytes_a_token

    weights = load_draft_model(qwen[0], torch.float32)
    each = drafter(qwen[0], cache_tokens=160)
    assert each._cache.nbytes == 160 * _bytes_a_token(weights)


def test_two_drafters_with_the_same_input_answer_the_same(qwen: Model) -> None:
    """As on two tensor-parallel ranks, also when the cache is full."""
    both = [drafter(qwen[0], cache_tokens=192, keys={"read_tokens": 32}) for _ in range(2)]
    known = {f"r{i}": text(30 + 9 * i, i) for i in range(6)}
    rng = np.random.default_rng(3)
    empty = 0
    for _ in range(25):
        names = [str(name) for name in rng.permutation(list(known))[:4]]
        batch = {name: known[name] for name in names}
        answers = [drafted(each, batch) for each in both]
        assert answers[0] == answers[1]
        empty += sum(not draft for draft in answers[0])
        for name in names:
            known[name].append(int(rng.integers(0, VOCAB)))
    assert empty, "the cache was never full"
