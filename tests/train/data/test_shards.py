"""Tar shards: found, indexed once, read exactly."""

import io
import json
import os
import pickle
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from train.data import shards
from train.data.images import Images
from train.data.shards import ImageShards, expand_braces, find_shards
from train.data.stream import DamagedExample, Drawn
from train.schema import validate

COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def image_bytes(label: int, suffix: str = "png") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (30, 20), COLOURS[label]).save(content, suffix)
    return content.getvalue()


def write_tar(path: Path, contents: Mapping[str, bytes], **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:  # type: ignore[arg-type]
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def example(name: str, label: int, written: str | None = None) -> dict[str, bytes]:
    return {f"{name}.png": image_bytes(label), f"{name}.cls": (written or str(label)).encode()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards with 3 + 2 examples and one for validation with 2."""
    write_tar(tmp_path / "train-00.tar", example("a", 0) | example("b", 1) | example("c", 2))
    write_tar(tmp_path / "train-01.tar", example("a", 2) | example("x/b", 0))
    write_tar(tmp_path / "val-0.tar", example("v", 2) | example("w", 0))
    return tmp_path


def load(folder: Path, **options: object) -> Images:
    given = {
        "name": "image_shards",
        "path": str(folder),
        "train": "train-{00..01}.tar",
        "val": "val-*.tar",
        "image_size": 8,
    }
    node, problems = validate(ImageShards, given | options)
    assert node is not None, problems
    return node.load(seed=0)


def labels_of(images: Images, split: str = "train") -> list[int]:
    data = getattr(images, split)
    found = []
    for index in range(len(data)):
        image, label = data[index]
        assert image.mean(dim=(1, 2)).argmax() == label, "an image of another example"
        found.append(label)
    return found


def test_every_example_is_read_with_its_label(folder: Path) -> None:
    images = load(folder)
    assert images.classes == ("0", "1", "2")
    assert labels_of(images) == [0, 1, 2, 2, 0]
    assert labels_of(images, "test") == [2, 0]
    assert images.train[3][0].shape == (3, 8, 8)


def test_any_order_and_any_worker_reads_the_same(folder: Path) -> None:
    data = Drawn(load(folder).train, seed=1)
    draws = [[(0, 4), (0, 1)], [(1, 0), (1, 3)], [(1, 2), (2, 2)]]
    alone = [[image for (image, _), _ in batch] for batch in DataLoader(data, batch_sampler=draws, collate_fn=list)]
    forked = DataLoader(data, batch_sampler=draws, collate_fn=list, num_workers=2, multiprocessing_context="fork")
    copied = DataLoader(
        pickle.loads(pickle.dumps(data)), batch_sampler=draws, collate_fn=list
    )  # as spawned workers get it
    for loader in (forked, copied):
        for batch, expected in zip(loader, alone, strict=True):
            for ((image, _), _), wanted in zip(batch, expected, strict=True):
                assert torch.equal(image, wanted)


def test_headers_are_read_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = labels_of(load(folder))
    scan = shards.scan
    scanned: list[str] = []
    monkeypatch.setattr(shards, "scan", lambda paths, key: scanned.extend(p.name for p in paths) or scan(paths, key))
    assert labels_of(load(folder)) == expected
    monkeypatch.chdir(folder)
    assert labels_of(load(Path("."))) == expected  # the same shards by another path
    assert scanned == []

    write_tar(folder / "train-01.tar", example("a", 1))
    assert labels_of(load(folder)) == [0, 1, 2, 1]
    assert scanned == ["train-00.tar", "train-01.tar"]
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:100])  # a damaged cache is no obstacle
    assert labels_of(load(folder)) == [0, 1, 2, 1]


def test_a_cache_that_cannot_be_written_is_no_obstacle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("RELPOS2D_DATA", str(folder / "file"))
    assert labels_of(load(folder)) == [0, 1, 2, 2, 0]


def test_contents_of_images_are_passed_over(tmp_path: Path) -> None:
    large = {f"{i}.png": bytes(3_000_000) for i in range(5)} | {f"{i}.cls": b"0" for i in range(5)}
    path = write_tar(tmp_path / "train-0.tar", large)
    with path.open("rb") as file:
        before = os.stat(file.fileno()).st_size
    read = []

    class Counting(io.FileIO):
        def readinto(self, buffer: object) -> int:
            count = super().readinto(buffer)  # type: ignore[arg-type]
            read.append(count)
            return count

        def read(self, size: int = -1) -> bytes:
            content = super().read(size)
            read.append(len(content or b""))
            return content  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tarfile, "bltn_open", lambda name, mode: Counting(name, "r"))
        assert len(shards.scan([path], None)) == 5
    assert sum(read) < before / 100


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_and_long_names(tar_format: int, tmp_path: Path) -> None:
    name = "deep/" * 15 + "n" * 70 + "é"
    write_tar(tmp_path / "train-0.tar", example("./" + name, 1), format=tar_format)
    images = load(tmp_path, train="train-0.tar", val="train-0.tar", classes=["a", "b"])
    assert labels_of(images) == [1]


def test_labels_by_name_and_in_json(tmp_path: Path) -> None:
    for number, (name, label) in enumerate({"cat": 0, "dog": 1, "eel": 2}.items()):
        content = {f"{i}.json": json.dumps({"animal": name, "id": label}).encode() for i in range(2)}
        content |= {f"{i}.png": image_bytes(label) for i in range(2)}
        write_tar(tmp_path / f"train-{number}.tar", content)
    write_tar(tmp_path / "val-0.tar", {"0.png": image_bytes(2), "0.json": b'{"animal": "eel", "id": 2}'})
    images = load(tmp_path, train="train-*.tar", label_key="animal")
    assert images.classes == ("cat", "dog", "eel")
    assert labels_of(images) == [0, 0, 1, 1, 2, 2]
    assert labels_of(images, "test") == [2]
    images = load(tmp_path, train="train-{0..2}.tar", label_key="id", classes=["cat", "dog", "eel", "fox"])
    assert images.classes == ("cat", "dog", "eel", "fox")
    assert labels_of(images) == [0, 0, 1, 1, 2, 2]


def test_k5_validation_is_read_with_the_training_map(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", example("a", 0, "ant") | example("b", 1, "bee") | example("c", 2, "cat"))
    write_tar(tmp_path / "val-0.tar", example("c", 2, "cat\n"))
    assert labels_of(load(tmp_path, train="train-*.tar"), "test") == [2]
    write_tar(tmp_path / "val-0.tar", example("c", 2, "bat"))
    with pytest.raises(
        ValueError, match=r"val-\*.tar: class 'bat' is not among the training classes ant, bee, cat; did you mean cat\?"
    ):
        load(tmp_path, train="train-*.tar")


def test_classes_from_a_file(folder: Path) -> None:
    (folder / "classes.txt").write_text("red\ngreen\nblue\n\n")
    assert load(folder, classes="classes.txt").classes == ("red", "green", "blue")
    (folder / "classes.txt").write_text("red\nred\nblue\n")
    with pytest.raises(ValueError, match=r"classes.txt: each name must be there once, and red is there again"):
        load(folder, classes="classes.txt")
    with pytest.raises(ValueError, match=r"data.classes: .*missing.txt must be a text file"):
        load(folder, classes="missing.txt")


def test_labels_out_of_range_are_named(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"label 2 of .*train-00.tar/c must lie in 0..1, the classes there are \(2 of 5"
    ):
        load(folder, classes=["red", "green"])
    write_tar(folder / "val-0.tar", example("v", 2) | example("w", 0, "3"))
    with pytest.raises(ValueError, match=r"val-\*.tar: label 3 of .*val-0.tar/w must lie in 0..2"):
        load(folder)
    write_tar(folder / "val-0.tar", example("v", 2, "-1"))
    with pytest.raises(ValueError, match=r"label -1 of .*val-0.tar/v must lie in 0..2"):
        load(folder)


WRONG_SHARDS = {
    "no label": ({"a.png": b"x"}, "train-9.tar/a: an image without a label; a.cls is missing"),
    "label of another": ({"a.png": b"x", "b.cls": b"0"}, "train-9.tar/a: an image without a label"),
    "second label": ({"a.png": b"x", "a.fine.cls": b"0"}, "train-9.tar/a: an image without a label"),
    "two images": ({"a.png": b"x", "a.jpg": b"x", "a.cls": b"0"}, "train-9.tar/a: two images; an example has one (the second"),
    "no image": ({"a.txt": b"x", "a.cls": b"0"}, "no image in 1 shards"),
    "empty label": ({"a.png": b"x", "a.cls": b" \n"}, "train-9.tar/a.cls: the label '' must be the number or the name"),
    "label of bytes": ({"a.png": b"x", "a.cls": b"\xff\xfe"}, "train-9.tar/a.cls: no label; a number or name as UTF-8 is wanted"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SHARDS)
def test_wrong_shards_are_named(case: str, folder: Path) -> None:
    contents, text = WRONG_SHARDS[case]
    write_tar(folder / "train-9.tar", contents)
    with pytest.raises(ValueError, match=re.escape(text)):
        load(folder, train="train-9.tar")


@pytest.mark.parametrize(
    "content", [b"[1]", b"{}", b"nothing", b'{"y": [1]}', b'{"y": true}', b'{"y": 1.5}', b'{"y": null}']
)
def test_json_without_a_label_is_named(content: bytes, folder: Path) -> None:
    write_tar(folder / "train-9.tar", {"a.png": b"x", "a.json": content})
    with pytest.raises(
        ValueError, match=r"train-9.tar/a.json: (no label; JSON with the key 'y' is wanted|the label .* must be)"
    ):
        load(folder, train="train-9.tar", label_key="y")


HEADER = 512 * (1 + -(-len(image_bytes(0)) // 512))  # where the second member begins
CUT_SHARDS = {
    "in an image": lambda whole: whole[: 512 + 20],
    "between two members": lambda whole: whole[:HEADER],
    "in a header": lambda whole: whole[: HEADER + 100],
    "in the end mark": lambda whole: whole[:HEADER] + bytes(100),
    "damaged header": lambda whole: whole[:HEADER] + b"rubbish." * 64 + whole[HEADER + 512 :],
    "no tar": lambda _: b"no tar" * 500,
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("case", CUT_SHARDS)
def test_files_that_are_no_whole_tars_are_named(case: str, folder: Path) -> None:
    path = folder / "train-00.tar"
    path.write_bytes(CUT_SHARDS[case](path.read_bytes()))
    with pytest.raises(ValueError, match=r"train-00.tar: no whole, uncompressed tar \("):
        load(folder)


def test_compressed_shards_are_refused(folder: Path) -> None:
    with tarfile.open(folder / "train-8.tar", "w:gz") as tar:
        tar.add(folder / "val-0.tar")
    with pytest.raises(ValueError, match=r"train-8.tar: no whole, uncompressed tar"):
        load(folder, train="train-8.tar")


def test_a_damaged_image_is_named(folder: Path) -> None:
    write_tar(folder / "train-01.tar", example("a", 0) | {"x/b.png": b"no image", "x/b.cls": b"0"})
    images = load(folder)
    with pytest.raises(DamagedExample, match=r"train-01.tar/x/b: no readable image \("):
        images.train[4]
    os.truncate(folder / "train-01.tar", 540)
    with pytest.raises(DamagedExample, match=r"train-01.tar/a: no readable image \(.*train-01.tar ends too early\)"):
        images.train[3]
    (folder / "train-01.tar").unlink()
    with pytest.raises(DamagedExample, match=r"train-01.tar/a: no readable image \(.*No such file"):
        images.train[3]
    assert images.train[0][1] == 0


def test_patterns(folder: Path) -> None:
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{x,y}-{0..1}") == ["x-0", "x-1", "y-0", "y-1"]
    assert expand_braces("plain.tar") == ["plain.tar"]
    assert [path.name for path in find_shards("train-*.tar", str(folder))] == ["train-00.tar", "train-01.tar"]
    assert find_shards(str(folder / "val-?.tar"), None) == [folder / "val-0.tar"]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("train-{00..02}.tar", "'train-{00..02}.tar': no shard 'train-02.tar' in "),
        ("test-*.tar", "'test-*.tar': no shard 'test-*.tar' in "),
        ("train-{02..00}.tar", "the range {02..00} must ascend"),
        ("train-{00}.tar", "{00} must be a range as {000..127} or a list as {a,b}"),
    ],
)
def test_wrong_patterns(pattern: str, text: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        find_shards(pattern, str(folder))


def test_folders_with_signs_of_patterns(tmp_path: Path) -> None:
    write_tar(tmp_path / "data[1]{x}" / "train-0.tar", example("a", 0))
    assert len(find_shards("train-*.tar", str(tmp_path / "data[1]{x}"))) == 1
    assert np.array_equal(labels_of(load(tmp_path / "data[1]{x}", train="*.tar", val="*.tar")), [0])
