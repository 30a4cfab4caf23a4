"""From training text to heads: hidden states, training, resuming after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import HIDDEN, VOCAB, counting_text, tiny_target
from vllm_specx.draft.checkpoints import TargetShape, load_heads
from vllm_specx.draft.medusa import MedusaDrafter
from vllm_specx.draft.medusa_config import MedusaConfig
from vllm_specx.draft.proposer import DraftContext
from vllm_specx.train import hidden, shards
from vllm_specx.train.chat import Chat
from vllm_specx.train.dataset import Batches, Corpus
from vllm_specx.train.errors import TrainError
from vllm_specx.train.hidden import HiddenSettings, HiddenStates
from vllm_specx.train.loss import fused_cross_entropy, teacher_probabilities
from vllm_specx.train.medusa import MedusaSettings, Trainer
from vllm_specx.train.pipeline import make_hidden
from vllm_specx.train.plots import plot_history
from vllm_specx.train.target import load_target

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_text(tmp_path_factory.mktemp("text"), 400)


@pytest.fixture(scope="module")
def states(target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    settings = HiddenSettings(target=str(target), aux_layers=(0, 1), dtype="bfloat16")
    hidden.extract(settings, text, folder, lambda *_: None)
    return folder


def _settings(**changes: Any) -> MedusaSettings:
    return MedusaSettings(
        **{
            "depth": 3, "vocab": 200, "epochs": 6, "windows": 8, "width": 32, "validate_every": 40,
            "learning_rate": 3e-3, "validation": 0.1, "patience": 100, "averaging": 0.9, "compute": "float32", **changes,
        }
    )  # fmt: skip


def test_states_are_what_lm_head_multiplies(target: Path, text: Path, states: Path) -> None:
    """Against a forward of one conversation alone, without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    corpus = Corpus(text, states)
    for i in (0, 57, 399):
        begin, end = int(corpus.offsets[i]), int(corpus.offsets[i + 1])
        ids = torch.from_numpy(corpus.tokens[begin:end].astype(np.int64))[None]
        with torch.inference_mode():
            out = model(input_ids=ids, output_hidden_states=True)
        logits = corpus.hidden(begin, end) @ model.lm_head.weight.T
        assert torch.allclose(logits.float(), out.logits[0].float(), atol=0.3, rtol=0.05)
        for layer in (0, 1):
            aux = corpus.auxiliary(layer, begin, end)
            assert torch.allclose(aux.float(), out.hidden_states[layer][0].float(), atol=0.1)


def test_an_auxiliary_layer_that_is_not_there(target: Path) -> None:
    with pytest.raises(TrainError, match="auxiliary layer 2 does not exist"):
        HiddenStates(HiddenSettings(target=str(target), aux_layers=(2,)))


def test_a_truncated_cache_is_made_anew(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = HiddenSettings(target=str(target), dtype="bfloat16")
    hidden.extract(settings, text, tmp_path, lambda *_: None)
    path = shards.shard_path(tmp_path, "hidden", 3)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainError, match="hidden-00003"):
        Corpus(text, tmp_path)
    hidden.extract(settings, text, tmp_path, lambda *_: None)
    assert path.read_bytes() == whole
    assert "hidden-00003" in capsys.readouterr().err


