"""What a training run finds when it is started again: caches of other text, more text, leftovers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.eagle_training import cycling_text, states_of
from tests.support.training import HIDDEN, tiny_target
from vllm_specx.train import generate, hidden, pipeline, shards, teacher
from vllm_specx.train.dataset import Corpus
from vllm_specx.train.eagle import EagleSettings, EagleTrainer
from vllm_specx.train.errors import TrainError
from vllm_specx.train.exclude import Excluded, excluded
from vllm_specx.train.generate import GREEDY, GenerateSettings, target_identity
from vllm_specx.train.medusa import MedusaSettings, Trainer
from vllm_specx.train.prompts import Prompt
from vllm_specx.train.target import load_target

TEXT = generate.KIND


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def _tokens(text: Path, index: int) -> np.ndarray:
    return shards.read_shard(shards.shard_path(text, TEXT, index)).arrays["tokens"]


def test_states_and_teacher_of_other_text_are_made_anew(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_target(str(target))
    text = cycling_text(tmp_path / "text", 60)
    folder = states_of(text, tmp_path / "states", weights.embeddings, (0,))
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    corpus = Corpus(text, folder)
    corpus.require(hidden.AUX)
    kept = shards.shard_path(folder, teacher.KIND, 0).stat().st_mtime_ns
    # Shard 1 of the text was damaged, and the target has said something else this time.
    other = cycling_text(tmp_path / "other", 60, seed=1)
    path = shards.shard_path(text, TEXT, 1)
    path.write_bytes(shards.shard_path(other, TEXT, 1).read_bytes())
    with pytest.raises(TrainError, match=r"hidden-00001.*other text; give the same command again"):
        Corpus(text, folder)
    states_of(text, folder, weights.embeddings, (0,))
    with pytest.raises(TrainError, match=r"teacher-00001.*other text"):
        Corpus(text, folder).require(teacher.KIND)
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    assert "teacher-00001" in (said := capsys.readouterr().err) and "teacher-00000" not in said
    assert shards.shard_path(folder, teacher.KIND, 0).stat().st_mtime_ns == kept
    Corpus(text, folder).require(teacher.KIND)


def test_caches_that_do_not_note_their_text_are_read(target: Path, tmp_path: Path) -> None:
    """As they were written before; then the number of rows must be right."""
    text = cycling_text(tmp_path / "text", 30)
    tokens = _tokens(text, 0)
    path = shards.shard_path(tmp_path, hidden.LAST, 0)
    shards.write_shard(path, {"last": np.zeros((len(tokens), HIDDEN), np.uint16)}, {})
    assert hidden.whole(tmp_path, 0, [hidden.LAST], tokens)
    Corpus(text, tmp_path)
    assert not hidden.whole(tmp_path, 0, [hidden.LAST], tokens[1:])
    assert not path.exists()


def _conversation(ids: list[int], source: list[int], recorded: bool = True) -> Any:
    made = generate._Conversation(Prompt("code", (("user", "x"),)), [], ids, source, 0.0)
    if recorded:
        values = np.array(ids[:-1], np.uint16)[:, None, None] + np.array([[0], [100]], np.uint16)
        made.states = np.broadcast_to(values, (len(ids) - 1, 2, HIDDEN))
    return made


def test_recorded_states_are_written_with_their_text(tmp_path: Path) -> None:
    talk = [_conversation([1, 2, 3, 4], [0, 0, 1, 1]), _conversation([5, 6, 7], [0, 1, 1])]
    made = generate.Made(*generate._arrays(talk), generate._states(talk))
    assert [c.states for c in talk] == [None, None]
    generate._write(made, 3, "target", tmp_path / "text", tmp_path / "states", (9,))
    tokens = _tokens(tmp_path / "text", 3)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert hidden.whole(tmp_path / "states", 3, [hidden.LAST, hidden.AUX], tokens)
    last = shards.read_shard(shards.shard_path(tmp_path / "states", hidden.LAST, 3)).arrays["last"]
    aux = shards.read_shard(shards.shard_path(tmp_path / "states", hidden.AUX, 3)).arrays["layer.9"]
    assert last[:, 0].tolist() == [1, 2, 3, 0, 5, 6, 0]
    assert aux[:, -1].tolist() == [101, 102, 103, 0, 105, 106, 0]


def test_states_of_which_some_are_missing_are_left_to_a_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [_conversation([1, 2, 3], [0, 1, 1]), _conversation([5, 6, 7], [0, 1, 1], False)]
    made = generate.Made(*generate._arrays(talk), generate._states(talk))
    assert made.states is None
    generate._write(made, 0, "target", tmp_path / "text", tmp_path / "states", (9,))
    assert "a forward of their own" in capsys.readouterr().err
    assert shards.indices(tmp_path / "text", TEXT) == [0]
    assert not (tmp_path / "states").exists()


def _cached(target: Path, text: Path, folder: Path) -> Path:
    weights = load_target(str(target))
    states_of(text, folder, weights.embeddings, (0, 1))
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    return folder


def _trainer(
    target: Path,
    text: Path,
    states: Path,
    out: Path,
    left_out: Excluded | None = None,
    **changes: Any,
) -> EagleTrainer:
    settings = {
        "target": str(target), "aux_layers": (0, 1), "depth": 2, "vocab": 100, "epochs": 2,
        "sequences": 4, "validation": 0.1, "patience": 2, "compute": "float32", **changes,
    }  # fmt: skip
    return EagleTrainer(
        EagleSettings.model_validate(settings),
        Corpus(text, states),
        load_target(str(target)),
        out,
        left_out,
    )


def test_more_text_starts_training_again_that_had_stopped(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 60)
    states = _cached(target, text, tmp_path / "states")
    first = _trainer(target, text, states, tmp_path / "out")
    first.stale = 2
    first.save()
    assert first.done and _trainer(target, text, states, tmp_path / "out").done
    cycling_text(text, 90)
    _cached(target, text, states)
    more = _trainer(target, text, states, tmp_path / "out")
    assert not more.done and torch.equal(more.vocab.token_ids, first.vocab.token_ids)


def test_what_a_killed_writer_left_is_removed(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 60)
    states = _cached(target, text, tmp_path / "states")
    out = tmp_path / "out"
    (out / "heads").mkdir(parents=True)
    for path in (out / ".state.pt.99.tmp", out / "heads" / ".model.safetensors.99.tmp"):
        path.write_bytes(b"half")
    _trainer(target, text, states, out).save()
    assert sorted(path.name for path in out.rglob("*")) == ["heads", "history.json", "state.pt"]


def test_recordings_of_killed_workers_are_removed(target: Path, tmp_path: Path) -> None:
    cycling_text(tmp_path / "text", 30)
    left = tmp_path / "states" / ".recording-x.tmp"
    left.mkdir(parents=True)
    (left / "states").write_bytes(b"gigabytes")
    settings = GenerateSettings(target=str(target), tokens=1)  # as many as there are
    pipeline.make_text(settings, tmp_path, 2, states="states", aux_layers=(0,))
    assert not left.exists()


def test_a_batch_that_teaches_nothing_changes_nothing(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 60)
    states = _cached(target, text, tmp_path / "states")
    trainer = _trainer(target, text, states, tmp_path / "out")
    trainer.draft_ids.fill_(-1)
    before = [parameter.clone() for parameter in trainer.heads.parameters()]
    assert trainer._step(next(iter(trainer.batches))) == (0.0, [])
    for old, new in zip(before, trainer.heads.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_state_of_another_run_says_what_differs(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 60)
    states = _cached(target, text, tmp_path / "states")
    _trainer(target, text, states, tmp_path / "out").save()
    with pytest.raises(TrainError, match=r"other settings \(learning-rate was 0.001, not 0.5\)"):
        _trainer(target, text, states, tmp_path / "out", learning_rate=0.5)
    with pytest.raises(TrainError, match="heads of another kind; use another --out"):
        settings = MedusaSettings(windows=4, width=16)
        Trainer(settings, Corpus(text, states), load_target(str(target)), tmp_path / "out")
    moved = tmp_path / "elsewhere"
    moved.symlink_to(target)
    _trainer(moved, text, states, tmp_path / "out")


def test_a_resumed_run_leaves_out_the_same_prompts(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 120)
    states = _cached(target, text, tmp_path / "states")
    corpus = Corpus(text, states)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path, start in ((one, 0), (two, 1)):
        said = AutoTokenizer.from_pretrained(target).decode(corpus.tokens[start : start + 13])
        path.write_text(json.dumps({"prompt": said}))

    def trainer(*files: Path) -> EagleTrainer:
        left_out = excluded(corpus, files, str(target))
        return _trainer(target, text, states, tmp_path / "out", left_out)

    first = trainer(one, two)
    left_out = first.excluded.conversations
    assert 30 < len(left_out) < 90 and not left_out & set(first.validation.tolist())
    first.save()
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(one.read_bytes())
    assert np.array_equal(trainer(two, moved).validation, first.validation)
    for files, said in (
        (
            (one,),
            r"state\.pt is of a run with other files to --exclude \(two\.jsonl is missing now",
        ),
        ((), r"one\.jsonl is missing now"),
    ):
        with pytest.raises(TrainError, match=said):
            trainer(*files)
    three = tmp_path / "three.jsonl"
    three.write_text('"something else"')
    with pytest.raises(TrainError, match=r"three\.jsonl was not among them"):
        trainer(one, two, three)
    two.write_text('"something else"')
    with pytest.raises(TrainError, match=r"two\.jsonl has changed since"):
        trainer(one, two)


def _prompts(folder: Path, prompts: list[list[int]], answers: int) -> Corpus:
    """Each prompt with so many greedy answers, which differ from their first token on."""
    tokens, source, offsets = [], [], [0]
    for prompt in prompts:
        for answer in range(answers):
            tokens += [*prompt, *range(200 + answer, 210 + answer)]
            source += [0] * len(prompt) + [GREEDY] * 10
            offsets.append(len(tokens))
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "source": np.array(source, np.uint8),
        "offsets": np.array(offsets, np.int64),
        "task": np.zeros(len(offsets) - 1, np.uint8),
    }
    shards.write_shard(shards.shard_path(folder, TEXT, 0), arrays, {"generated": "1"})
    return Corpus(folder, None)


def test_prompts_that_begin_alike_are_on_both_sides(tmp_path: Path) -> None:
    """As a system prompt makes them; the answers to one prompt are on one side."""
    corpus = _prompts(tmp_path, [[*range(100), i, i + 1] for i in range(60)], answers=3)
    train, held_out = corpus.split(0.2, set())
    assert len(train) + len(held_out) == 180 and 9 < len(held_out) < 90
    assert not {i // 3 for i in train.tolist()} & {i // 3 for i in held_out.tolist()}
    assert 0 in map(len, corpus.split(0.2, set(), 64))


def test_a_few_prompts_are_enough_to_validate(tmp_path: Path) -> None:
    corpus = _prompts(tmp_path, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], answers=4)
    train, held_out = corpus.split(1e-9, set())
    assert (len(train), len(held_out)) == (8, 4)


def test_a_resumed_run_keeps_its_split(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 60)
    states = _cached(target, text, tmp_path / "states")
    trainer = _trainer(target, text, states, tmp_path / "out")
    trainer.save()
    assert trainer.split_by is None
    path = tmp_path / "out" / "state.pt"
    state = torch.load(path, weights_only=True)
    del state["split_by"], state["tokens"]  # as they were written before
    torch.save(state, path)
    resumed = _trainer(target, text, states, tmp_path / "out")
    expected = resumed.corpus.split(0.1, set(), 64)[1]
    assert resumed.split_by == 64 and np.array_equal(resumed.validation, expected)


def test_text_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    text = cycling_text(tmp_path / "text", 30)
    assert pipeline.made_text(tmp_path, str(target)) == text
    noted = text / "text.json"
    digest = target_identity(str(target)).split()[-1]
    noted.write_text(json.dumps({"target": f"another name {digest}"}))
    assert pipeline.made_text(text, str(target)) == text
    noted.write_text(json.dumps({"target": "llama 0123456789abcdef"}))
    with pytest.raises(TrainError, match="the target llama 0123456789abcdef said"):
        pipeline.made_text(text, str(target))
    noted.write_text("{")
    with pytest.raises(TrainError, match=r"text\.json cannot be read"):
        pipeline.made_text(text, str(target))


def test_heads_that_were_deleted_are_missed(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"heads is gone; delete .*state\.pt"):
        pipeline.summary(tmp_path)
