"""Hub data sets, from local folders: nothing here needs the network."""

import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from train.data.hub import Hub
from train.data.images import Images
from train.data.stream import DamagedExample
from train.schema import validate

datasets = pytest.importorskip("datasets")

COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def table(labels: list[Any], feature: Any, colours: list[int] | None = None, **more: tuple[list[Any], Any]) -> Any:
    """Images whose colour is their label."""
    shown = labels if colours is None else colours
    columns = {"image": [Image.new("RGB", (30, 20), COLOURS[label]) for label in shown], "label": labels}
    features = {"image": datasets.Image(), "label": feature}
    for name, (values, kind) in more.items():
        columns[name], features[name] = values, kind
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def names(*classes: str) -> Any:
    return datasets.ClassLabel(names=list(classes))


def load(path: Path | str, **options: object) -> Images:
    node, problems = validate(Hub, {"name": "hub", "path": str(path), "image_size": 8, **options})
    assert node is not None, problems
    return node.load(seed=0)


def labels_of(images: Images, split: str = "train") -> list[int]:
    data = getattr(images, split)
    found = []
    for index in range(len(data)):
        image, label = data[index]
        assert image.shape == (3, 8, 8)
        assert image.mean(dim=(1, 2)).argmax() == label, "an image of another example"
        found.append(label)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    data = {"train": table([0, 1, 2, 1], names("a", "b", "c")), "validation": table([2, 0], names("a", "b", "c"))}
    datasets.DatasetDict(data).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set(saved: Path) -> None:
    images = load(saved)
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0, 1, 2, 1]
    assert labels_of(images, "test") == [2, 0]


def test_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table([0, 1, 2], names("a", "b", "c")).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    table([2], names("a", "b", "c")).to_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet")
    images = load(tmp_path)
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0, 1, 2]
    assert labels_of(images, "test") == [2]


def test_folders_of_images(image_folders: Path) -> None:
    for label, name in enumerate("abc"):
        for file in (image_folders / "train" / name).iterdir():
            Image.new("RGB", (9, 7), COLOURS[label]).save(file)
    images = load(image_folders, val="train")
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0] * 4 + [1] * 4 + [2] * 4


def test_labels_without_names_and_of_text(tmp_path: Path) -> None:
    table([0, 2, 1], datasets.Value("int64")).save_to_disk(tmp_path / "numbers")
    images = load(tmp_path / "numbers", val="train")
    assert images.classes == ("0", "1", "2")
    assert labels_of(images) == [0, 2, 1]
    table(["eel", "cat", "dog", "cat"], datasets.Value("string"), [2, 0, 1, 0]).save_to_disk(tmp_path / "text")
    images = load(tmp_path / "text", val="train")
    assert images.classes == ("cat", "dog", "eel")
    assert labels_of(images) == [2, 0, 1, 0]


def test_k5_validation_is_read_with_the_training_map(tmp_path: Path) -> None:
    data = {"train": table([0, 1, 2], names("a", "b", "c")), "validation": table([0, 1], names("c", "a"), [2, 0])}
    datasets.DatasetDict(data).save_to_disk(tmp_path / "other_order")
    assert labels_of(load(tmp_path / "other_order"), "test") == [2, 0]
    data["validation"] = table([0], names("d"))
    datasets.DatasetDict(data).save_to_disk(tmp_path / "unknown")
    with pytest.raises(ValueError, match=r"unknown\[validation\]: class 'd' is not among the training classes a, b, c"):
        load(tmp_path / "unknown")


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    hidden = table([0, 1, 0], names("a", "b"))
    hidden = hidden.map(lambda row, index: {"label": -1 if index == 1 else row["label"]}, with_indices=True)
    datasets.DatasetDict({"train": table([0, 1], names("a", "b")), "validation": hidden}).save_to_disk(
        tmp_path / "hidden"
    )
    with pytest.raises(ValueError, match=r"label -1 of .*hidden\[validation\]\[1\] must lie in 0..1"):
        load(tmp_path / "hidden")
    data = {"train": table([0, 1], datasets.Value("int64")), "validation": table([2], datasets.Value("int64"))}
    datasets.DatasetDict(data).save_to_disk(tmp_path / "more")
    with pytest.raises(ValueError, match=r"label 2 of .*more\[validation\]\[0\] must lie in 0..1"):
        load(tmp_path / "more")


