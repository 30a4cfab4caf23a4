"""EAGLE drafts: the unrolled training forward, its loss, training, resuming, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.eagle_training import cycling_text, states_of
from tests.support.training import HIDDEN, VOCAB, tiny_target
from vllm_specx.cli.train import app
from vllm_specx.config import ConfigError
from vllm_specx.draft.checkpoint_files import TargetShape
from vllm_specx.draft.eagle import EagleDrafter
from vllm_specx.draft.eagle_checkpoints import load_eagle
from vllm_specx.draft.eagle_config import EagleConfig
from vllm_specx.draft.proposer import DraftContext, VerifiedRows
from vllm_specx.draft.vocab import DraftVocab
from vllm_specx.train import shards, teacher
from vllm_specx.train.dataset import Corpus
from vllm_specx.train.eagle import EagleSettings, EagleTrainer, aux_layers_of
from vllm_specx.train.eagle_net import Eagle1Net, Eagle3Net, EagleNet, layer_config
from vllm_specx.train.errors import TrainError
from vllm_specx.train.loss import sparse_cross_entropy
from vllm_specx.train.target import load_target
from vllm_specx.train.unroll import Unroll

LAYERS = (0, 1)
DEPTH = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cycling_text(tmp_path_factory.mktemp("text"), 120)


@pytest.fixture(scope="module")
def states(target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = load_target(str(target))
    folder = states_of(text, tmp_path_factory.mktemp("states"), weights.embeddings, LAYERS)
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    return folder


def _trainer(target: Path, text: Path, states: Path, out: Path, **changes: Any) -> EagleTrainer:
    settings = {
        "target": str(target), "version": 3, "aux_layers": LAYERS, "depth": DEPTH, "vocab": 100,
        "epochs": 6, "sequences": 4, "validate_every": 40, "learning_rate": 5e-3, "validation": 0.1,
        "patience": 100, "averaging": 0.9, "compute": "float32", **changes,
    }  # fmt: skip
    if settings["version"] == 1:
        settings["aux_layers"] = ()
    return EagleTrainer(
        EagleSettings.model_validate(settings),
        Corpus(text, states),
        load_target(str(target)),
        out,
    )


def _net(target: Path, version: int, **changes: Any) -> EagleNet:
    torch.manual_seed(1)
    config = layer_config(str(target), changes.pop("bias", False))
    net: EagleNet
    if version == 1:
        net = Eagle1Net(config, scale=3.0, embedding_scale=0.5)
    else:
        net = Eagle3Net(
            config, aux=2, norm_before_residual=False, lm_head=None, scale=2.0, **changes
        )
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) * parameter.std().nan_to_num(1.0)
    return net


def _turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """RoPE with complex numbers; x [heads, dim]."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


