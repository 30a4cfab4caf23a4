"""What the worker knows of requests, with vLLM's own objects for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_specx.engine.pools import SALT_KEY, state_key
from vllm_specx.engine.step import _follow, _verified_rows


def state(name: str, **changes: Any) -> CachedRequestState:
    fields: dict[str, Any] = {
        "req_id": name,
        "prompt_token_ids": [1, 2, 3],
        "mm_features": [],
        "sampling_params": SamplingParams(max_tokens=5),
        "generator": None,
        "block_ids": ([],),
        "num_computed_tokens": 0,
        "output_token_ids": [],
    }
    return CachedRequestState(**{**fields, **changes})


def worker(*states: CachedRequestState, rows: bool = False) -> tuple[Any, Any]:
    """Proposer and runner, as far as requests are concerned. rows: it keeps the target's states."""
    drafter = SimpleNamespace(
        requests={}, ended=[], remembers=True, trees=None, max_model_len=100,
        proposer=SimpleNamespace(needs_verified_rows=rows),
    )  # fmt: skip
    return drafter, SimpleNamespace(requests={each.req_id: each for each in states})


def next_chunk(runner: Any, name: str, **changes: Any) -> None:
    """As vLLM's runner is told that a session of streamed input goes on."""
    runner.input_batch = SimpleNamespace(remove_request=lambda _: None)
    runner.late_interaction_runner = SimpleNamespace(register_request=lambda *_: None)
    runner.uses_mrope = False
    fields: dict[str, Any] = {
        "req_id": name, "prompt_token_ids": [1, 2, 3, 4, 5, 6, 7], "mm_features": [],
        "sampling_params": SamplingParams(max_tokens=5), "pooling_params": None,
        "block_ids": ([],), "num_computed_tokens": 5, "lora_request": None,
    }  # fmt: skip
    new = NewRequestData(**{**fields, **changes})
    GPUModelRunner._update_streaming_request(runner, name, new)


def test_an_id_that_is_used_again_has_ended_and_is_new() -> None:
    drafter, runner = worker(state("a"), state("b"))
    _, ended = _follow(drafter, runner, ["a", "b"])
    assert ended == []
    runner.requests["a"] = state("a", sampling_params=SamplingParams(max_tokens=7))
    known, ended = _follow(drafter, runner, ["b", "a"])
    assert ended == ["a"]
    assert [k.last_length for k in known] == [8, 10]


def test_what_a_step_with_a_fault_was_told_is_told_again() -> None:
    drafter, runner = worker(state("a"), state("b"))
    _follow(drafter, runner, ["a", "b"])
    del runner.requests["a"]
    for _ in range(2):
        assert _follow(drafter, runner, ["b"])[1] == ["a"]
    drafter.ended.clear()
    assert _follow(drafter, runner, ["b"])[1] == []


@pytest.mark.parametrize("rows", [False, True])
def test_a_session_of_streamed_input_is_drafted_for_after_each_chunk(rows: bool) -> None:
    """The last token said before a chunk is dropped: of the tokens, what is kept is wrong then."""
    drafter, runner = worker(state("a"), state("b"), rows=rows)
    assert [k.last_length for k in _follow(drafter, runner, ["a", "b"])[0]] == [8, 8]
    runner.requests["a"].output_token_ids += [4, 5, 9]
    next_chunk(runner, "a")
    for _ in range(2):
        known, ended = _follow(drafter, runner, ["a", "b"])
        assert [k.last_length for k in known] == [12, 8]
        assert ended == ([] if rows else ["a"])
    drafter.ended.clear()
    runner.requests["a"].output_token_ids += [8]
    assert _follow(drafter, runner, ["a", "b"]) == (known, [])
    seeded = SamplingParams(seed=1, temperature=1.0, max_tokens=5)
    next_chunk(runner, "a", prompt_token_ids=[1] * 9, sampling_params=seeded)
    assert [k.last_length for k in _follow(drafter, runner, ["a", "b"])[0]] == [0, 8]


