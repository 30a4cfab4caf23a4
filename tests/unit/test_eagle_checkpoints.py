"""EAGLE checkpoints of every layout give the same weights; what does not fit is one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support import eagle_files as synthetic
from tests.support import synthetic_heads
from vllm_specx.draft.checkpoints import CheckpointError, TargetShape, load_heads
from vllm_specx.draft.eagle_checkpoints import load_eagle, most_frequent
from vllm_specx.draft.eagle_export import save_for_vllm
from vllm_specx.draft.eagle_weights import EagleWeights

HIDDEN, VOCAB, IDS = synthetic.HIDDEN, synthetic.VOCAB, synthetic.IDS
TARGET = TargetShape(HIDDEN, VOCAB, num_layers=synthetic.TARGET_LAYERS)
SHARED = Path(os.environ.get("SPECX_SHARED", Path(__file__).parents[3] / "shared"))
Tensors = dict[str, torch.Tensor]


def write(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None, file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_same(one: EagleWeights, other: EagleWeights) -> None:
    """Every field, tensors to the bit."""
    for key in dataclasses.fields(EagleWeights):
        _same(getattr(one, key.name), getattr(other, key.name), key.name)


def _same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), what
    elif isinstance(one, tuple):
        assert len(one) == len(other), what
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            _same(a, b, f"{what}.{index}")
    elif dataclasses.is_dataclass(one):
        for key in dataclasses.fields(one):
            _same(getattr(one, key.name), getattr(other, key.name), f"{what}.{key.name}")
    else:
        assert one == other, what


def assert_holds(weights: EagleWeights, tensors: Tensors, first: str) -> None:
    """The first layer and fc are the tensors written."""
    layer = weights.layers[0]
    for part, names in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        inside = "self_attn" if part == "qkv" else "mlp"
        joined = torch.cat([tensors[f"{first}{inside}.{n}_proj.weight"] for n in names])
        assert torch.equal(getattr(layer, part), joined)
    assert torch.equal(layer.out, tensors[f"{first}self_attn.o_proj.weight"])
    assert torch.equal(layer.down, tensors[f"{first}mlp.down_proj.weight"])
    assert torch.equal(layer.post_norm, tensors[f"{first}post_attention_layernorm.weight"])
    assert weights.fc is not None and torch.equal(weights.fc, tensors["fc.weight"])


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("with_embeddings", [True, False])
def test_safeailab_eagle(tmp_path: Path, file: str, with_embeddings: bool) -> None:
    tensors = synthetic.eagle1(fc_bias=True)
    if with_embeddings:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    weights = load_eagle(write(tmp_path, tensors, synthetic.layer_config(), file), TARGET)
    assert weights.version == 1 and weights.aux_layers == () and weights.vocab is None
    assert_holds(weights, tensors, "layers.0.")
    assert weights.fc_bias is not None and torch.equal(weights.fc_bias, tensors["fc.bias"])
    layer = weights.layers[0]
    assert layer.input_norm is None and layer.hidden_norm is None and layer.qkv_bias is None
    assert weights.norm is None and weights.input_norm is None and weights.fc_norms == ()
    if with_embeddings:
        _same(weights.embeddings, tensors["embed_tokens.weight"], "embeddings")
        _same(weights.lm_head, tensors["lm_head.weight"], "lm_head")
    else:
        assert weights.embeddings is None and weights.lm_head is None
    shape = weights.shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (4, 2, 8, 48)
    assert shape.rms_norm_eps == 1e-5 and shape.max_position_embeddings == 4096
    assert shape.rope == {"rope_type": "default", "rope_theta": 500000.0}


def test_sharded_files_and_layers_with_biases(tmp_path: Path) -> None:
    tensors = synthetic.eagle1(layers=2, bias=True)
    half = len(tensors) // 2
    names = list(tensors)
    for index, part in enumerate((names[:half], names[half:])):
        write(
            tmp_path,
            {name: tensors[name] for name in part},
            synthetic.layer_config(model_type="qwen2", num_hidden_layers=2),
            f"model-{index + 1:05}-of-00002.safetensors",
        )
    weights = load_eagle(tmp_path, TARGET)
    assert len(weights.layers) == 2 and weights.layers[0].input_norm is None
    _same(weights.layers[1].input_norm, tensors["layers.1.input_layernorm.weight"], "input_norm")
    for index, layer in enumerate(weights.layers):
        biases = [tensors[f"layers.{index}.self_attn.{n}_proj.bias"] for n in "qkv"]
        _same(layer.qkv_bias, torch.cat(biases), "bias")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_safeailab_eagle3(tmp_path: Path, file: str) -> None:
    tensors = synthetic.eagle3()
    weights = load_eagle(write(tmp_path, tensors, synthetic.eagle3_config(), file), TARGET)
    assert weights.version == 3 and weights.aux_layers == (2, 6, 9), "vLLM's default layers"
    assert_holds(weights, tensors, "midlayer.")
    layer = weights.layers[0]
    assert layer.qkv.shape == (64, 2 * HIDDEN)
    _same(layer.input_norm, tensors["midlayer.input_layernorm.weight"], "input_norm")
    _same(layer.hidden_norm, tensors["midlayer.hidden_norm.weight"], "hidden_norm")
    _same(weights.norm, tensors["norm.weight"], "norm")
    _same(weights.lm_head, tensors["lm_head.weight"], "lm_head")
    assert weights.vocab is not None and weights.vocab.token_ids.tolist() == sorted(IDS)
    assert not weights.norm_before_residual and not weights.norm_output
    assert weights.embeddings is None and weights.logit_scale == 1.0


def test_vllms_converted_layouts(tmp_path: Path) -> None:
    """`model_type: eagle` with the layer's configuration under `model`, names with `model.`."""
    for number, (tensors, layer) in enumerate(
        (
            (synthetic.eagle1(), synthetic.layer_config()),
            (synthetic.eagle3(), synthetic.eagle3_config()),
        )
    ):
        plain = load_eagle(write(tmp_path / f"plain{number}", tensors, layer), TARGET)
        head = {"lm_head.weight", "d2t", "t2d"}
        named = {n if n in head else f"model.{n}": tensor for n, tensor in tensors.items()}
        config = {"model_type": "eagle", "model": layer, "architectures": ["EagleLlamaForCausalLM"]}
        if number == 0:
            config["truncated_vocab_size"] = VOCAB
        folder = write(tmp_path / f"vllm{number}", named, config)
        assert_same(plain, load_eagle(folder, TARGET))