def _kill_when(command: list[str], ready: Any, seconds: float = 120) -> None:
    """Start a command and kill -9 it as soon as `ready()`."""
    child = subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE)
    deadline = time.monotonic() + seconds
    while not ready():
        assert child.poll() is None, child.stderr.read().decode()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_killed_hidden_states_go_on(target: Path, text: Path, states: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(
        HiddenSettings(target=str(target), aux_layers=(0, 1), dtype="bfloat16").model_dump_json()
    )
    folder = tmp_path / "hidden"
    command = [
        sys.executable,
        "-m",
        "vllm_specx.train.hidden",
        str(settings),
        str(text),
        str(folder),
    ]
    _kill_when(command, lambda: len(shards.indices(folder, "hidden")) >= 2)
    made = shards.indices(folder, "hidden")
    assert 2 <= len(made) < 10
    stamps = {i: shards.shard_path(folder, "hidden", i).stat().st_mtime_ns for i in made}
    subprocess.run(command, env=ENV, check=True, capture_output=True)
    for i in shards.indices(states, "hidden"):
        path = shards.shard_path(folder, "hidden", i)
        assert path.read_bytes() == shards.shard_path(states, "hidden", i).read_bytes()
        assert i not in stamps or path.stat().st_mtime_ns == stamps[i]
    assert not list(folder.glob(".*"))


def test_the_fused_loss_is_cross_entropy() -> None:
    torch.manual_seed(0)
    n, size, rows = 1100, 24, 90
    lm_head = torch.randn(rows, size)
    teacher = teacher_probabilities(torch.randn(n, size), lm_head)
    assert torch.allclose(teacher.sum(-1), torch.ones(n), atol=1e-5)
    hard = teacher.argmax(-1)
    weights = torch.rand(n)
    states = torch.randn(n, size, requires_grad=True)
    loss, best = fused_cross_entropy(states, lm_head, teacher, hard, 0.3, weights)
    loss.backward()
    same = states.detach().clone().requires_grad_()
    logits = same @ lm_head.T
    wanted = 0.7 * teacher + 0.3 * torch.nn.functional.one_hot(hard, rows)
    plain = (torch.nn.functional.cross_entropy(logits, wanted, reduction="none") * weights).sum()
    plain.backward()
    assert torch.allclose(loss, plain, rtol=1e-4)
    assert torch.equal(best, logits.argmax(-1))
    assert states.grad is not None and same.grad is not None
    assert torch.allclose(states.grad, same.grad, atol=1e-5)


def test_windows_and_runs_stay_inside_conversations(text: Path, states: Path) -> None:
    corpus = Corpus(text, states)
    train, validation = corpus.split(0.2, {0, 1})
    assert not set(train) & set(validation) and not {0, 1} & (set(train) | set(validation))
    assert 40 < len(validation) < 120
    windows = corpus.windows(train, 16)
    rows = corpus.rows(windows[:40], depth=3)
    for at in rows.starts.tolist():
        assert rows.source[at + 1] > 0 and at + 1 < rows.end[at]
    for begin, end in corpus.greedy_runs(validation):
        assert (corpus.source[begin + 1 : end] == 1).all()
        conversation = np.searchsorted(corpus.offsets, begin, side="right")
        assert end <= corpus.offsets[conversation]


def test_batches_resume_where_they_were() -> None:
    windows = np.arange(40).reshape(20, 2)
    first = Batches(windows, 3, seed=1)
    order = iter(first)
    seen = [next(order).tolist() for _ in range(9)]
    second = Batches(windows, 3, seed=1)
    again = iter(second)
    assert [next(again).tolist() for _ in range(4)] == seen[:4]
    third = Batches(windows, 3, seed=1)
    third.epoch, third.place = second.epoch, second.place
    rest = iter(third)
    assert [next(rest).tolist() for _ in range(5)] == seen[4:]


def test_text_of_a_test_set_is_left_out(text: Path) -> None:
    corpus = Corpus(text, None)
    passage = corpus.tokens[corpus.offsets[5] + 3 : corpus.offsets[5] + 23].tolist()
    found = corpus.containing([passage])
    assert 5 in found and len(found) < 60
    assert corpus.containing([passage[:12]]) == set()


@pytest.mark.parametrize("conditioning", ["none", "hydra"])
def test_heads_learn_a_rule(
    target: Path, text: Path, states: Path, tmp_path: Path, conditioning: str
) -> None:
    """The target is random, so what is learned comes from hard labels of its own argmax."""
    trainer = Trainer(
        _settings(conditioning=conditioning),
        Corpus(text, states),
        load_target(str(target)),
        tmp_path,
    )
    losses = []
    trainer.train(lambda done, total, note: losses.append(note))
    history = trainer.history
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["accuracy"][0] > history[0]["accuracy"][0]
    plot_history(history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    heads = load_heads(tmp_path / "heads", TargetShape(HIDDEN, VOCAB, torch.bfloat16))
    assert heads.conditioning == conditioning and heads.depth == 3
    assert heads.vocab is not None and len(heads.vocab) == 200
    assert len(heads.acceptance) == 3


def test_the_proposer_accepts_what_training_says(
    target: Path, text: Path, states: Path, tmp_path: Path
) -> None:
    """The exported checkpoint in the proposer matches as many tokens as the trainer counted."""
    corpus, weights = Corpus(text, states), load_target(str(target))
    trainer = Trainer(_settings(epochs=3), corpus, weights, tmp_path)
    trainer.train(lambda *_: None)
    trainer.export(trainer.validate())
    heads = load_heads(tmp_path / "heads", TargetShape(HIDDEN, VOCAB, torch.bfloat16))
    config = MedusaConfig(heads="x", min_probability=0.0)
    drafter = MedusaDrafter(config, heads, lm_head=weights.lm_head, embeddings=weights.embeddings)
    same = total = 0
    for begin, end in trainer.runs[:6]:
        matched = trainer._matched(corpus, int(begin), int(end))
        tokens = corpus.tokens[begin:end]
        size = len(matched)
        drafts = drafter.propose(
            DraftContext(
                request_ids=[str(i) for i in range(size)],
                rows=np.zeros(size, np.int32),
                token_ids=tokens[None].astype(np.int32),
                num_tokens=np.arange(2, size + 2, dtype=np.int32),
                num_prompt_tokens=np.ones(size, np.int32),
                sampled=[[0]] * size,
                budgets=np.full(size, 3, np.int32),
                temperatures=np.zeros(size, np.float32),
                pools=[None] * size,
                finished=[],
                vocab_size=VOCAB,
                hidden_states=corpus.hidden(int(begin), int(begin) + size),
            )
        )
        for i, draft in enumerate(drafts):
            following = tokens[i + 2 : i + 5]
            agreed = draft.tokens[: len(following)] == following
            same += int(matched[i]) == int(np.logical_and.accumulate(agreed).sum())
            total += 1
    assert total > 50 and same / total > 0.97


TRAIN = """
import sys
from pathlib import Path
from vllm_specx.train.dataset import Corpus
from vllm_specx.train.medusa import MedusaSettings, Trainer
from vllm_specx.train.target import load_target
target, text, states, out, settings = sys.argv[1:]
trainer = Trainer(
    MedusaSettings.model_validate_json(settings),
    Corpus(Path(text), Path(states)), load_target(target), Path(out),
)
trainer.train(lambda *_: None, save_every_s=0.2)
"""


def test_killed_training_ends_the_same(
    target: Path, text: Path, states: Path, tmp_path: Path
) -> None:
    settings = _settings(epochs=4).model_dump_json()

    def command(out: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            TRAIN,
            str(target),
            str(text),
            str(states),
            str(tmp_path / out),
            settings,
        ]

    subprocess.run(command("whole"), env=ENV, check=True, capture_output=True)
    state = tmp_path / "killed" / "state.pt"
    _kill_when(command("killed"), state.exists)
    first = state.stat().st_mtime_ns
    _kill_when(command("killed"), lambda: state.stat().st_mtime_ns != first)
    unfinished = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)["step"]
    subprocess.run(command("killed"), env=ENV, check=True, capture_output=True)
    histories = [
        json.loads((tmp_path / out / "history.json").read_text()) for out in ("whole", "killed")
    ]
    assert unfinished < histories[0][-1]["step"]
    for whole, killed in zip(*histories, strict=True):
        assert whole["length"] == killed["length"] and whole["by_depth"] == killed["by_depth"]
    tensors = [
        load_file(tmp_path / out / "heads" / "model.safetensors") for out in ("whole", "killed")
    ]
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name])


