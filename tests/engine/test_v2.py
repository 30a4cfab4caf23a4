"""Our proposers on Model Runner V2, run on the CPU with Triton in interpreter mode: tokens stay.

An interpreted engine takes a minute for a few short answers, so one of these runs in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_distribution import p_value
from tests.support import v2
from tests.support.eagle import random_eagle
from tests.support.engine import Engine, ids
from tests.support.heads import random_heads
from tests.support.tiny import tiny_llama
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


def ngram(**keys: Any) -> dict[str, Any]:
    """Few windows: each costs the interpreter a second a step."""
    few = {"min_match": 2, "max_match": 4, "runner": "v2"}
    return {"method": "specx:ngram", "num_speculative_tokens": 4, **few, **keys}


def both(draft: str, **keys: Any) -> dict[str, Any]:
    return {**ngram(**keys), "method": "specx:auto", "model": draft, "num_speculative_tokens": 6}


def eagle_3(model: str, folder: Path) -> str:
    """Ours, in vLLM's layout and with an lm_head of its own."""
    shape = TargetShape(576, 49152, torch.float32, num_layers=30)
    tied = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"].float()
    weights = load_eagle(TRAINED / "smollm2-135m-eagle3", shape)
    save_for_vllm(weights, folder / "draft", vocab_size=49152, lm_head=tied)
    return str(folder / "draft")


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
    tokens = 12
    answer = v2.run(
        model,
        COPYING,
        ngram(),
        max_tokens=tokens,
        asynchronous=asynchronous,
        ks=(4, 0, 4, 4, 2, 4),
    )
    assert answer["speculator"] == "NgramSpeculator"
    check(answer, ids(plain.tokens(COPYING, max_tokens=tokens, ignore_eos=True)), accepted=20)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_with_heads(model: str, expected: list[list[int]], asynchronous: bool) -> None:
    answer = v2.run(
        model,
        PROMPTS,
        both(str(TRAINED / "smollm2-135m-hydra")),
        batches=(1, 4, 4),
        asynchronous=asynchronous,
        ks=(6, 0, 0, 2, 6, 1, 6, 6),
    )
    assert answer["speculator"] == "AutoSpeculator"
    check(answer, expected, accepted=40)


@pytest.mark.slow
def test_both_with_vllms_eagle_3(model: str, expected: list[list[int]], tmp_path: Path) -> None:
    answer = v2.run(
        model,
        PROMPTS,
        both(eagle_3(model, tmp_path)),
        batches=(1, 4, 4),
        asynchronous=True,
        ks=(6, 0, 0, 2, 6, 1, 6, 6),
    )
    assert answer["speculator"] == "AutoEagleSpeculator"
    assert answer["scheduler"] == "SpecxV2AsyncScheduler"
    check(answer, expected, accepted=40)


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
    draft = {
        "method": "specx:eagle",
        "model": eagle_3(model, tmp_path),
        "num_speculative_tokens": 3,
        "runner": "v2",
    }
    answer = v2.run(model, PROMPTS, draft, asynchronous=True, ks=(3, 0, 0, 2, 3, 1))
    assert answer["speculator"] == "EagleSpeculator"
    assert answer["scheduler"] == "SpecxAsyncScheduler"
    check(answer, expected, accepted=8)


HYDRA = str(TRAINED / "smollm2-135m-hydra")


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
    heads = medusa(HYDRA, controller="off")
    answer = v2.run(model, prompts, heads, asynchronous=True, **tight)
    assert answer["counters"]["vllm:num_preemptions"] > 0
    check(answer, plain["tokens"][0], accepted=3)


SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 2**26,
    "params": {"detokenize": False},
}