def test_vllms_keys_of_eagle3(tmp_path: Path) -> None:
    tensors = synthetic.eagle3(states=2)
    tensors |= {f"fc_norm.{i}.weight": torch.randn(HIDDEN) for i in range(2)}
    tensors["input_norm.weight"] = torch.randn(2 * HIDDEN)
    inner = {"eagle_aux_hidden_state_layer_ids": [10, 4], "norm_before_fc": True}
    flags = {"fc_norm": True, "norm_before_residual": True, "norm_output": True, "logit_scale": 0.5}
    config = synthetic.eagle3_config(eagle_config=inner, num_aux_hidden_states=2, **flags)
    weights = load_eagle(write(tmp_path / "a", tensors, config), TARGET)
    assert weights.aux_layers == (4, 10), "in the order in which the target has them"
    assert weights.norm_before_residual and weights.norm_output and weights.logit_scale == 0.5
    _same(weights.fc_norms[1], tensors["fc_norm.1.weight"], "fc_norm")
    _same(weights.input_norm, tensors["input_norm.weight"], "input_norm")
    unused = synthetic.eagle3()
    del unused["fc.weight"]
    config = synthetic.eagle3_config(eagle_config={"use_aux_hidden_state": False})
    weights = load_eagle(write(tmp_path / "b", unused, config), TARGET)
    assert weights.version == 3 and weights.fc is None and weights.aux_layers == ()


def test_a_target_of_another_width(tmp_path: Path) -> None:
    tensors = synthetic.eagle3(of_target=64)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    config = synthetic.eagle3_config(target_hidden_size=64)
    wide = TargetShape(64, VOCAB, num_layers=12)
    weights = load_eagle(write(tmp_path / "a", tensors, config), wide)
    assert weights.fc is not None and weights.fc.shape == (HIDDEN, 192)
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"no 'embed_tokens.weight', and those of the target"):
        load_eagle(write(tmp_path / "b", tensors, config), wide)