class _Naive:
    """One draft from one position with a list of keys that grows."""

    def __init__(self, net: EagleNet, states: torch.Tensor, following: torch.Tensor) -> None:
        self.net, self.keys, self.values = net, [], []
        self.position = -1
        for state, embedding in zip(states, following, strict=True):
            self.output = self.read(embedding, net.feature(state[None])[0])

    def read(self, embedding: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        net = self.net
        self.position += 1
        theta = net.config.rope_parameters["rope_theta"]
        x, residual = net.enter(embedding[None], feature[None])
        q, k, v = (net.layer.heads(x, name)[0] for name in ("q_proj", "k_proj", "v_proj"))
        self.keys.append(_turned(k, self.position, theta))
        self.values.append(v)
        q = _turned(q, self.position, theta)
        group = len(q) // len(k)
        heads = []
        for head in range(len(q)):
            scores = torch.stack([q[head] @ key[head // group] for key in self.keys])
            weights = (scores / q.shape[-1] ** 0.5).softmax(0)
            seen = [w * v[head // group] for w, v in zip(weights, self.values, strict=True)]
            heads.append(torch.stack(seen).sum(0))
        return net.layer.finish(residual, torch.cat(heads)[None])[0]


@pytest.mark.parametrize("version", [1, 3])
@torch.no_grad()
def test_unrolled_steps_are_a_decode_with_a_growing_cache(target: Path, version: int) -> None:
    net = _net(target, version)
    lengths = [9, 14, 4]
    total, width = sum(lengths), HIDDEN * (1 if version == 1 else 2)
    states, following = torch.randn(total, width), torch.randn(total, HIDDEN)
    drafted = torch.randn(3, total, HIDDEN)
    rows = torch.tensor([2, 5, 8, 9, 12, 17, 22])
    unroll = Unroll(net, states, following, lengths)
    outputs = [unroll.start(rows)]
    kept = torch.tensor([True, True, False, True, False, True, True])
    for step in range(3):
        feature = outputs[-1]
        if step == 1:
            unroll.keep(kept)
            rows, feature = rows[kept], feature[kept]
        outputs.append(unroll.step(feature, drafted[step, rows]))
    firsts = np.cumsum([0, *lengths])
    for place, row in enumerate([2, 5, 8, 9, 12, 17, 22]):
        first = int(firsts[np.searchsorted(firsts, row, side="right") - 1])
        naive = _Naive(net, states[first : row + 1], following[first : row + 1])
        assert torch.allclose(outputs[0][place], naive.output, atol=1e-4)
        feature = naive.output
        for step in range(3):
            feature = naive.read(drafted[step, row], feature)
            if step == 0:
                assert torch.allclose(outputs[1][place], feature, atol=1e-4)
            elif row in rows:
                at = rows.tolist().index(row)
                assert torch.allclose(outputs[step + 1][at], feature, atol=1e-4)


def test_an_exported_eagle_1_layer_is_a_llama_layer_without_input_norm(target: Path) -> None:
    """Against transformers, with the weights of the checkpoint; bias as in Qwen2."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    net = _net(target, 1, bias=True)
    states, following = 3 * torch.randn(12, HIDDEN), 0.5 * torch.randn(12, HIDDEN)
    tensors = {name: t.float() for name, t in net.tensors().items()}
    config = layer_config(str(target), True)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    renamed = {n.removeprefix("layers.0."): t for n, t in tensors.items() if n != "fc.weight"}
    missing, unexpected = layer.load_state_dict(renamed, strict=False)
    assert set(missing) == {"self_attn.o_proj.bias"} and not unexpected
    layer.self_attn.o_proj.bias.data.zero_()
    x = torch.cat((following, states), -1) @ tensors["fc.weight"].T
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(12)[None])
    with torch.no_grad():
        wanted = layer(x[None], attention_mask=mask, position_embeddings=positions)
        wanted = wanted[0] if wanted.dim() == 3 else wanted
        found = net.leave(Unroll(net, states, following, [12]).start(torch.arange(12)))
    error = (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert error < 0.02


def test_the_sparse_loss_is_cross_entropy_and_trains_lm_head() -> None:
    torch.manual_seed(0)
    n, size, rows, k = 1100, 24, 90, 5
    ids = torch.stack([torch.randperm(rows)[:k] for _ in range(n)])
    wanted, weights = torch.rand(n, k).softmax(-1), torch.rand(n)
    leaves = [torch.randn(n, size), torch.randn(rows, size)]
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    loss, best = sparse_cross_entropy(*mine, ids, wanted, weights)
    loss.backward()
    plain = [leaf.clone().requires_grad_() for leaf in leaves]
    logits = plain[0] @ plain[1].T
    dense = torch.zeros(n, rows).scatter_(1, ids, wanted)
    same = (torch.nn.functional.cross_entropy(logits, dense, reduction="none") * weights).sum()
    same.backward()
    assert torch.allclose(loss, same, rtol=1e-4)
    assert torch.equal(best, logits.argmax(-1))
    for a, b in zip(mine, plain, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-4)


@pytest.mark.parametrize("changes", [{"version": 1}, {}, {"train_lm_head": True}])
def test_every_weight_learns(
    target: Path, text: Path, states: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = _trainer(target, text, states, tmp_path, unroll_at=(0.0, 0.0), **changes)
    assert trainer.unrolled == 3
    loss, accuracy = trainer._loss(next(iter(trainer.batches)))
    torch.autograd.backward(loss)
    assert len(accuracy) == 3
    for name, parameter in trainer.heads.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0) and bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("changes", [{"version": 1}, {}, {"train_lm_head": True}])
def test_a_sequence_is_learnt_and_the_checkpoint_is_whole(
    target: Path, text: Path, states: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = _trainer(target, text, states, tmp_path, **changes)
    found = trainer.train(lambda *_: None)
    assert found is not None
    # At the ends of answers the drafts run out of text.
    assert found.by_depth[0] > 0.9 and found.by_depth[2] > 0.8 and found.length > 3.4
    assert trainer.history[-1]["accuracy"][2] > 0.9
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    assert config["specx"]["version"] == trainer.settings.version
    assert config["specx"]["acceptance"][0] > 0.9
    assert config["hidden_size"] == HIDDEN and config["vocab_size"] == VOCAB
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    if trainer.settings.version == 3:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == 100 and config["fc_norm"] is True
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
        vocab = DraftVocab.from_d2t(tensors.pop("d2t"), VOCAB)
        assert torch.equal(vocab.token_ids, trainer.vocab.token_ids)
        assert int(tensors.pop("t2d").sum()) == 100
        assert tensors["lm_head.weight"].shape == (100, HIDDEN)
        assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (HIDDEN, 2 * HIDDEN)
        assert {"fc_norm.1.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= set(tensors)
    else:
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert torch.equal(tensors.pop("token_map"), trainer.vocab.token_ids)
        assert not any("input_layernorm" in name or "lm_head" in name for name in tensors)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    weights = load_eagle(tmp_path / "heads", TargetShape(HIDDEN, VOCAB, torch.bfloat16, 2))
    assert weights.version == trainer.settings.version and weights.acceptance[0] > 0.9
    assert weights.vocab is not None
    assert torch.equal(weights.vocab.token_ids, trainer.vocab.token_ids)
    assert weights.aux_layers == trainer.settings.aux_layers
    if trainer.settings.version == 3:
        loaded = _trainer(target, text, states, tmp_path / "other", **changes)
        if trainer.settings.train_lm_head is False:
            tensors.pop("lm_head.weight")
        loaded.average.load_state_dict(tensors)
        again = loaded.validate()
        assert abs(again.length - trainer.best) < 0.1


@pytest.mark.parametrize("version", [1, 3])
def test_the_proposer_accepts_what_training_says(
    target: Path, text: Path, states: Path, tmp_path: Path, version: int
) -> None:
    """The exported checkpoint, decoding token by token, matches as many as the trainer counted."""
    trainer = _trainer(target, text, states, tmp_path, version=version, epochs=version + 1)
    trainer.train(lambda *_: None)
    trainer.export(trainer.validate())
    weights = load_eagle(tmp_path / "heads", TargetShape(HIDDEN, VOCAB, torch.float32, 2))
    rows = trainer.target.lm_head.float()
    config = EagleConfig(heads="x", min_probability=0.0)
    corpus, counted, drafted = trainer.corpus, [], []
    for run, (begin, end) in enumerate(trainer.runs[:5].tolist()):
        drafter = EagleDrafter(
            config, weights, lm_head=rows, embeddings=rows, max_batch=1, max_model_len=256,
            cache_tokens=1024,
        )  # fmt: skip
        counted += trainer._matched(corpus, begin, end).tolist()
        start = int(corpus.offsets[np.searchsorted(corpus.offsets, begin, side="right") - 1])
        tokens = corpus.tokens[start:end]
        read = 0
        for at in range(begin - start, end - start - 2):
            seen = trainer._states(start + read, start + at + 1).float()
            parts = tuple(seen.chunk(len(weights.aux_layers) or 1, -1))
            size = at + 1 - read
            (draft,) = drafter.propose(
                DraftContext(
                    request_ids=[str(run)],
                    rows=np.zeros(1, np.int32),
                    token_ids=tokens[None].astype(np.int32),
                    num_tokens=np.array([at + 2], np.int32),
                    num_prompt_tokens=np.array([begin - start + 1], np.int32),
                    sampled=[[int(tokens[at + 1])]],
                    budgets=np.array([DEPTH], np.int32),
                    temperatures=np.zeros(1, np.float32),
                    pools=[None],
                    finished=[],
                    vocab_size=VOCAB,
                    verified=VerifiedRows(
                        parts, *(np.array([n], np.int32) for n in (0, read, size))
                    ),
                )
            )
            following = tokens[at + 2 : at + 2 + DEPTH]
            agreed = draft.tokens[: len(following)] == following
            drafted.append(int(np.logical_and.accumulate(agreed).sum()))
            read = at + 1
    assert len(drafted) == len(counted) > 60 and max(drafted) == DEPTH
    assert np.mean(np.array(drafted) == np.array(counted)) > 0.95


class _Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("version", [1, 3])
def test_a_run_that_is_stopped_ends_the_same(
    target: Path, text: Path, states: Path, tmp_path: Path, version: int
) -> None:
    def trainer(name: str) -> EagleTrainer:
        return _trainer(target, text, states, tmp_path / name, version=version, epochs=2,
                        validate_every=15)  # fmt: skip

    trainer("whole").train(lambda *_: None)

    def stop_at(step: int) -> Any:
        def report(done: int, *_: Any) -> None:
            if done == step:
                raise _Killed

        return report

    for step in (10, 33):
        with pytest.raises(_Killed):
            trainer("stopped").train(stop_at(step), save_every_s=0.0)
    trainer("stopped").train(lambda *_: None)
    kept = [
        [
            {k: v for k, v in entry.items() if k in ("step", "length", "by_depth")}
            for entry in json.loads((tmp_path / name / "history.json").read_text())
        ]
        for name in ("whole", "stopped")
    ]
    assert len(kept[0]) > 2 and kept[0] == kept[1]
    tensors = [
        load_file(tmp_path / name / "heads" / "model.safetensors") for name in ("whole", "stopped")
    ]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def test_a_long_conversation_is_cut_with_its_context(
    target: Path, text: Path, states: Path, tmp_path: Path
) -> None:
    """What is drafted in a stretch does not depend on where the stretches are cut."""
    trainer = _trainer(target, text, states, tmp_path)
    whole = trainer.corpus.stretches(np.array([7]), 512)
    parts = trainer.corpus.stretches(np.array([7]), 16)
    assert len(whole) == 1 and len(parts) > 1
    outputs = []
    for stretches in (whole, parts):
        texts = trainer.texts(stretches)
        outputs.append(trainer.unroll(trainer.heads, texts).start(texts.rows))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4)


def test_broken_caches_end_in_a_sentence_or_are_made_anew(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_target(str(target))
    folder = states_of(text, tmp_path / "states", weights.embeddings, LAYERS)
    with pytest.raises(TrainError, match="teacher-00000"):
        _trainer(target, text, folder, tmp_path / "out")
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    path = shards.shard_path(folder, teacher.KIND, 2)
    made = path.read_bytes()
    path.write_bytes(made[:1000])
    with pytest.raises(TrainError, match=r"teacher-00002.*give the same command again"):
        _trainer(target, text, folder, tmp_path / "out")
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    assert path.read_bytes() == made and "made anew" in capsys.readouterr().err
    path = shards.shard_path(folder, "aux", 1)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TrainError, match="aux-00001"):
        _trainer(target, text, folder, tmp_path / "out")


def test_the_teacher_says_what_lm_head_says(target: Path, text: Path, states: Path) -> None:
    weights, corpus = load_target(str(target)), Corpus(text, states)
    begin, end = (int(x) for x in corpus.greedy_runs(np.arange(len(corpus)))[3])
    exact = (corpus.hidden(begin, end - 1).float() @ weights.lm_head.float().T).softmax(-1)
    ids = corpus.cached(teacher.KIND, "ids", begin, end - 1)
    share = corpus.cached(teacher.KIND, "probabilities", begin, end - 1)
    assert np.array_equal(ids[:, 0], corpus.tokens[begin + 1 : end])
    wanted = exact.gather(1, torch.from_numpy(ids.astype(np.int64)))
    assert torch.allclose(torch.from_numpy(share), wanted, atol=0.02)


def test_targets_and_layers(target: Path, tmp_path: Path) -> None:
    assert aux_layers_of(str(target)) == (0, 1)
    assert aux_layers_of(str(target), [1, 0, 1]) == (0, 1)
    for layer in (2, -1):
        with pytest.raises(TrainError, match=f"layer {layer}, but the target has layers 0 to 1"):
            aux_layers_of(str(target), [0, layer])
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2})
    )
    with pytest.raises(TrainError, match="train Medusa heads"):
        layer_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert layer_config(str(tmp_path), None).attention_bias is True
    for kind, theta in (("glm4", 10000.0), ("gemma3_text", 10000.0), ("qwen3", 77.0)):
        said = {"model_type": kind, **({"rope_theta": theta} if theta == 77.0 else {})}
        (tmp_path / "config.json").write_text(json.dumps(said))
        rope = layer_config(str(tmp_path), None).rope_parameters
        assert rope == {"rope_type": "default", "rope_theta": theta}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--aux-layers", "2,x"], "--aux-layers is '2,x'"),
        (["--aux-layers", "0,7"], "--aux-layers names layer 7"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--device", "cuda:99"], "--device is 'cuda:99', but PyTorch sees"),
        (["--seed", "-1"], "--seed is -1"),
        (["--epochs", "inf"], "--epochs is inf"),
        (["--exclude", "nowhere.jsonl"], "the prompts in nowhere.jsonl cannot be read"),
        (["--depth", "0"], "--depth is 0"),
        (["--text", "nowhere"], "there is no training text in it"),
    ],
)
def test_bad_options_are_one_sentence(
    target: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    command = ["eagle3", "--target", str(target), "--out", str(tmp_path), *arguments]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_target_that_no_draft_fits_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [kind, "--target", str(tmp_path), "--out", str(out)])
    assert isinstance(result.exception, TrainError)
    assert "train Medusa heads" in str(result.exception)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_command_goes_from_text_to_heads(
    target: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    command = [kind, "--target", str(target), "--out", str(tmp_path), "--text", str(text)]
    command += ["--vocab", "100", "--epochs", "0.2", "--workers", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exception is None, result.exception
    assert (tmp_path / "heads" / "model.safetensors").exists()
    assert (tmp_path / "curves.png").exists()
