"""What timm's create_dataset reads, as exact as our own kinds."""

import io
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.data import TimmData
from train.data.images import Images
from train.data.stream import DamagedExample
from train.data.timm_sets import names_of
from train.schema import validate

COLOURS = {"a": (200, 30, 30), "b": (30, 200, 30), "c": (30, 30, 200)}


def load(root: Path | None, dataset: str = "", **options: object) -> Images:
    given = {"name": "timm", "dataset": dataset, "root": root and str(root), "image_size": 8}
    node, problems = validate(TimmData, given | options)
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


@pytest.mark.parametrize("dataset", ["", "folder", "torch/image_folder"])
def test_k5_folders_are_read_with_the_training_map(dataset: str, image_folders: Path) -> None:
    images = load(image_folders, dataset)
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0] * 4 + [1] * 4 + [2] * 4
    assert labels_of(images, "test") == [0] * 4 + [2] * 4
    (image_folders / "val" / "c").rename(image_folders / "val" / "cc")
    with pytest.raises(
        ValueError, match=r"data.val = 'validation': class 'cc' is not among the training classes a, b, c"
    ):
        load(image_folders, dataset)


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_k6_hidden_folders_are_no_classes(dataset: str, image_folders: Path) -> None:
    for split in ("train", "val"):
        (image_folders / split / ".ipynb_checkpoints").mkdir()
        Image.new("RGB", (4, 4)).save(image_folders / split / ".ipynb_checkpoints" / "a.png")
    images = load(image_folders, dataset)
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0] * 4 + [1] * 4 + [2] * 4
    assert labels_of(images, "test") == [0] * 4 + [2] * 4


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_a_missing_split_is_not_the_whole_root(dataset: str, image_folders: Path) -> None:
    with pytest.raises(ValueError, match=r"split 'test': there is no such folder in it, and timm would read all"):
        load(image_folders, dataset, val="test")
    with pytest.raises(ValueError, match=r"split 'train': there is no such folder in it"):
        load(image_folders / "train", dataset)


def write_tar(path: Path, classes: str) -> None:
    with tarfile.open(path, "w") as tar:
        for name in classes:
            for number in range(2):
                content = io.BytesIO()
                Image.new("RGB", (30, 20), COLOURS[name]).save(content, "png")
                info = tarfile.TarInfo(f"{name}/{number}.png")
                info.size = len(content.getvalue())
                tar.addfile(info, io.BytesIO(content.getvalue()))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm leaves tars open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tars_of_images(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", "abc")
    write_tar(tmp_path / "val.tar", "ca")
    images = load(tmp_path, "image_tar", train="train.tar", val="val.tar")
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0, 0, 1, 1, 2, 2]
    assert sorted(labels_of(images, "test")) == [0, 0, 2, 2]