@pytest.mark.parametrize("layers", [1, 2])
def test_speculators_eagle3(tmp_path: Path, layers: int) -> None:
    tensors = synthetic.eagle3(first="layers.0.", layers=layers)
    tensors |= {
        "verifier_norm.weight": torch.ones(HIDDEN),
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": synthetic.layer_config(num_hidden_layers=layers),
        "draft_vocab_size": len(IDS),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
        "speculators_config": {"algorithm": "eagle3"},
    }
    weights = load_eagle(write(tmp_path / "a", tensors, config), TARGET)
    assert (
        weights.version == 3 and weights.aux_layers == (1, 5, 8) and len(weights.layers) == layers
    )
    assert weights.norm_before_residual
    assert_holds(weights, tensors, "layers.0.")
    if layers == 2:
        second = weights.layers[1]
        assert second.qkv.shape == (64, HIDDEN) and second.hidden_norm is None
        _same(second.input_norm, tensors["layers.1.input_layernorm.weight"], "input_norm")
    del config["norm_before_residual"]
    again = load_eagle(write(tmp_path / "b", tensors, config), TARGET)
    assert again.norm_before_residual, "as vLLM takes it where it is not said"
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = torch.randn(3 * HIDDEN)
    normed = load_eagle(write(tmp_path / "c", tensors, config), TARGET)
    _same(normed.input_norm, tensors["input_norm.weight"], "input_norm")


def test_speculators_eagle(tmp_path: Path) -> None:
    tensors = synthetic.eagle1(fc_bias=True)
    plain = load_eagle(write(tmp_path / "a", tensors, synthetic.layer_config()), TARGET)
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    config = {
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": synthetic.layer_config(),
        "fusion_bias": True,
        "layernorms": False,
    }
    assert_same(plain, load_eagle(write(tmp_path / "b", renamed, config), TARGET))


@pytest.mark.parametrize("table", ["token_map", "token_map.npy", "d2t"])
def test_ours(tmp_path: Path, table: str) -> None:
    """An EAGLE draft whose reduced vocabulary chooses rows of the target's lm_head."""
    ids = torch.tensor(IDS)
    own: dict[str, Any] = {"format": 1, "acceptance": [0.5, 0.25], "training": {"tokens": 1000}}
    tensors = synthetic.eagle1()
    if table.endswith(".npy"):
        own["token_map"] = table
        np.save(tmp_path / table, np.array(IDS))
    else:
        tensors |= {"token_map": ids} if table == "token_map" else synthetic.tables(IDS)
    folder = write(tmp_path, tensors, synthetic.layer_config(specx=own))
    weights = load_eagle(folder, TARGET)
    assert weights.acceptance == (0.5, 0.25) and weights.lm_head is None
    assert weights.vocab is not None and weights.vocab.token_ids.tolist() == IDS
    fewer = most_frequent(weights, 2, "x")
    assert fewer.vocab is not None and fewer.vocab.token_ids.tolist() == IDS[:2]
    with pytest.raises(CheckpointError, match="has 5 tokens"):
        most_frequent(weights, 6, "x")


def test_fewer_tokens_of_eagle3(tmp_path: Path) -> None:
    config = synthetic.eagle3_config()
    by_id = load_eagle(write(tmp_path / "a", synthetic.eagle3(), config), TARGET)
    with pytest.raises(CheckpointError, match="does not have its tokens by frequency"):
        most_frequent(by_id, 2, "x")
    by_use = load_eagle(write(tmp_path / "b", synthetic.eagle3(ids=IDS), config), TARGET)
    fewer = most_frequent(by_use, 2, "x")
    assert fewer.lm_head is not None and by_use.lm_head is not None
    _same(fewer.lm_head, by_use.lm_head[:2], "lm_head")
    assert fewer.vocab is not None and fewer.vocab.token_ids.tolist() == IDS[:2]


