"""Our proposers on Model Runner V2, run on the CPU with Triton in interpreter mode: tokens stay.

An interpreted engine takes a minute for a few short answers, so one of these runs in CI.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import v2
from tests.support.engine import Engine, ids
from tests.support.heads import random_heads
from tests.support.vllm_0_33 import overlay
from vllm_specx.draft.checkpoints import TargetShape
from vllm_specx.draft.eagle_checkpoints import load_eagle
from vllm_specx.draft.eagle_export import save_for_vllm

pytestmark = pytest.mark.engine
TRAINED = Path(__file__).parents[2] / "recipes" / "heads"
PROMPTS = [
    [1, 9690, 198, 2683, 359, 253],
    [1, 4093, 198, 19556, 3725, 28, 19556, 3725],
    [504, 3575, 282],
    [788, 9901, 614, 28, 330, 2, 788, 9901, 614, 28],
]
TOKENS = 16
COPYING = [[504, 3575, 282, 260, 1797] * 4, [5680, 79, 12333, 24] * 5, PROMPTS[0], [198, 49] * 9]
UP_AND_DOWN = (4, 0, 0, 2, 4, 1, 4, 0)


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    """Of V1 without speculation."""
    return ids(plain.tokens(PROMPTS, max_tokens=TOKENS, ignore_eos=True))


def medusa(heads: str, **keys: Any) -> dict[str, Any]:
    return {"method": "specx:medusa", "model": heads, "num_speculative_tokens": 4, **keys}


def check(answer: dict[str, Any], expected: list[list[int]], accepted: int) -> None:
    for said in answer["tokens"]:
        assert said == expected
    counters = answer["counters"]
    assert counters["vllm:spec_decode_num_draft_tokens"] > 50
    assert counters["vllm:spec_decode_num_accepted_tokens"] >= accepted
    assert answer["synchronized"] == []
    assert "Traceback" not in answer["log"]


def test_heads_under_asynchronous_scheduling_while_k_moves(
    model: str, expected: list[list[int]]
) -> None:
    answer = v2.run(
        model,
        PROMPTS,
        medusa(str(TRAINED / "smollm2-135m-medusa")),
        asynchronous=True,
        ks=UP_AND_DOWN,
    )
    assert answer["speculator"] == "MedusaSpeculator"
    assert answer["scheduler"] == "SpecxV2AsyncScheduler"
    assert answer["scheduled"][:8] == list(UP_AND_DOWN)
    check(answer, expected, accepted=5)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ngram_lookahead(model: str, plain: Engine, asynchronous: bool) -> None:
    """Few windows: each costs the interpreter a second a step."""
    tokens = 12
    ngram = {
        "method": "specx:ngram",
        "num_speculative_tokens": 4,
        "runner": "v2",
        "min_match": 2,
        "max_match": 4,
    }
    answer = v2.run(
        model,
        COPYING,
        ngram,
        max_tokens=tokens,
        asynchronous=asynchronous,
        ks=(4, 0, 4, 4, 2, 4),
    )
    assert answer["speculator"] == "NgramSpeculator"
    check(answer, ids(plain.tokens(COPYING, max_tokens=tokens, ignore_eos=True)), accepted=20)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("heads", ["medusa", "hydra", "random"])
def test_heads_with_the_controller(
    model: str, expected: list[list[int]], heads: str, asynchronous: bool, tmp_path: Path
) -> None:
    folder = TRAINED / f"smollm2-135m-{heads}"
    path = random_heads(tmp_path / "heads", 576) if heads == "random" else str(folder)
    controller = {"static_k": 4} if heads == "random" else {}
    answer = v2.run(model, PROMPTS, medusa(path, controller=controller), asynchronous=asynchronous)
    kind = "SpecxV2AsyncScheduler" if asynchronous else "SpecxV2Scheduler"
    assert answer["scheduler"] == kind
    check(answer, expected, accepted=0 if heads == "random" else 3)


@pytest.mark.slow
def test_eagle_3_is_vllms_own_under_our_controller(
    model: str, expected: list[list[int]], tmp_path: Path
) -> None:
    shape = TargetShape(576, 49152, torch.float32, num_layers=30)
    tied = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"].float()
    weights = load_eagle(TRAINED / "smollm2-135m-eagle3", shape)
    save_for_vllm(weights, tmp_path / "draft", vocab_size=49152, lm_head=tied)
    draft = {
        "method": "specx:eagle",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
        "runner": "v2",
    }
    answer = v2.run(model, PROMPTS, draft, asynchronous=True, ks=(3, 0, 0, 2, 3, 1))
    assert answer["speculator"] == "EagleSpeculator"
    assert answer["scheduler"] == "SpecxAsyncScheduler"
    check(answer, expected, accepted=8)


@pytest.mark.slow
def test_chunked_prefill_and_preemption(model: str) -> None:
    """A prompt is read in pieces, and four requests do not fit into the cache at once."""
    prompts = [[*PROMPTS[i], *range(100 + 7 * i, 160 + 7 * i)] for i in range(4)]
    tight: dict[str, Any] = {
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 10,
        "block_size": 32,
        "max_model_len": 160,
        "max_tokens": 40,
        "batches": (4,),
    }
    plain = v2.run(model, prompts, None, **tight)
    heads = medusa(str(TRAINED / "smollm2-135m-hydra"), controller="off")
    answer = v2.run(model, prompts, heads, asynchronous=True, **tight)
    assert answer["counters"]["vllm:num_preemptions"] > 0
    check(answer, plain["tokens"][0], accepted=3)


@pytest.mark.slow
def test_vllm_0_33(model: str, expected: list[list[int]], tmp_path: Path) -> None:
    folder = overlay(tmp_path / "overlay")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    answer = v2.run(
        model,
        PROMPTS,
        medusa(str(TRAINED / "smollm2-135m-hydra")),
        asynchronous=True,
        ks=UP_AND_DOWN,
        env={"PYTHONPATH": path},
    )
    assert "v0.33.0" in answer["log"], "the overlay was not what ran"
    check(answer, expected, accepted=5)
