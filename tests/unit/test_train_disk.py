"""How much a training run will write is known and said before it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.eagle_training import cycling_text, states_of
from tests.support.training import HIDDEN, tiny_target
from vllm_specx.cli import main
from vllm_specx.train import disk, hidden, shards, teacher
from vllm_specx.train.errors import TrainError
from vllm_specx.train.generate import KIND, GenerateSettings
from vllm_specx.train.target import load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def _tokens(text: Path) -> list[int]:
    return [
        len(shards.read_shard(shards.shard_path(text, KIND, i)).arrays["tokens"])
        for i in shards.indices(text, KIND)
    ]


def test_what_is_written_is_what_was_foreseen(target: Path, tmp_path: Path) -> None:
    text, folder = cycling_text(tmp_path / "text", 90), tmp_path / "states"
    weights = load_target(str(target))
    kept = disk.Kept(3, HIDDEN, taught=True)
    tokens, foreseen = disk.needed(kept, text, folder, None, 2)
    states_of(text, folder, weights.embeddings, (0, 1))
    assert disk.needed(kept, text, folder, None, 2)[0] == 0
    assert 0 < disk.needed(kept, text, folder, None, 2)[1] < foreseen
    teacher.make(weights, text, folder, "cpu", lambda *_: None)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert tokens == sum(_tokens(text)) and foreseen < written < 1.02 * foreseen
    assert disk.needed(kept, text, folder, None, 2) == (0, 0)
    first = shards.shard_path(folder, hidden.LAST, 0)
    first.unlink()
    assert disk.needed(kept, text, folder, None, 2)[0] == _tokens(text)[0]


def test_text_that_is_still_to_come_is_estimated(target: Path, tmp_path: Path) -> None:
    kept, text, folder = disk.Kept(1, HIDDEN, taught=False), tmp_path / "text", tmp_path / "hidden"
    settings = GenerateSettings(target=str(target), tokens=1_000_000, conversations=10)
    assert disk.needed(kept, text, folder, settings, 2) == (1_400_000, 128 * (1_400_000 + 5000))
    cycling_text(text, 90)
    generated = sum(
        int(shards.read_shard(shards.shard_path(text, KIND, i)).meta["generated"]) for i in range(3)
    )
    have = sum(_tokens(text))
    tokens, _ = disk.needed(kept, text, folder, settings, 2)
    assert tokens == pytest.approx(1_000_000 * have / generated, abs=2)
    enough = settings.model_copy(update={"tokens": generated})
    assert disk.needed(kept, text, folder, enough, 2) == (have, 128 * have)


def test_a_run_that_does_not_fit_is_refused_before_it_starts(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("medusa", "eagle", "eagle3"):
        more = ["--aux-layers", "0,1"] if kind == "eagle3" else []
        command = ["train", kind, "--target", str(target), "--out", str(tmp_path / "deep" / kind)]
        assert main([*command, "--tokens", str(10**13), *more]) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1 and "GiB" in said and "--tokens" in said, said
        assert str(tmp_path / "deep" / kind) in said
        assert not (tmp_path / "deep").exists()


def test_what_fits_is_said(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = cycling_text(tmp_path / "text", 30)
    disk.require(disk.Kept(1, HIDDEN, False), text, tmp_path / "hidden", None, 1)
    said = capsys.readouterr().err
    assert f"{sum(_tokens(text))} tokens take 0.00 GiB in {tmp_path / 'hidden'}" in said
    with pytest.raises(TrainError, match=r"make room, take an --out on another disk\.$"):
        disk.require(disk.Kept(10**12, HIDDEN, False), text, tmp_path / "hidden", None, 1)