def test_missing_labels_are_counted(tmp_path: Path) -> None:
    table([0, None, 1], names("a", "b"), [0, 1, 1]).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=r"column 'label': 1 of 3 examples have no label"):
        load(tmp_path / "set", val="train")


def test_columns_are_found_or_asked_for(tmp_path: Path) -> None:
    more = {
        "mask": ([Image.new("L", (3, 3))] * 2, datasets.Image()),
        "coarse": ([1, 0], names("x", "y")),
        "caption": (["p", "q"], datasets.Value("string")),
        "score": ([0.5, 0.7], datasets.Value("float32")),
    }
    table([0, 1], names("a", "b"), **more).save_to_disk(tmp_path / "set")
    with pytest.raises(
        ValueError, match=r"data.label_key: must be named, since 2 columns may be meant; .*coarse \(ClassLabel"
    ):
        load(tmp_path / "set", val="train")
    with pytest.raises(
        ValueError, match=r"data.image_key: must be named, since 2 columns may be meant; there are image \("
    ):
        load(tmp_path / "set", val="train", label_key="label")
    with pytest.raises(ValueError, match=r"data.image_key = 'img': no such column of images; there are image \("):
        load(tmp_path / "set", val="train", label_key="label", image_key="img")
    with pytest.raises(ValueError, match=r"data.label_key = 'score': no such column of labels"):
        load(tmp_path / "set", val="train", label_key="score")
    assert labels_of(load(tmp_path / "set", val="train", label_key="label", image_key="image")) == [0, 1]
    assert load(tmp_path / "set", val="train", label_key="coarse", image_key="image").classes == ("x", "y")
    assert load(tmp_path / "set", val="train", label_key="caption", image_key="image").classes == ("p", "q")


def test_no_column_of_labels(tmp_path: Path) -> None:
    table([0, 1], names("a", "b")).remove_columns("label").save_to_disk(tmp_path / "set")
    with pytest.raises(
        ValueError, match=r"data.label_key: must be named, since 0 columns may be meant; there are image"
    ):
        load(tmp_path / "set", val="train")


def test_what_cannot_be_read_is_said(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved', split 'tset': there is no such split; there are train, validation"):
        load(saved, val="tset")
    with pytest.raises(ValueError, match=r"split 'train': what save_to_disk made has no subset"):
        load(saved, subset="x")
    with pytest.raises(ValueError, match=re.escape(f"data.path = {str(tmp_path / 'no')!r}, split 'train': ")):
        load(tmp_path / "no")


def test_damaged_images_are_named_and_other_modes_are_read(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(np.full((4, 5), 30_000, dtype=np.uint16)).save(tmp_path / "deep.png")
    files = [str(tmp_path / "text.png"), str(tmp_path / "deep.png")]
    features = datasets.Features({"image": datasets.Image(), "label": names("a", "b")})
    datasets.Dataset.from_dict({"image": files, "label": [0, 1]}, features=features).save_to_disk(tmp_path / "set")
    images = load(tmp_path / "set", val="train", mean=[0, 0, 0], std=[1, 1, 1])
    with pytest.raises(DamagedExample, match=r"set\[train\]\[0\]: no readable image \("):
        images.train[0]
    assert (images.test[1][0] * 65535 - 30_000).abs().max() < 257


def test_the_package_may_be_missing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"data.name = 'hub' needs the package `datasets`: pip install 'relpos2d\[hub\]'"
    ):
        load(saved)
