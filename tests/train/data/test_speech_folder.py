"""Folders of recordings: texts beside them, LibriSpeech's layout, and what has no partner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.refusals import refuses
from train.data import SpeechFolder
from train.data.recordings import Recordings
from train.data.stream import TooManyDamaged
from train.schema import validate


def load(path: Path, **options: Any) -> Recordings:
    node, problems = validate(
        SpeechFolder, {"name": "speech_folder", "path": str(path), "sample_rate": 8000, **options}
    )
    assert node is not None, problems
    return node.load(seed=0)


def sound(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.random.default_rng(0).integers(-9000, 9000, 4000).astype(np.int16), 8000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("train/a.wav", "A Fox"), ("train/x/b.c.flac", "\ufeffthe dog\r\n"), ("val/a.MP3", "a dog")):
        sound(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(text, newline="")
    return tmp_path


def test_texts_beside_their_recordings(folder: Path) -> None:
    sound(folder / "train/.hidden/c.wav")
    sound(folder / "train/.d.wav")
    data = load(folder)
    assert data.train.names == [str(folder / "train/a.wav"), str(folder / "train/x/b.c.flac")]
    assert data.train.texts == ["a fox", "the dog"]
    assert data.test.texts == ["a dog"]
    assert data.train.durations == [0.5, 0.5]
    (folder / "val").rename(folder / "test")
    assert load(folder).test.names == [str(folder / "test/a.MP3")]
    assert load(folder, val="train").test.names == data.train.names


def test_the_layout_of_librispeech(tmp_path: Path) -> None:
    for split, chapter in (("train-clean-100", "19/198"), ("test-clean", "61/70968")):
        base = tmp_path / split / chapter
        prefix = chapter.replace("/", "-")
        for number in range(2):
            sound(base / f"{prefix}-000{number}.flac")
        (base / f"{prefix}.trans.txt").write_text(f"{prefix}-0000 THE NORTH'S WIND\n{prefix}-0001 A SHORT WIND\n")
    data = load(tmp_path, train="train-clean-100", val="test-clean")
    assert data.train.texts == data.test.texts == ["the north's wind", "a short wind"]
    assert data.test.names[1] == str(tmp_path / "test-clean/61/70968/61-70968-0001.flac")
    (tmp_path / "test-clean/61/70968/61-70968.trans.txt").write_text(
        "61-70968-0000 THE\n\n61-70968-0001\n61-70968-0000 A\n"
    )
    with (
        pytest.warns(UserWarning, match=r"trans.txt:3: no text follows the name '61-70968-0001'"),
        pytest.warns(UserWarning, match=r"trans.txt:4: the name '61-70968-0000' is there again"),
        pytest.warns(UserWarning, match=r"0001.flac: there is no readable text for it, neither 61-70968-0001.txt"),
    ):
        few = load(tmp_path, train="train-clean-100", val="test-clean", max_damaged=3)
    assert few.test.texts == ["the"]


def test_texts_and_recordings_without_a_partner(folder: Path) -> None:
    sound(folder / "train/alone.wav")
    with pytest.raises(TooManyDamaged, match=r"alone.wav .*no readable text for it, neither alone.txt beside it nor"):
        load(folder)
    (folder / "train/alone.txt").write_text("a")
    (folder / "train/silent.txt").write_text("a")
    with pytest.raises(TooManyDamaged, match=r"train/silent .*there is a text of this name, and no recording"):
        load(folder)
    (folder / "train/silent.txt").unlink()
    sound(folder / "train/a.ogg")
    with pytest.warns(UserWarning, match=r"a.wav: there is another recording of this name"):
        assert len(load(folder, max_damaged=1).train) == 3


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "train/a.wav").write_bytes(b"RIFF")
    (folder / "train/x/b.c.txt").write_bytes(b"caf\xe9")
    sound(folder / "train/good.wav")
    (folder / "train/good.txt").write_text("a dog")
    with (
        pytest.warns(UserWarning, match=r"b.c.txt: byte 3 \(0xe9\) is no utf-8"),
        pytest.warns(UserWarning, match=r"b.c.flac: there is no readable text"),
        pytest.warns(UserWarning, match=r"a.wav: no readable recording"),
    ):
        data = load(folder, max_damaged=3)
    assert data.train.names == [str(folder / "train/good.wav")]


def test_folders_that_are_empty_or_not_there(tmp_path: Path) -> None:
    with refuses(r"train: no such folder; recordings are read from .*/train/\*\*/NAME.wav with NAME.txt beside each"):
        load(tmp_path)
    (tmp_path / "train").mkdir()
    with refuses(r"train: no recording \(\*.wav, \*.flac"):
        load(tmp_path)