def test_a_broken_state_is_one_sentence(
    target: Path, text: Path, states: Path, tmp_path: Path
) -> None:
    corpus, weights = Corpus(text, states), load_target(str(target))
    trainer = Trainer(_settings(), corpus, weights, tmp_path)
    trainer.save()
    with pytest.raises(TrainError, match="other settings"):
        Trainer(_settings(depth=2), corpus, weights, tmp_path)
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:2000])
    with pytest.raises(TrainError, match="delete it to train from the start"):
        Trainer(_settings(), corpus, weights, tmp_path)


def test_a_chat_template_is_needed_and_turns_are_appended(target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    chat = Chat(tokenizer)
    assert chat.before_user == "<|user|>"
    messages = [{"role": "user", "content": "hi"}]
    turn = chat.next_turn(messages, "yes", "why")
    assert turn is not None and tokenizer.decode(turn) == "<|end|><|user|>why<|end|><|assistant|>"
    tokenizer.chat_template = None
    with pytest.raises(TrainError, match="no chat template"):
        Chat(tokenizer)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stage_that_fails_ends_with_its_sentence(
    text: Path, tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = HiddenSettings(target=str(tmp_path / "nowhere"))
    with pytest.raises(TrainError, match="stage 'hidden' ended with status 2") as error:
        make_hidden(settings, text, tmp_path, workers)
    # The first worker says it itself; where another failed first, the error repeats it.
    assert "nowhere cannot be loaded" in capfd.readouterr().err + str(error.value)