def write_mnist(root: Path) -> None:
    """Two training images and one test image in MNIST's format."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for prefix, labels in (("train", [3, 9]), ("t10k", [9])):
        pixels = np.stack([np.full((28, 28), 20 * label) for label in labels]).astype(np.uint8)
        head = struct.pack(">IIII", 0x803, len(labels), 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(labels)) + bytes(labels))


def test_torch_data_sets_and_grey_images(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    images = load(tmp_path, "torch/mnist", mean=[0, 0, 0], std=[1, 1, 1])
    assert len(images.classes) == 10
    assert images.classes[9] == "9 - nine"
    assert [images.train[i][1] for i in range(2)] == [3, 9]
    image, label = images.test[0]
    assert label == 9
    assert (image * 255 - 180).abs().max() < 0.01
    assert load(tmp_path, "torch/mnist", classes=list("0123456789")).classes[9] == "9"
    assert load(tmp_path, "torch/mnist", num_classes=12).classes[9:] == ("9 - nine", "10", "11")
    with pytest.raises(
        ValueError, match=r"torch/mnist\[train\]: label 3 of torch/mnist\[train\]\[0\] must lie in 0..2"
    ):
        load(tmp_path, "torch/mnist", classes=["a", "b", "c"])


def test_names_that_two_classes_share_are_told_apart() -> None:
    class Birds:
        classes = (("crane", "bird"), ("crane",), ("crane",))

    assert names_of(Birds()) == ["crane, bird", "crane (1)", "crane (2)"]


def test_hub_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    for split, labels in (("train", [0, 1, 2]), ("validation", [2])):
        columns = {"image": [Image.new("RGB", (9, 8), COLOURS["abc"[i]]) for i in labels], "label": labels}
        file = tmp_path / "set" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_dict(columns, features=features).to_parquet(file)
    images = load(tmp_path / "cache", f"hfds/{tmp_path / 'set'}")
    assert images.classes == ("a", "b", "c")
    assert labels_of(images) == [0, 1, 2]
    assert labels_of(images, "test") == [2]


def test_a_class_map_of_timm(image_folders: Path) -> None:
    (image_folders / "map.txt").write_text("c\na\n")
    images = load(image_folders, class_map=str(image_folders / "map.txt"))
    assert images.classes == ("c", "a")
    assert len(images.train) == 8  # type: ignore[arg-type]
    assert images.train[0][1] == 1  # an image of class a


def test_damaged_images_are_named(image_folders: Path) -> None:
    for dataset in ("", "torch/image_folder"):
        (image_folders / "train" / "b" / "1.png").write_bytes(b"no image")
        images = load(image_folders, dataset)
        with pytest.raises(DamagedExample, match=r"\[train\]\[5\].*: no readable image \("):
            images.train[5]
        assert images.train[6][1] == 1
    with pytest.raises(DamagedExample, match=re.escape(str(image_folders / "train" / "b" / "1.png"))):
        load(image_folders).train[5]


def test_images_are_decoded_as_ours(image_folders: Path) -> None:
    """timm and torchvision would clip 16 bits at 255 and show what is transparent."""
    Image.fromarray(np.full((20, 20), 30_000, dtype=np.uint16)).save(image_folders / "train" / "a" / "0.png")
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(image_folders / "train" / "a" / "1.png")
    for dataset in ("", "torch/image_folder"):
        data = load(image_folders, dataset, mean=[0, 0, 0], std=[1, 1, 1]).train
        assert (data[0][0] * 65535 - 30_000).abs().max() < 257
        assert data[1][0].min() == 1


WRONG = {
    "stream wds": ({"dataset": "wds/train"}, "cannot be continued at the same example; data=image_shards reads such data"),
    "stream tfds": ({"dataset": "TFDS/cifar10"}, "dataset = 'TFDS/cifar10': timm reads tfds/ as a stream"),
    "stream hfids": ({"dataset": "hfids/mnist"}, "timm reads hfids/ as a stream"),
    "download of a folder": ({"dataset": "", "download": True}, "download = true: is for torch/ only, and dataset = ''"),
    "class map of torch": ({"dataset": "torch/mnist", "class_map": "m.txt"}, "class_map = 'm.txt': timm takes none for"),
    "classes twice": ({"dataset": "torch/mnist", "classes": ["a"], "num_classes": 1}, "num_classes = 1: follows from classes"),
    "repeated name": ({"dataset": "torch/mnist", "classes": ["a", "b", "a"]}, "classes: each name must be there once, and a is"),
    "no root": ({"dataset": "torch/mnist", "root": None}, "root: missing; dataset = 'torch/mnist' needs a folder"),
    "no data set": ({}, "dataset: missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str) -> None:
    given, text = WRONG[case]
    node, problems = validate(TimmData, {"name": "timm", "root": "data", **given})
    assert node is None
    assert text in "\n".join(problems)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ("torch/cifa10", r"data.dataset = 'torch/cifa10', root .*, split 'train': Unknown torchvision dataset cifa10"),
        ("torch/mnist", r"split 'train': Dataset not found. You can use download=True"),
        ("", r"split 'train': Found 0 images in subfolders"),
    ],
)
def test_what_timm_says_is_one_error(dataset: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=text):
        load(tmp_path, dataset)


@pytest.mark.parametrize("dataset", ["", "folder", "torch/image_folder"])
def test_a_missing_root_is_named(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.root = '.*nowhere': no such folder or tar"):
        load(tmp_path / "nowhere", dataset)
