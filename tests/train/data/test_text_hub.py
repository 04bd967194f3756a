"""Texts of hub data sets, from local folders: nothing here needs the network."""

from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refuses
from train.data import Labelled, Pairs, Running, TextHub
from train.data.stream import TooManyDamaged
from train.schema import validate

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def load(path: Path, **options: object) -> Any:
    given = {"name": "text_hub", "path": str(path), "tokenizer": "bytes", "max_length": 4, **options}
    node, problems = validate(TextHub, given)
    assert node is not None, problems
    return node.load(seed=0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    columns = {"text": ["one", "two", "three"], "title": ["1", "2", "3"], "label": [0, 1, 1]}
    features = datasets.Features(
        text=datasets.Value("string"), title=datasets.Value("string"), label=datasets.ClassLabel(names=["low", "high"])
    )
    train = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": train, "validation": train.select([2, 0])}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_labels_pairs_and_running_text(saved: Path) -> None:
    data = load(saved)
    assert isinstance(data, Labelled)
    assert data.classes == ("low", "high")
    assert data.test.texts == ["three", "one"]  # type: ignore[attr-defined]
    assert data.test.labels == [1, 0]  # type: ignore[attr-defined]
    pairs = load(saved, use="pairs", source_key="text", target_key="title")
    assert isinstance(pairs, Pairs)
    assert pairs.test.targets == ["3", "1"]
    running = load(saved, use="running")
    assert isinstance(running, Running)
    assert running.tokenizer.decode(running.test.tokens.tolist()) == "threeone"


def test_columns_that_are_not_there(saved: Path) -> None:
    with refuses(r"data.text_key = 'txt': no such column of texts in .*saved\[train\]; there are text \("):
        load(saved, text_key="txt")
    with refuses("data.source_key = 'source': no such column"):
        load(saved, use="pairs")
    with refuses("there is no such split; there are train, validation"):
        load(saved, val="test")


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", " ", None, "b"], "label": [0, 1, 0, 1]})
    table.save_to_disk(tmp_path / "set")
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples.*set\[train\]\[1\]"):
        load(tmp_path / "set", val="train")
    with pytest.warns(UserWarning, match="the text is empty"):
        data = load(tmp_path / "set", val="train", max_damaged=4)
    assert data.train.texts == ["a", "b"]
    assert data.train.labels == [0, 1]