def test_an_lm_head_of_the_whole_vocabulary(tmp_path: Path) -> None:
    """Its rows are picked where there is a map, and are all used where there is none."""
    tensors = synthetic.eagle3()
    whole = torch.randn(VOCAB, HIDDEN)
    tensors["lm_head.weight"] = whole
    weights = load_eagle(write(tmp_path / "a", tensors, synthetic.eagle3_config()), TARGET)
    _same(weights.lm_head, whole[sorted(IDS)], "lm_head")
    for name in ("d2t", "t2d"):
        del tensors[name]
    config = synthetic.eagle3_config() | {"draft_vocab_size": VOCAB}
    weights = load_eagle(write(tmp_path / "b", tensors, config), TARGET)
    assert weights.vocab is None
    _same(weights.lm_head, whole, "lm_head")
    tensors |= synthetic.tables(list(range(VOCAB)))
    weights = load_eagle(write(tmp_path / "c", tensors, config), TARGET)
    assert weights.vocab is None, "a map of every token to itself"


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", **LLAMA3, "rope_theta": 500000.0},
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
            {"rope_type": "default", "rope_theta": 3e4},
        ),
    ],
)
def test_rotary_embeddings(tmp_path: Path, keys: dict[str, Any], rope: dict[str, Any]) -> None:
    config = synthetic.layer_config(**keys)
    assert load_eagle(write(tmp_path, synthetic.eagle1(), config), TARGET).shape.rope == rope


def test_what_need_not_be_said(tmp_path: Path) -> None:
    config = synthetic.layer_config(head_dim=8)
    for key in (
        "intermediate_size",
        "num_hidden_layers",
        "model_type",
        "architectures",
        "vocab_size",
    ):
        del config[key]
    tensors = synthetic.eagle1()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    weights = load_eagle(write(tmp_path, tensors, config), TARGET)
    assert weights.shape.intermediate_size == synthetic.INNER


def test_the_targets_dtype(tmp_path: Path) -> None:
    target = dataclasses.replace(TARGET, dtype=torch.bfloat16)
    weights = load_eagle(write(tmp_path, synthetic.eagle3(), synthetic.eagle3_config()), target)
    assert weights.layers[0].qkv.dtype == weights.layers[0].post_norm.dtype == torch.bfloat16
    assert weights.vocab is not None and weights.vocab.token_ids.dtype == torch.int64


def test_aux_layers_by_the_user(tmp_path: Path) -> None:
    silent = write(tmp_path / "a", synthetic.eagle3(states=4), synthetic.eagle3_config())
    with pytest.raises(CheckpointError, match="which layers of the target its 4 auxiliary states"):
        load_eagle(silent, TARGET)
    assert load_eagle(silent, TARGET, aux_layers=(1, 2, 5, 9)).aux_layers == (1, 2, 5, 9)
    with pytest.raises(CheckpointError, match=r"joins 4 auxiliary states, which cannot come from"):
        load_eagle(silent, TARGET, aux_layers=(1, 2, 5))
    three = write(tmp_path / "b", synthetic.eagle3(), synthetic.eagle3_config())
    with pytest.raises(CheckpointError, match="set aux_layers"):
        load_eagle(three, dataclasses.replace(TARGET, num_layers=None))
    with pytest.raises(CheckpointError, match=r"cannot come from the layers \[1, 2, 2\]"):
        load_eagle(three, dataclasses.replace(TARGET, num_layers=4))
    config = synthetic.eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 5, 9])
    said = write(tmp_path / "c", synthetic.eagle3(), config)
    assert load_eagle(said, TARGET, aux_layers=(1, 5, 9)).aux_layers == (1, 5, 9)
    with pytest.raises(CheckpointError, match=r"was trained with \[1, 5, 9\]; leave it out"):
        load_eagle(said, TARGET, aux_layers=(1, 5, 8))
    with pytest.raises(
        CheckpointError, match="wants the state before layer 9, but this target has 8"
    ):
        load_eagle(said, dataclasses.replace(TARGET, num_layers=8))
    last = write(tmp_path / "d", synthetic.eagle1(), synthetic.layer_config())
    with pytest.raises(CheckpointError, match="last hidden state; leave aux_layers out"):
        load_eagle(last, TARGET, aux_layers=(1, 5, 8))


Q3, UP3 = "midlayer.self_attn.q_proj.weight", "midlayer.mlp.up_proj.weight"


def _with(**tensors: torch.Tensor) -> Callable[[Tensors, dict[str, Any]], None]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda there, config: there.update(named)