def test_states_of_a_session_are_of_the_images_that_it_has_now() -> None:
    drafter, runner = worker(state("a"), rows=True)
    (before,), _ = _follow(drafter, runner, ["a"])
    next_chunk(runner, "a", mm_features=[_image("x", 5)])
    (now,), ended = _follow(drafter, runner, ["a"])
    assert now.state_key != before.state_key and ended == ["a"]


def test_a_prompt_of_embeddings_shares_nothing_and_is_never_drafted_for() -> None:
    """vLLM's row of token ids then holds those of the row's last request."""
    embeds = state("e", prompt_token_ids=None, prompt_embeds=torch.zeros(4, 8))
    seeded = state("s", sampling_params=SamplingParams(seed=1, temperature=1.0, max_tokens=5))
    drafter, runner = worker(embeds, state("a"), seeded)
    known, _ = _follow(drafter, runner, ["e", "a", "s"])
    assert (known[0].pool, known[0].state_key, known[0].last_length) == (None, None, 0)
    assert [k.last_length for k in known] == [0, 8, 0]
    batch = SimpleNamespace(num_computed_tokens_cpu=torch.zeros(3, dtype=torch.int32).numpy())
    output = SimpleNamespace(num_scheduled_tokens={"e": 4, "a": 3, "s": 3})
    tokens = torch.tensor([5, 4, 4], dtype=torch.int32).numpy()
    rows = _verified_rows(batch, output, ["e", "a", "s"], tokens, known, (torch.zeros(10, 8),))
    assert rows.first.tolist() == [0, 4, 7]
    assert rows.count.tolist() == [0, 3, 0]


def test_of_requests_that_are_never_drafted_for_no_states_are_told() -> None:
    asked = {"a": None, "zero": 0, "text": "0", "one": 1, "wrong": -1}
    states = [
        state(name, sampling_params=SamplingParams(max_tokens=5, extra_args={"specx_k": k}))
        for name, k in asked.items()
    ]
    drafter, runner = worker(*states, rows=True)
    known, _ = _follow(drafter, runner, list(asked))
    batch = SimpleNamespace(num_computed_tokens_cpu=torch.zeros(5, dtype=torch.int32).numpy())
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(asked, 3))
    tokens = torch.full((5,), 4, dtype=torch.int32).numpy()
    rows = _verified_rows(batch, output, list(asked), tokens, known, (torch.zeros(15, 8),))
    assert rows.first.tolist() == [0, 3, 6, 9, 12]
    assert rows.count.tolist() == [3, 0, 0, 3, 3]


def _image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=4),
    )


def test_states_are_shared_as_vllms_prefix_cache_shares_blocks() -> None:
    def salted(digest: str) -> SamplingParams:
        return SamplingParams(extra_args={SALT_KEY: digest})

    adapters = [LoRARequest("one", 1, "/one"), LoRARequest("two", 2, "/two")]
    states = [
        state("plain"),
        state("salt", sampling_params=salted("a")),
        state("another salt", sampling_params=salted("b")),
        state("adapter", lora_request=adapters[0]),
        state("another adapter", lora_request=adapters[1]),
        state("image", mm_features=[_image("x", 2)]),
        state("another image", mm_features=[_image("y", 2)]),
        state("image elsewhere", mm_features=[_image("x", 3)]),
        state("both", lora_request=adapters[0], mm_features=[_image("x", 2)]),
    ]
    drafter, runner = worker(*states)
    known, _ = _follow(drafter, runner, [each.req_id for each in states])
    keys = [k.state_key for k in known]
    assert None not in keys and len(set(keys)) == len(keys)
    again, other = worker(*states)
    assert [k.state_key for k in _follow(again, other, list(other.requests))[0]] == keys
    assert {k.pool for k in known} == {"default", "default\0a", "default\0b"}
    assert state_key("default", state("b")) == known[0].state_key


@pytest.mark.parametrize("pool", ["off", 3])
def test_a_request_that_shares_nothing_uses_nobodys_states(pool: Any) -> None:
    params = SamplingParams(extra_args={"specx_pool": pool})
    drafter, runner = worker(state("a", sampling_params=params))
    (known,), _ = _follow(drafter, runner, ["a"])
    assert known.pool is None and known.state_key is None
