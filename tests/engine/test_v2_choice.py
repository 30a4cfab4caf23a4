"""Which runner a configuration gets, and that the device's drafts are those of V1."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.eagle import random_eagle
from vllm_specx import config
from vllm_specx.config import ConfigError
from vllm_specx.draft.checkpoints import TargetShape, load_heads
from vllm_specx.draft.medusa_device import DeviceHeads
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.engine.translate import CLASSES
from vllm_specx.engine.v2 import choice, seams
from vllm_specx.engine.v2.ngram_index import keep_on_device
from vllm_specx.models.embedded import checkpoint

HEADS = {"proposer": "medusa", "heads": "HEADS"}
RECIPES = Path(__file__).parents[2] / "recipes" / "heads"
MEDUSA, EAGLE_3 = (str(RECIPES / f"smollm2-135m-{kind}") for kind in ("medusa", "eagle3"))
ASKED = "VLLM_USE_V2_MODEL_RUNNER"


def configured(specx: dict[str, Any] | None, model: str | None = None) -> Any:
    named = None if specx is None else CLASSES.get(specx["proposer"])
    return SimpleNamespace(
        additional_config={} if specx is None else {"specx": specx},
        speculative_config=SimpleNamespace(model=model or named, method="custom_class"),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
    )


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take V2, as it does on GPUs."""
    monkeypatch.setattr(choice, "_vllm_would_take_v2", lambda vllm_config: True)


@pytest.mark.parametrize(
    ("specx", "runner", "why"),
    [
        (HEADS, "v2", None),
        ({**HEADS, "runner": "v1"}, "v1", None),
        ({**HEADS, "tree": {}}, "v1", "drafts trees"),
        ({**HEADS, "min_probability": 0.3}, "v1", "min_probability"),
        ({**HEADS, "min_probability": 0.0}, "v2", None),
        ({"proposer": "ngram"}, "v2", None),
        ({"proposer": "ngram", "min_probability": 0.3}, "v1", "min_probability"),
        ({"proposer": "ngram", "pool": "off"}, "v2", None),
        ({"proposer": "ngram", "runner": "v2"}, "v2", None),
        ({"proposer": "eagle", "heads": "HEADS"}, "v1", "vLLM's own eagle3 only"),
        ({"proposer": "auto", "heads": MEDUSA}, "v2", None),
        ({"proposer": "auto", "heads": EAGLE_3}, "v1", "vLLM's own eagle3 only"),
        ({"proposer": "draft_model", "draft": "DRAFT"}, "v1", "is not there yet"),
    ],
)
def test_where_vllm_takes_v2(
    on_gpu: None, specx: dict[str, Any], runner: str, why: str | None
) -> None:
    vllm_config = configured(specx)
    assert choice.runner_of(vllm_config) == runner
    reason = choice.reason_for_v1(vllm_config)
    assert (why is None) == (reason is None)
    assert why is None or why in str(reason)


def test_on_a_cpu_it_is_v1_without_a_word() -> None:
    assert choice.runner_of(configured(HEADS)) == "v1"
    assert choice.reason_for_v1(configured(HEADS)) is None


def test_only_our_own_methods_are_taken_from_the_list(on_gpu: None) -> None:
    others = ["heterogeneous-vocabulary draft models"]

    def listed(vllm_config: Any) -> list[str]:
        return [choice.OF_CUSTOM_CLASS, *others]

    assert seams._unsupported_features(listed, configured(HEADS)) == others
    stays = [choice.OF_CUSTOM_CLASS, *others]
    for vllm_config in (
        configured({**HEADS, "runner": "v1"}),
        configured(None, model="somebody.elses.Proposer"),
        configured({"proposer": "stock"}, model="somebody.elses.Proposer"),
    ):
        assert seams._unsupported_features(listed, vllm_config) == stays


def test_our_name_for_custom_class_is_vllms() -> None:
    from vllm.config import VllmConfig

    from vllm_specx.engine.patching import original_of

    mock = SimpleNamespace(
        speculative_config=SimpleNamespace(method="custom_class", parallel_drafting=False),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", use_ubatching=False),
    )
    ask = original_of(VllmConfig._get_v2_model_runner_unsupported_features)
    assert ask(mock) == [choice.OF_CUSTOM_CLASS]