def _without(name: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda there, config: there.__delitem__(name)


def _said(**keys: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda there, config: config.update(keys)


def _never_said(key: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda there, config: config.__delitem__(key)


def _nan(there: Tensors, config: dict[str, Any]) -> None:
    there[Q3][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_said(hidden_size=64), "hidden_size 64, but this target has 32; use heads"),
        (_said(vocab_size=1000), "vocab_size 1000, but this target has 200"),
        (_said(target_hidden_size=48), "hidden_size 48, but this target has 32"),
        (_without(Q3), "no 'midlayer.self_attn.q_proj.weight'; it may be incomplete"),
        (_without("fc.weight"), "no 'fc.weight'"),
        (_without("norm.weight"), "no 'norm.weight'"),
        (_without("midlayer.hidden_norm.weight"), "no 'midlayer.hidden_norm.weight'"),
        (_with(norm__weight=torch.ones(31)), r"'norm.weight' has shape \[31\]"),
        (_with(**{Q3: torch.zeros(32, 32)}), r"_proj.weight' has shape \[32, 32\], .* need \[32, 64\]"),
        (_with(fc__weight=torch.zeros(32, 100)), r"'fc.weight' has shape \[32, 100\]"),
        (_with(fc__weight=torch.zeros(())), "'fc.weight' has shape"),
        (_with(**{UP3: torch.zeros(())}), r"has shape \[\]"),
        (_with(lm_head__weight=torch.zeros(9, 32)), r"'lm_head.weight' has shape \[9, 32\]"),
        (_with(lm_head__weight=torch.tensor(3.0)), r"'lm_head.weight' has shape \[\]"),
        (_with(embed_tokens__weight=torch.zeros(100, 32)), r"'embed_tokens.weight' has shape"),
        (_with(**{UP3: torch.zeros(48, 32, dtype=torch.int8)}), "is int8; quantized heads are not read"),
        (
            _with(**{UP3: torch.zeros(48, 32).to(torch.float8_e4m3fn)}),
            "is float8_e4m3fn; quantized heads are not read",
        ),
        (_nan, "values that are not finite"),
        (_with(d2t=torch.zeros(5, dtype=torch.int64) + 199), "has the id 203"),
        (_with(d2t=torch.tensor([3, 2, 1, 0, 0])), "same id more than once"),
        (_with(d2t=torch.zeros(5)), "'d2t' must be a list of whole numbers, not float32"),
        (_with(d2t=torch.tensor(3)), r"not int64 of shape \[\]"),
        (_with(d2t=torch.zeros(4, dtype=torch.int64)), "d2t has 4 tokens, but the configuration says 5"),
        (_without("d2t"), "a draft vocabulary of 5 tokens, but no d2t"),
        (_said(num_hidden_layers=2), "has 1 draft layers, but its config.json says 2"),
        (_said(num_aux_hidden_states=2), r"need \[32, 64\]"),
        (_said(model_type="deepseek_v3"), "model type 'deepseek_v3' are not read; only those of Llama"),
        (_said(model_type="qwen3"), "model type 'qwen3' are not read"),
        (_said(model_type=["llama"]), "are not read"),
        (_said(hidden_act="gelu"), "the activation 'gelu' is not supported; only silu"),
        (_said(layer_types=["sliding_attention"]), "sliding attention window"),
        (_said(rope_scaling={"type": "mrope", "mrope_section": [2]}), "rotary embedding 'mrope'"),
        (_said(rope_scaling={"type": "linear"}), "has no factor"),
        (_said(rope_scaling={"type": "llama3", "factor": 8.0}), "'llama3' has no low_freq_factor"),
        (_said(rope_scaling={"type": "linear", "factor": 0}), "'factor' of the rotary embedding is 0"),
        (_said(rope_theta="big"), "'rope_theta' of the rotary embedding is 'big'"),
        (_said(rope_scaling=[1]), "'rope_scaling' in config.json must be a mapping"),
        (_said(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (_said(eagle_config=3), "'eagle_config' in config.json must be a mapping"),
        (_said(eagle_config={"parallel_draft_step": 4}), "4 tokens in parallel"),
        (_said(num_attention_heads=3), "3 attention heads"),
        (_said(num_attention_heads=0), "'num_attention_heads' in config.json is 0, but"),
        (_said(num_attention_heads="four"), "'num_attention_heads' in config.json is 'four', but"),
        (_said(rms_norm_eps=-1.0), "'rms_norm_eps' in config.json is -1.0"),
        (_said(eagle_aux_hidden_state_layer_ids=[1, 1, 5]), r"cannot come from the layers \[1, 1, 5\]"),
        (_said(eagle_aux_hidden_state_layer_ids=[-1, 1, 5]), "greater than or equal to 0"),
        (_said(eagle_aux_hidden_state_layer_ids=[1, 5, 99]), "before layer 99, but this target has 12"),
        (_never_said("num_attention_heads"), "config.json has no 'num_attention_heads'; add it"),
        (_said(fc_norm=True), "no 'fc_norm.0.weight'"),
        (_said(norm_before_fc=True), "no 'input_norm.weight'"),
        (_said(specx={"format": 99}), "has format 99, and this version reads 1; update"),
        (_said(specx={"acceptance": 0.5}), "specx.acceptance in config.json must be a list"),
        (_said(specx={"acceptance": [1.5]}), "numbers from 0 to 1"),
        (_said(speculators_model_type="peagle"), "a speculator of type 'peagle'; only eagle and eagle3"),
        (
            _said(speculators_model_type="eagle", transformer_layer_config=synthetic.layer_config()),
            "an EAGLE-3 draft by its tensors and an EAGLE draft by its config.json",
        ),
        (
            _said(speculators_model_type="eagle", layernorms=True),
            "extra layernorms of speculators' TTT variant",
        ),
        (_said(speculators_model_type="eagle3", transformer_layer_config=1), "must be a mapping"),
        (_said(model_type="medusa"), "holds Medusa heads, not an EAGLE draft; write method 'specx:medusa'"),
        (
            _with(midlayer__mlp__experts__0__up_proj__weight=torch.ones(2, 2)),
            r"'midlayer.mlp.experts.0.up_proj.weight' \(a mixture of experts\)",
        ),
        (
            _with(midlayer__self_attn__kv_a_proj_with_mqa__weight=torch.ones(2, 2)),
            "multi-head latent attention",
        ),
        (_with(midlayer__self_attn__q_norm__weight=torch.ones(8)), "norms of queries and keys"),
        (_with(mask_hidden=torch.ones(1, 96)), "parallel drafting"),
        (_with(embed_layernorm__weight=torch.ones(32)), "further norms"),
        (_with(**{"midlayer.self_attn.o_proj.bias": torch.ones(32)}), "only q, k and v may have a bias"),
        (_with(**{"midlayer.self_attn.q_proj.bias": torch.ones(32)}), "k_proj.bias'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(
    tmp_path: Path, change: Callable[[Tensors, dict[str, Any]], None], said: str
) -> None:
    tensors, config = synthetic.eagle3(), synthetic.eagle3_config()
    change(tensors, config)
    folder = write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_eagle(folder, TARGET)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


class _Code:
    def __reduce__(self) -> Any:
        return (os.system, ("touch specx-was-here",))


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(path: Path, said: str) -> None:
        with pytest.raises(CheckpointError, match=said) as caught:
            load_eagle(path, TARGET)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "no", "there is no checkpoint")
    folder = write(tmp_path / "a", synthetic.eagle3(), synthetic.eagle3_config())
    (folder / "config.json").write_text("{")
    refused(folder, "config.json cannot be read")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    refused(folder, "may be truncated")
    torch.save({"fc.weight": _Code()}, tmp_path / "m.bin")
    refused(tmp_path / "m.bin", "never run")
    assert not (tmp_path / "specx-was-here").exists()
    whole = {"model.norm.weight": torch.ones(HIDDEN)}
    refused(write(tmp_path / "b", whole, synthetic.layer_config()), "has no EAGLE draft; it holds")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("../ids.npy", None, "must be the name of a .npy file beside it"),
        (3, None, "specx.token_map in config.json is 3"),
        ("ids.npy", None, "ids.npy cannot be read"),
        ("ids.npy", np.array([0.5]), "does not hold whole numbers"),
        ("ids.npy", np.array([[1, 2]]), r"'token_map' must be a list .* shape \[1, 2\]"),
        ("ids.npy", np.array([1, 200]), "has the id 200"),
        ("ids.npy", np.array([{}]), "ids.npy cannot be read"),
    ],
)
def test_a_token_map_file_that_is_none(tmp_path: Path, name: Any, content: Any, said: str) -> None:
    config = synthetic.layer_config(specx={"token_map": name})
    folder = write(tmp_path, synthetic.eagle1(), config)
    if content is not None:
        np.save(folder / name, content)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_eagle(folder, TARGET)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bare", [True, False])
def test_medusa_heads_and_eagle_drafts_are_told_apart(tmp_path: Path, bare: bool) -> None:
    target = TargetShape(synthetic_heads.HIDDEN, synthetic_heads.VOCAB)
    names = synthetic_heads.old_names() if bare else synthetic_heads.vllm_names()
    config = None if bare else synthetic_heads.vllm_config()
    with pytest.raises(CheckpointError, match="Medusa heads, not an EAGLE draft"):
        load_eagle(synthetic_heads.write(tmp_path / "m", names, config), target)
    tensors, said = (
        (synthetic.eagle1(), synthetic.layer_config())
        if bare
        else (synthetic.eagle3(), synthetic.eagle3_config())
    )
    with pytest.raises(CheckpointError, match="an EAGLE draft, not Medusa heads; write method"):
        load_heads(write(tmp_path / "e", tensors, said), TARGET)


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (synthetic.eagle1(), synthetic.layer_config()),
        (synthetic.eagle1(layers=2, bias=True), synthetic.layer_config(num_hidden_layers=2)),
        (synthetic.eagle3(), synthetic.eagle3_config()),
        (
            synthetic.eagle3(layers=2, bias=True, ids=IDS) | {"fc_norm.0.weight": torch.ones(HIDDEN)}
            | {f"fc_norm.{i}.weight": torch.full((HIDDEN,), float(i)) for i in range(3)},
            synthetic.eagle3_config(
                fc_norm=True,
                norm_before_residual=True,
                logit_scale=2.0,
                eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
            ) | {"num_hidden_layers": 2},
        ),
    ],
)  # fmt: skip
def test_what_is_written_for_vllm_is_the_same_draft(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any]
) -> None:
    weights = load_eagle(write(tmp_path / "a", tensors, config), TARGET)
    save_for_vllm(weights, tmp_path / "b", vocab_size=VOCAB)
    assert_same(weights, load_eagle(tmp_path / "b", TARGET))


