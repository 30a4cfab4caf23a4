"""The planner: its formula and its figures of memory against values worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.twins import twin
from vllm_specx import recipes
from vllm_specx.cli.plan import acceptances, tokens
from vllm_specx.config import ConfigError
from vllm_specx.plan import claims, drafts, formula, gpus, planner
from vllm_specx.plan.facts import committed, facts_of, read_facts
from vllm_specx.plan.memory import RUNTIME, Use, budget
from vllm_specx.plan.pairing import Pairing, pairing
from vllm_specx.recipes import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SEVENTY = "meta-llama/Llama-3.3-70B-Instruct"


def recipe(**keys: Any) -> Pairing:
    return pairing(Recipe.model_validate({"speculation": None, **keys}), (RECIPES,))


def draft_of(name: str, **serve: Any) -> Pairing:
    speculation = {
        "method": name,
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "num_speculative_tokens": 5,
    }
    return recipe(model="Qwen/Qwen2.5-72B-Instruct", speculation=speculation, serve=serve)


@pytest.mark.parametrize(
    ("acceptance", "k", "gamma", "expected"),
    [
        (0.8, 4, 0.05, 3.3616 / 1.2),  # 1 + .8 + .64 + .512 + .4096
        (0.5, 2, 0.1, 1.75 / 1.2),
        (0.0, 3, 0.05, 1 / 1.15),
        (1.0, 5, 0.0, 6.0),
        (0.7, 0, 0.05, 1.0),
    ],
)
def test_speed_up_by_hand(acceptance: float, k: int, gamma: float, expected: float) -> None:
    assert formula.speed_up(acceptance, k, gamma) == pytest.approx(expected)
    if acceptance < 1:
        closed = (1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + k * gamma)
        assert formula.speed_up(acceptance, k, gamma) == pytest.approx(closed)


def test_acceptance_by_depth_goes_on_with_the_last() -> None:
    assert formula.expected_tokens([0.8, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)


def test_best_k_and_where_speculation_starts_to_lose() -> None:
    # By hand, a = 0.8, g = 0.05: K = 6 gives 3.951 / 1.30 = 3.040, 7: 4.161 / 1.35 = 3.082, 8: 4.329 / 1.40 = 3.092,
    # 9: 4.463 / 1.45 = 3.078.
    assert formula.best_k(0.8, 0.05) == (8, pytest.approx(3.092, abs=1e-3))
    assert formula.best_k(0.04, 0.05) == (0, 1.0)
    # K = 1: (1 + a) / (1 + g) = 1 where a = g. K = 2: 1 + a + a^2 = 1.1.
    assert formula.break_even(1, 0.05) == pytest.approx(0.05)
    assert formula.break_even(2, 0.05) == pytest.approx((-1 + 1.4**0.5) / 2)
    assert formula.break_even(2, 1.0) is None
    assert formula.break_even(1, 0.05, verify=1.3) == pytest.approx(0.35)


def test_the_floor_of_a_70b_is_the_known_one() -> None:
    seconds = formula.memory_bound_step(140e9, 2000e9)
    assert seconds == pytest.approx(0.070)
    assert 1 / seconds == pytest.approx(14.3, abs=0.05)


@pytest.mark.parametrize("name", sorted(committed()))
def test_the_committed_sizes_give_the_published_number_of_parameters(name: str) -> None:
    entry = committed()[name]
    assert entry["source"]
    if "eagle" not in entry:
        assert read_facts(name, download=False).parameters == entry["parameters"]


def test_key_value_bytes_of_a_70b() -> None:
    facts = read_facts(SEVENTY, download=False)
    assert facts.kv_bytes() == 2 * 80 * 8 * 128 * 2  # 320 KiB a token
    assert facts.kv_bytes(4) == facts.kv_bytes() / 4
    assert facts.kv_bytes(16) == facts.kv_bytes(8), "fewer heads than ranks: copies"
    assert facts.kv_bytes(element=1.0) == facts.kv_bytes() / 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parameters_of_a_checkpoint_are_those_that_transformers_wrote(
    tmp_path: Path, family: str
) -> None:
    folder = Path(twin(tmp_path / family, family, tie_word_embeddings=False))
    facts = read_facts(str(folder))
    shapes = drafts.header(folder / "model.safetensors")
    assert facts.parameters == sum(drafts._size(shape) for shape in shapes.values())
    assert read_facts(str(folder / "config.json")).parameters == facts.parameters


@pytest.mark.parametrize(
    ("config", "bytes_a_weight"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            1.0,
        ),
        ({"quant_method": "new"}, 2.0),
    ],
)
def test_quantized_layers_are_smaller_and_embeddings_are_not(
    config: dict[str, Any], bytes_a_weight: float
) -> None:
    plain = read_facts(SEVENTY, download=False)
    sizes = dict(committed()[SEVENTY]["config"], quantization_config=config)
    small = facts_of("x", sizes, "test")
    saved = plain.linear_parameters * (2 - bytes_a_weight)
    assert small.weight_bytes == pytest.approx(plain.weight_bytes - saved)


def test_memory_of_a_72b_on_four_gpus_by_hand() -> None:
    made = draft_of(
        "specx:draft_model", **{"tensor-parallel-size": 4, "max-num-seqs": 8, "max-model-len": 8192}
    )
    target = made.target()
    draft = made.draft(target)
    memory = budget(target, draft, 80e9, made.use())
    assert memory.target == pytest.approx(72_706_203_648 * 2 / 4)
    assert memory.draft == pytest.approx(494_032_768 * 2), "whole on every rank"
    assert draft.kv == 2 * 24 * 2 * 64 * 2
    assert memory.draft_cache == 8 * 8192 * draft.kv, "as many as max_num_seqs requests need"
    assert memory.kv_token == 2 * 80 * 2 * 128 * 2
    assert memory.usable == pytest.approx(80e9 * 0.92)
    room = memory.usable - memory.target - memory.draft - memory.draft_cache - RUNTIME
    assert memory.kv_room == pytest.approx(room - memory.activations)
    assert 0.1e9 < memory.activations < 2e9
    batch = memory.largest_batch(8192)
    assert memory.fits(batch, 8192)
    assert not memory.fits(batch + 1, 8192)
    longest = memory.largest_context(8)
    assert memory.fits(8, longest)
    assert not memory.fits(8, longest + 16)


def test_a_drafts_cache_is_what_the_drafter_would_take() -> None:
    usual = draft_of("specx:draft_model", **{"tensor-parallel-size": 4})
    draft = usual.draft(usual.target())
    assert 2**31 <= draft.cache < 2**31 + 16 * draft.kv, "2 GiB where requests would need more"
    stock = draft_of("draft_model", **{"tensor-parallel-size": 4})
    shared = stock.draft(stock.target())
    assert shared.cache == 0
    assert shared.kv_shared == draft.kv / 2, "2 key-value heads on 4 ranks: one each"
    assert shared.resident == pytest.approx(draft.resident / 4)


def test_a_real_drafters_memory_is_what_is_planned(tmp_path: Path) -> None:
    import torch

    from vllm_specx.config import DraftModelConfig
    from vllm_specx.draft.draft_model import DraftModelDrafter
    from vllm_specx.draft.draft_model_checkpoint import load_draft_model
    from vllm_specx.draft.vocabularies import Draftable

    folder = twin(tmp_path, "qwen2", dtype="float32")
    weights = load_draft_model(folder, torch.float32)
    room = drafts.Room(requests=3, tokens=100)
    drafter = DraftModelDrafter(
        DraftModelConfig(draft=folder),
        weights,
        Draftable(96),
        max_batch=3,
        max_model_len=100,
        cache_tokens=300,
    )
    planned = drafts.draft_model(read_facts(folder), room, own=True, ranks=1)
    assert planned.cache == pytest.approx(drafter._cache.nbytes)
    assert planned.resident == pytest.approx(
        drafter._net.bytes - drafter._net.rotary.bytes, rel=0.01
    )


def test_a_real_eagle_drafts_memory_is_what_is_planned() -> None:
    import torch

    from vllm_specx.config import EagleConfig
    from vllm_specx.draft.checkpoint_files import TargetShape
    from vllm_specx.draft.eagle import EagleDrafter
    from vllm_specx.draft.eagle_checkpoints import load_eagle

    heads = str(RECIPES / "heads" / "smollm2-135m-eagle3")
    target = dataclasses.replace(read_facts("embedded:smollm2-135m-instruct"), element=4)
    rows = torch.zeros(49152, 576)
    drafter = EagleDrafter(
        EagleConfig(heads=heads),
        load_eagle(heads, TargetShape(576, 49152, torch.float32, 30)),
        lm_head=rows,
        embeddings=rows,
        max_batch=4,
        max_model_len=1000,
        cache_tokens=4 * 1000,
    )
    planned = drafts.eagle(heads, target, drafts.Room(4, 1000), own=True, ranks=1, version=1)
    assert planned.cache == pytest.approx(drafter._cache.nbytes)
    assert planned.resident == pytest.approx(
        drafter._net.bytes - drafter._net.rotary.bytes, rel=0.001
    )
    assert planned.acceptance[0] == pytest.approx(0.6959)
    shared = drafts.eagle(heads, target, drafts.Room(4, 1000), own=True, ranks=2, version=1)
    assert shared.resident - planned.resident == 49152 * 576 * 4, "embeddings gathered on each rank"


def test_what_a_larger_batch_changes() -> None:
    made = draft_of("specx:draft_model", **{"tensor-parallel-size": 4})
    alone = planner.plan(made, planner.Asked(gpu="A100-80G", acceptance=(0.8,)))
    assert alone.speed.shown == "formula"
    for row in alone.speed.rows:
        assert row.verify == 1.0
        assert row.speed_up == pytest.approx(formula.speed_up(0.8, row.k, alone.speed.gamma))
    many = planner.plan(
        made, planner.Asked(gpu="A100-80G", acceptance=(0.8,), batch=64, context=2048)
    )
    assert many.speed.shown == "roofline"
    assert many.speed.at(8).verify > 1.5
    assert many.speed.best.k < alone.speed.best.k
    assert many.speed.best.speed_up < alone.speed.best.speed_up


def test_gamma_is_the_ratio_of_what_one_gpu_reads() -> None:
    short = planner.Asked(gpu="B200", context=1)
    one = planner.plan(draft_of("specx:draft_model"), short)
    four = planner.plan(planner.on_gpus(draft_of("specx:draft_model"), 4), short)
    assert one.speed.gamma == pytest.approx(0.494 / (72.706 - 1.2457), rel=0.01)
    assert four.speed.gamma == pytest.approx(4 * one.speed.gamma, rel=1e-4), "whole on each"
    assert (
        planner.plan(draft_of("specx:draft_model"), planner.Asked(gamma=0.04)).speed.gamma == 0.04
    )
    long = planner.plan(draft_of("specx:draft_model"), planner.Asked(batch=8, context=8192))
    read = 988_065_536 + 8 * 8192 * 2 * 24 * 2 * 64 * 2
    assert long.speed.gamma == pytest.approx(
        read / (142.92e9 + 8 * 8192 * 2 * 80 * 8 * 128 * 2), rel=1e-3
    )


def test_measured_steps_take_the_place_of_the_roofline() -> None:
    asked = planner.Asked(acceptance=(0.5,), gamma=0.1, step_ms={0: 20.0, 4: 30.0})
    found = planner.plan(draft_of("specx:draft_model"), asked)
    assert found.speed.shown == "measured"
    row = found.speed.at(4)
    assert row.speed_up == pytest.approx(1.9375 / (1.5 + 0.4))
    assert row.rate == pytest.approx(row.speed_up / 0.020)


def test_what_does_not_fit_is_said() -> None:
    one = recipe(model="Qwen/Qwen2.5-72B-Instruct")
    found = planner.plan(one, planner.Asked(gpu="L40S"))
    assert not found.fits
    assert found.memory.kv_room < 0
    assert planner.to_json(found)["largest_batch"] == 0


def test_promises_beside_the_formula() -> None:
    """Hand-worked at gamma 0.05: E of the best promised K over 1 + K g, at both ends of acceptance."""
    by_name = {each.promise.workload: each for each in claims.workloads()}
    expected = {
        "code, SQL": (2.666, 3.791),
        "tool calling, JSON": (2.353, 3.093),
        "long chain of thought": (1.759, 2.226),
        "creative, T >= 0.9": (1.264, 1.502),
    }
    for name, gain in expected.items():
        assert by_name[name].gain == pytest.approx(gain, abs=2e-3)
    assert [each.verdict for each in by_name.values()] == ["agrees"] * 3 + ["careful"]
    code = by_name["code, SQL"]
    assert code.by_batch[1][0] == pytest.approx(code.gain), "verifying is free for one request"
    assert code.by_batch[32][1] == "optimistic"
    assert all(each.by_batch[64][1] == "optimistic" for each in list(by_name.values())[:3])


def test_promised_memory() -> None:
    found = {each.method: each for each in claims.sizes()}
    heads = found["Medusa, 4 heads"].actual
    assert heads["Llama-3.1-8B"] == 4 * 4096**2 * 2
    assert found["Medusa, 4 heads"].verdict(heads["Llama-3.3-70B"]) == "optimistic"
    # EAGLE-3: q, k, v of twice the width, o, the MLP, fc of three states, 32000 rows of lm_head.
    eagle3 = (2 * 6144 * 4096 + 4096**2 + 3 * 4096 * 14336 + 3 * 4096**2 + 32000 * 4096) * 2
    assert found["EAGLE-3, published"].actual["Llama-3.1-8B"] == pytest.approx(eagle3)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_can_be_planned_without_a_network(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    chosen = recipes.load(recipes.find(name))
    if chosen.model is None:
        chosen = chosen.model_copy(update={"model": "Qwen/Qwen2.5-7B-Instruct"})
    for count in sorted({chosen.tensor_parallel_size, *chosen.gpus}):
        made = planner.on_gpus(pairing(chosen, (RECIPES,)), count)
        found = planner.plan(made, planner.Asked())
        assert found.count == count or found.count == made.ranks * made.stages
        assert found.speed.plain > 0
        assert json.dumps(planner.to_json(found))


def test_names_of_gpus() -> None:
    for said in ("A100-80G", "a100 80gb", "A100_80GB", "NVIDIA A100-80GB", "A100"):
        assert gpus.find(said) == "A100-80GB"
    assert gpus.find("h100") == "H100-SXM"
    assert gpus.find("4090") == "RTX-4090"
    assert gpus.mentioned("8 x H200 or B200") == "H200"
    assert gpus.mentioned("2 CPU cores with AVX-512") is None
    with pytest.raises(ConfigError, match="did you mean 'H200'"):
        gpus.find("H2000")
    for gpu in gpus.GPUS.values():
        assert 1e11 < gpu.bandwidth < 1e13
        assert gpu.flops / gpu.bandwidth > 50


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    cases = {
        "[]": "must be a JSON mapping",
        "{": "cannot be read",
        "{}": "has no 'hidden_size'",
        '{"num_experts": 8}': "dense decoders only",
    }
    for text, said in cases.items():
        broken.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_facts(str(tmp_path))
    with pytest.raises(ConfigError, match="nothing is known of the model"):
        read_facts("no-such-model")
    with pytest.raises(ConfigError, match="give the path of its config"):
        read_facts("no/such-model", download=False)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ConfigError, match="truncated"):
        drafts.checkpoint(tmp_path)


def test_figures_on_the_command_line() -> None:
    assert acceptances("0.8,0.5") == (0.8, 0.5)
    assert tokens("8k") == 8192
    assert planner.parse_steps("0:28.9, 4:34") == {0: 28.9, 4: 34.0}
    for bad in ("1.5", "many", "", "0.8;0.7"):
        with pytest.raises(ConfigError, match="--alpha"):
            acceptances(bad)
    for bad in ("0", "8m", "-1", "k"):
        with pytest.raises(ConfigError, match="--context"):
            tokens(bad)
    for bad in ("28.9", "4:30", "0:x", "0:-1", "0:"):
        with pytest.raises(ConfigError, match="--step-ms"):
            planner.parse_steps(bad)
    long = planner.Asked(context=200_000)
    with pytest.raises(ConfigError, match="at most 32768 tokens"):
        planner.plan(draft_of("specx:draft_model"), long)
    assert Use().ranks == 1


def test_what_specx_auto_drafts_with(tmp_path: Path) -> None:
    heads = RECIPES / "heads"
    assert drafts.kind_of(str(heads / "smollm2-135m-eagle3")) == "eagle"
    assert drafts.kind_of("heads/smollm2-135m-hydra", (RECIPES,)) == "medusa"
    assert drafts.kind_of(str(heads / "smollm2-135m-medusa")) == "medusa"
    assert drafts.kind_of(twin(tmp_path, "llama")) == "model"
    assert drafts.kind_of("Qwen/Qwen2.5-0.5B-Instruct") == "model"
    assert drafts.kind_of("yuhuili/EAGLE-LLaMA3-Instruct-8B") == "eagle"
    seen = recipe(
        model="Qwen/Qwen2.5-72B-Instruct",
        speculation={"method": "specx:auto", "model": "Qwen/Qwen2.5-0.5B-Instruct"},
    )
    found = planner.plan(seen, planner.Asked(gpu="H200"))
    assert found.speed.rows[-1].k == 4, "as many as the trained draft is asked for"
    assert found.draft.kind == "model"


def test_a_stock_draft_is_shared_by_as_many_ranks_as_are_asked_for() -> None:
    one = draft_of("draft_model")
    four = planner.on_gpus(one, 4)
    target = one.target()
    assert four.draft(target).resident == pytest.approx(one.draft(target).resident / 4)
    ours = planner.on_gpus(draft_of("specx:draft_model"), 4)
    assert ours.draft(target).resident == one.draft(target).resident


def test_sizes_of_a_hub_model_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some" / "model" / "resolve" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(committed()[SEVENTY]["config"]))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        found = read_facts("some/model")
        with pytest.raises(ConfigError, match="cannot be downloaded"):
            read_facts("some/other")
        server.shutdown()
    assert found.parameters == 70_553_706_496
    assert found.source.startswith(address)


@pytest.mark.parametrize(
    ("written", "read"),
    [(32768, 32768), ("32K", 32768), ("32k", 32000), ("1.5k", 1500), ("77", 77)]
    + [(value, None) for value in (-1, "-1", "auto", True, None, "k", 1.5, [])],
)
def test_lengths_as_vllm_lets_them_be_written(written: Any, read: int | None) -> None:
    serve = {} if written is None else {"max-model-len": written}
    chosen = Recipe.model_construct(model=SEVENTY, speculation=None, serve=serve)
    assert pairing(chosen).integer("max-model-len") == read


def test_a_strange_number_of_ranks_ends_nothing() -> None:
    for ranks in (0, -2, 7, 10**9):
        chosen = Recipe.model_construct(
            model=SEVENTY, speculation=None, serve={"tensor-parallel-size": ranks}
        )
        try:
            planner.plan(pairing(chosen), planner.Asked(gpu="H200"))
        except ConfigError as error:
            assert "do not divide" in str(error)