@pytest.mark.parametrize(
    ("runner", "asked", "sentence"),
    [
        ("v1", "1", "specx.runner is 'v1', but the environment has VLLM_USE_V2_MODEL_RUNNER=1"),
        ("v2", "0", "specx.runner is 'v2', but the environment has VLLM_USE_V2_MODEL_RUNNER=0"),
        ("v2", None, "needs Triton and has none for the CPU; set specx.runner to 'v1'"),
        ("auto", "1", "needs Triton and has none for the CPU; set specx.runner to 'v1'"),
    ],
)
def test_a_runner_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, runner: str, asked: str | None, sentence: str
) -> None:
    if asked is None:
        monkeypatch.delenv(ASKED, raising=False)
    else:
        monkeypatch.setenv(ASKED, asked)
    with pytest.raises(ConfigError) as refused:
        choice.check(config.parse({**HEADS, "runner": runner}), on_cpu=True)
    assert sentence in str(refused.value)


def test_the_runner_of_vllms_own_methods_is_not_ours_to_choose() -> None:
    with pytest.raises(ConfigError, match="'runner' in specx is for specx's own methods"):
        choice.check(config.parse({"proposer": "stock", "runner": "v2"}), on_cpu=True)


def asking(specx: dict[str, Any]) -> Any:
    return SimpleNamespace(
        additional_config={"specx": specx, "other": 1},
        speculative_config={
            "method": "custom_class",
            "model": CLASSES[specx["proposer"]],
            "num_speculative_tokens": 3,
        },
        max_num_seqs=8,
        data_parallel_size=1,
    )


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)


@pytest.fixture(scope="module")
def eagle_3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("eagle")
    target = str(checkpoint("embedded:smollm2-135m-instruct"))
    return {
        "proposer": "eagle",
        "heads": random_eagle(folder / "3", target, 3),
        "runner": "v2",
    }


def test_eagle_3_is_given_to_vllm(with_triton: None, eagle_3: dict[str, Any]) -> None:
    arguments = asking({**eagle_3, "controller": {"k_max": 2}})
    seams.check(arguments)
    table = arguments.speculative_config.pop(seams.TABLE)
    assert arguments.speculative_config == {
        "method": "eagle3",
        "model": eagle_3["heads"],
        "num_speculative_tokens": 3,
    }
    assert {k for _, _, k in table} == {0, 1, 2}
    own = arguments.additional_config["specx"]
    assert own == {"proposer": "stock", "controller": {"k_max": 2}}
    assert config.parse(own).controller.k_max == 2
    assert arguments.additional_config["other"] == 1


def test_eagle_3_is_given_to_vllm_with_ngrams_beside_it(
    with_triton: None, eagle_3: dict[str, Any]
) -> None:
    arguments = asking({**eagle_3, "proposer": "auto", "depth": 2, "pool": "off"})
    seams.check(arguments)
    assert arguments.speculative_config["method"] == "eagle3"
    vllm_config = SimpleNamespace(
        additional_config=arguments.additional_config,
        speculative_config=SimpleNamespace(method="eagle3", model=eagle_3["heads"]),
    )
    settings = choice.settings_if_ours(vllm_config)
    assert isinstance(settings, config.AutoConfig)
    assert settings.depth == 2 and not settings.pool.enabled
    assert choice.runner_of(vllm_config) == "v2" and seams.ours(vllm_config)
    assert seams.scheduler_of(vllm_config, "SpecxAsyncScheduler").endswith("SpecxV2AsyncScheduler")


@pytest.mark.parametrize(("method", "expected"), [("eagle3", True), ("suffix", False)])
def test_of_vllms_methods_too_and_only_of_those_that_v2_serves(
    with_triton: None, monkeypatch: pytest.MonkeyPatch, method: str, expected: bool
) -> None:
    monkeypatch.setenv(ASKED, "1")
    arguments = asking({"proposer": "ngram", "runner": "v2"})
    arguments.additional_config = {"specx": {"proposer": "stock"}}
    arguments.speculative_config = {"method": method, "num_speculative_tokens": 3}
    seams.check(arguments)
    assert (seams.TABLE in arguments.speculative_config) == expected


