"""What a training run finds when it is started again: caches of other text, more text, leftovers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.eagle_training import cycling_text, states_of
from tests.support.training import HIDDEN, tiny_target
from vllm_specx.train import generate, hidden, shards, teacher
from vllm_specx.train.dataset import Corpus
from vllm_specx.train.errors import TrainError
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
