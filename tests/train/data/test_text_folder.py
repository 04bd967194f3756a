"""Texts in folders of one's own."""

from pathlib import Path

import pytest

from tests.refusals import refuses
from train.data import Labelled, Running, TextFolder
from train.data.stream import TooManyDamaged
from train.schema import validate


def load(path: Path, **options: object) -> Labelled | Running:
    node, problems = validate(TextFolder, {"name": "text_folder", "path": str(path), "tokenizer": "bytes", **options})
    assert node is not None, problems
    return node.load(seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, names in (("train", "ab"), ("val", "b")):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                (tmp_path / split / name / f"{number}.txt").write_text(f"{split} {name} {number}", encoding="utf-8")
    return tmp_path


def test_texts_with_labels(folder: Path) -> None:
    data = load(folder)
    assert isinstance(data, Labelled)
    assert data.classes == ("a", "b")
    assert data.train.texts == ["train a 0", "train a 1", "train b 0", "train b 1"]  # type: ignore[attr-defined]
    assert data.train.labels == [0, 0, 1, 1]  # type: ignore[attr-defined]
    assert data.test.labels == [1, 1]  # type: ignore[attr-defined]


def test_running_text(folder: Path) -> None:
    (folder / "val" / ".hidden.txt").write_text("hidden")
    data = load(folder, use="running", max_length=8)
    assert isinstance(data, Running)
    assert data.tokenizer.decode(data.test.tokens.tolist()) == "val b 0val b 1"
    assert data.test_bytes == 14


def test_classes_that_training_lacks(folder: Path) -> None:
    (folder / "val" / "b").rename(folder / "val" / "B")
    with refuses(r"val/B: label 'B' is not among the training classes a, b; did you mean b\?"):
        load(folder)


def test_empty_and_unreadable_texts(folder: Path) -> None:
    (folder / "train" / "a" / "0.txt").write_text(" \n")
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples.*0.txt \(the last: the text is empty\)"):
        load(folder)
    (folder / "train" / "b" / "1.txt").write_bytes(b"caf\xe9")
    with pytest.warns(UserWarning, match="passed over") as caught:
        data = load(folder, max_damaged=2)
    assert len(caught) == 2
    assert "1.txt: byte 3 (0xe9) is no utf-8" in str(caught[1].message)
    assert data.train.texts == ["train a 1", "train b 0"]  # type: ignore[attr-defined, union-attr]
    with pytest.warns(UserWarning, match="empty"):
        data = load(folder, max_damaged=1, encoding="latin-1")
    assert data.train.texts[-1] == "café"  # type: ignore[attr-defined, union-attr]


def test_half_a_character(folder: Path) -> None:
    """Some encodings can spell it."""
    (folder / "train" / "a" / "0.txt").write_bytes(b"ab+2AA-")
    with pytest.raises(TooManyDamaged, match=r"0.txt \(the last: has half a character \(\\ud800\) at place 2"):
        load(folder, encoding="utf-7")


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with refuses(r"absent/train: no such folder; texts are read from"):
        load(tmp_path / "absent")
    (folder / "empty").mkdir()
    with refuses(r"empty: no class folder with texts .*data.use=running"):
        load(folder, train="empty")
    with refuses(r"empty: no text \(\*.txt\)"):
        load(folder, train="empty", use="running")


def test_options_that_would_be_ignored() -> None:
    for options, message in (
        ({"use": "running", "too_long": "refuse"}, "too_long = 'refuse': is for use = labels, use is running"),
        ({"encoding": "utf-9"}, "encoding = 'utf-9': Python knows no such encoding"),
    ):
        _, problems = validate(TextFolder, {"name": "text_folder", "path": "x", **options})
        assert message in problems[0]