def test_tokens_lie_on_the_device_for_look_ups() -> None:
    """vLLM's StagedWriteTensor pins memory, which only GPUs have: its interface stands in."""
    from vllm.v1.worker.gpu import buffer_utils

    wanted = inspect.signature(buffer_utils.StagedWriteTensor).parameters
    assert {"size", "dtype", "device", "uva_instead_of_gpu"} <= set(wanted)
    assert '"_uva_buf"' in inspect.getsource(keep_on_device)
    assert "self._uva_buf" in inspect.getsource(buffer_utils.StagedWriteTensor)

    class Held:
        def __init__(self, size: tuple[int, ...], dtype: Any, device: Any) -> None:
            self.gpu, self.dtype = torch.zeros(size, dtype=dtype, device=device), dtype

    dense = Held((2, 8), torch.int32, "cpu")
    states = SimpleNamespace(all_token_ids=dense)
    keep_on_device(states, torch.device("cpu"))
    assert states.all_token_ids is dense
    dense._uva_buf = object()  # type: ignore[attr-defined]
    keep_on_device(states, torch.device("cpu"))
    assert states.all_token_ids is not dense
    assert states.all_token_ids.gpu.shape == (2, 8)


@pytest.mark.parametrize(
    ("specx", "expected"),
    [
        ({"proposer": "ngram", "runner": "v2"}, True),
        ({"proposer": "ngram", "runner": "v1"}, False),
        ({"proposer": "ngram", "runner": "v2", "controller": "off"}, False),
        ({"proposer": "auto", "heads": MEDUSA, "runner": "v2"}, True),
    ],
)
def test_vllm_is_told_which_k_to_capture_on_v2_only(
    with_triton: None, specx: dict[str, Any], expected: bool
) -> None:
    arguments = asking(specx)
    seams.check(arguments)
    assert (seams.TABLE in arguments.speculative_config) == expected


def test_a_table_of_the_users_own_stays(with_triton: None) -> None:
    arguments = asking({"proposer": "ngram", "runner": "v2"})
    arguments.speculative_config[seams.TABLE] = [(1, 8, 2)]
    seams.check(arguments)
    assert arguments.speculative_config[seams.TABLE] == [(1, 8, 2)]


def test_eagle_3_stays_ours_on_v1(with_triton: None, eagle_3: dict[str, Any]) -> None:
    for runner in ("v1", "auto"):
        arguments = asking({**eagle_3, "runner": runner})
        before = dict(arguments.speculative_config)
        seams.check(arguments)
        assert arguments.speculative_config == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cache_tokens": 64}, "knows no cache_tokens"),
        ({"heads": str(RECIPES / "smollm2-135m-eagle3")}, "needs the draft's own lm_head"),
        ({"heads": str(RECIPES / "smollm2-135m-medusa")}, "EAGLE-3 checkpoints in vLLM's layout"),
    ],
)
def test_what_vllms_eagle_3_cannot_do_is_refused(
    with_triton: None, eagle_3: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        seams.check(asking({**eagle_3, **change}))
    assert sentence in str(refused.value)
    assert "set specx.runner to 'v1'" in str(refused.value)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_chains_are_those_of_v1(kind: str, depth: int) -> None:
    folder = RECIPES / f"smollm2-135m-{kind}"
    torch.manual_seed(0)
    shape = TargetShape(576, 49152, torch.float32)
    lm_head = torch.randn(shape.vocab_size, shape.hidden_size)
    settings = config.MedusaConfig(heads=str(folder), min_probability=0.0)
    heads = DeviceHeads(settings, load_heads(folder, shape), lm_head=lm_head, embeddings=lm_head)
    hidden = torch.randn(5, shape.hidden_size)
    last = torch.randint(0, shape.vocab_size, (5,))
    with torch.inference_mode():
        made = heads.chains(hidden, last, depth)
    rows = np.arange(5, dtype=np.int32)
    drafts = heads.propose(
        DraftContext(
            request_ids=[str(i) for i in range(5)],
            rows=rows,
            token_ids=last.numpy().astype(np.int32)[:, None],
            num_tokens=np.ones(5, np.int32),
            num_prompt_tokens=np.ones(5, np.int32),
            sampled=[[int(t)] for t in last],
            budgets=np.full(5, depth, np.int32),
            temperatures=np.zeros(5, np.float32),
            pools=[None] * 5,
            finished=[],
            vocab_size=shape.vocab_size,
            hidden_states=hidden,
        )
    )
    assert made.tolist() == [draft.tokens.tolist() for draft in drafts]