class Small:
    """A target of a few hundred thousand random weights, which the interpreter runs in a third of the
    time, and what it says on V2 without speculation."""

    prompts: ClassVar[list[list[int]]] = [[5, 6, 7, 8, 9] * 4, [1, 2, 3], [10, 11, 12] * 5]

    def __init__(self, folder: Path) -> None:
        self.target = tiny_llama(folder / "target")
        self.heads = random_heads(folder / "heads", 128)
        self.eagle = random_eagle(folder / "eagle", self.target, 3)

    def run(self, speculative: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        given = {"prompts": self.prompts, "batches": (1, 3, 3), "max_tokens": 12, **SMALL, **more}
        prompts = given.pop("prompts")
        return v2.run(self.target, prompts, speculative, asynchronous=True, **given)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def said(small: Small) -> list[list[int]]:
    answers: list[list[int]] = small.run(None, batches=(3,))["tokens"][0]
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heads", "eagle", "heads on 0.33"])
def test_both_on_a_small_target(
    small: Small, said: list[list[int]], kind: str, tmp_path: Path
) -> None:
    """The drafts that were trained for nothing are wrong; what is accepted is n-grams."""
    env = {"PYTHONPATH": str(overlay(tmp_path / "overlay"))} if "0.33" in kind else {}
    draft = small.eagle if kind == "eagle" else small.heads
    answer = small.run(both(draft), ks=(4, 0, 4, 4, 2), env=env)
    assert answer["speculator"] == ("AutoEagleSpeculator" if kind == "eagle" else "AutoSpeculator")
    assert answer["tokens"] == [said] * 3
    assert answer["synchronized"] == []
    assert answer["scheduled"][:5] == [4, 0, 4, 4, 2]
    assert answer["counters"]["vllm:spec_decode_num_accepted_tokens"] > 40
    assert ("v0.33.0" in answer["log"]) == bool(env)


@pytest.mark.slow
def test_what_one_request_said_another_one_drafts(small: Small, said: list[list[int]]) -> None:
    """The same prompts three times; requests with a pool, and each for itself, as it asks."""
    accepted = []
    for pool in ("mine", "off"):
        asked = {**SMALL["params"], "extra_args": {"specx_pool": pool}}
        drafts = ngram(controller={"static_k": 4})
        answer = small.run(drafts, batches=(3, 3, 3), params=asked)
        assert answer["tokens"] == [said] * 3
        assert answer["synchronized"] == []
        accepted.append(answer["counters"]["vllm:spec_decode_num_accepted_tokens"])
    assert accepted[0] > accepted[1] + 15


@pytest.mark.slow
def test_chunks_and_preemption_on_a_small_target(small: Small) -> None:
    few: dict[str, Any] = {
        "prompts": [[*range(100 + 7 * i, 112 + 7 * i)] * 5 for i in range(4)],
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 9,
        "block_size": 32,
        "max_model_len": 128,
        "max_tokens": 30,
        "batches": (4,),
    }
    plain = small.run(None, **few)
    answer = small.run(both(small.heads, controller="off"), **few)
    assert answer["counters"]["vllm:num_preemptions"] > 0
    assert answer["tokens"] == plain["tokens"]
    assert answer["counters"]["vllm:spec_decode_num_accepted_tokens"] > 10


@pytest.mark.slow
def test_vllm_0_33(model: str, expected: list[list[int]], tmp_path: Path) -> None:
    folder = overlay(tmp_path / "overlay")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    answer = v2.run(
        model,
        PROMPTS,
        medusa(HYDRA),
        asynchronous=True,
        ks=UP_AND_DOWN,
        env={"PYTHONPATH": path},
    )
    assert "v0.33.0" in answer["log"], "the overlay was not what ran"
    check(answer, expected, accepted=5)


@pytest.mark.slow
def test_choices_graphs_and_waits_on_vllm_0_33(tmp_path: Path) -> None:
    """The files of tests that need no engine."""
    folder = overlay(tmp_path / "overlay")
    here = Path(__file__)
    files = [str(here.with_name(f"test_v2_{name}.py")) for name in ("choice", "captured", "waits")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_a_seed_gives_the_same_text_again(small: Small) -> None:
    """As with vLLM's own methods there: with the same drafts, which what was said before must not change."""
    alike = {**SMALL["params"], "temperature": 0.9, "seed": 5}
    answer = small.run(both(small.heads), batches=(1, 1), max_tokens=10, params=alike)
    assert answer["tokens"][0] == answer["tokens"][1]
    assert answer["counters"]["vllm:spec_decode_num_draft_tokens"] > 20


@pytest.mark.slow
def test_sampled_text_has_the_targets_distribution(tmp_path: Path) -> None:
    """Tokens after accepted, rejected and bonus positions against those without speculation: 400 samples
    each of a small random target, which shows gross faults only (tests/engine/test_distribution.py says
    how V1 is tested). Its own text is the prompt, so that n-grams come back."""
    target = tiny_llama(tmp_path / "target")
    warm = {"temperature": 0.7, "detokenize": False}
    many = {"max_num_seqs": 40, "max_num_batched_tokens": 2048, **SMALL, "params": warm}
    own = v2.run(target, [[1, 2, 3]], None, batches=(1,), max_tokens=60, **many)
    prompts = [[1, 2, 3, *own["tokens"][0][0]]] * 400
    drafts = ngram(controller={"static_k": 2}, min_match=1)
    samples = []
    for speculative in (None, drafts):
        answer = v2.run(target, prompts, speculative, batches=(400,), max_tokens=3, **many)
        samples.append(answer["tokens"][0])
    counters = answer["counters"]
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    assert 0.05 * drafted < accepted < 0.95 * drafted
    for place in (1, 2):
        one, other = ([tokens[place] for tokens in each] for each in samples)
        assert p_value(one, other) > 1e-4