def test_what_vllms_own_methods_have_no_place_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", synthetic.eagle1(fc_bias=True), synthetic.layer_config())
    with pytest.raises(CheckpointError, match="an fc bias, which vLLM's own methods do not load"):
        save_for_vllm(load_eagle(folder, TARGET), tmp_path / "b", vocab_size=VOCAB)
    tensors = synthetic.eagle3(ids=IDS)
    del tensors["lm_head.weight"]
    weights = load_eagle(write(tmp_path / "c", tensors, synthetic.eagle3_config()), TARGET)
    assert weights.lm_head is None
    with pytest.raises(CheckpointError, match="rows of the target's lm_head"):
        save_for_vllm(weights, tmp_path / "d", vocab_size=VOCAB)
    lm_head = torch.randn(VOCAB, HIDDEN)
    save_for_vllm(weights, tmp_path / "d", vocab_size=VOCAB, lm_head=lm_head)
    _same(load_eagle(tmp_path / "d", TARGET).lm_head, lm_head[IDS], "lm_head")


@pytest.mark.parametrize(("name", "version"), [("eagle1", 1), ("eagle3_8k", 3)])
def test_the_prototype_heads(name: str, version: int) -> None:
    folder = SHARED / "heads" / name
    if not folder.is_dir():
        pytest.skip("the prototype heads are not here")
    weights = load_eagle(folder, TargetShape(576, 49152, torch.bfloat16, num_layers=30))
    assert weights.version == version and weights.shape.rope["rope_theta"] == 100000.0
    if version == 3:
        assert weights.aux_layers == (2, 15, 27) and len(weights.fc_norms) == 3
        assert weights.vocab is not None and len(weights.vocab) == 8192
        assert weights.lm_head is not None and weights.lm_head.shape == (8192, 576)
