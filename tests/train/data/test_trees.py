"""Trees: the scenes are cut into tiles by the rule that is told, and are what we counted."""

import hashlib
import io
import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from train.data import DATA, Trees, fetch, trees
from train.schema import validate

SMALL = {"2019_YELL_2_528000": (70, 50), "2019_YELL_2_541000": (33, 64), "OSBS_029": (20, 20), "SOAP_061": (20, 20)}


def boxes_of(scene: str) -> np.ndarray:
    width, height = SMALL[scene]
    rng = np.random.default_rng(len(scene) + width)
    start = rng.integers(0, [width - 8, height - 8], (12, 2))
    return np.concatenate([start, start + rng.integers(3, 9, (12, 2))], axis=1)


def voc(boxes: np.ndarray) -> bytes:
    objects = [
        "<object><name>Tree</name><bndbox>"
        + "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
        + "</bndbox></object>"
        for corners in boxes.tolist()
    ]
    return f"<annotation><size><width>9</width></size>{''.join(objects)}</annotation>".encode()


def picture(scene: str) -> np.ndarray:
    width, height = SMALL[scene]
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, x * 0 + len(scene)], axis=2).astype(np.uint8)


def members() -> dict[str, bytes]:
    found = {}
    for scene, file in fetch.TREES_FILES.items():
        content = io.BytesIO()
        Image.fromarray(picture(scene)).save(content, "png")
        found |= {f"{file}.png": content.getvalue(), f"{file}.xml": voc(boxes_of(scene))}
    return found


@pytest.fixture
def small_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A wheel of the same layout with scenes of our own; what pip is asked for."""
    calls: list[str] = []

    def download(package: str, folder: Path) -> Path:
        calls.append(package)
        with zipfile.ZipFile(folder / "deepforest.whl", "w") as wheel:
            for name, content in members().items():
                wheel.writestr(f"deepforest/data/{name}", content)
        return folder / "deepforest.whl"

    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "pip_download", download)
    archive = {f"{s}{end}": members()[f"{f}{end}"] for s, f in fetch.TREES_FILES.items() for end in (".png", ".xml")}
    monkeypatch.setattr(fetch, "TREES_SHA256", hashlib.sha256(fetch.packed(archive)).hexdigest())
    monkeypatch.setattr(trees, "COUNTS", {scene: (12, *size) for scene, size in SMALL.items()})
    return calls


def options(**given: Any) -> Trees:
    return Trees.model_validate_json(json.dumps({"name": "trees", "tile": 32, "stride": 24, **given}))


def test_tiles_hold_the_boxes_that_lie_in_them_by_half(small_scenes: list[str], tmp_path: Path) -> None:
    data = options().load(seed=0)
    assert small_scenes == ["deepforest==2.1.0"]
    assert (data.classes, data.category_ids) == (("Tree",), (1,))
    expected: dict[str, tuple[list[list[int]], list[list[int]]]] = {}
    for scene, (width, height) in SMALL.items():
        for y in [y for y in range(0, 100, 24) if y == 0 or y + 32 <= height]:
            for x in [x for x in range(0, 100, 24) if x == 0 or x + 32 <= width]:
                found, parts = [], []
                for x1, y1, x2, y2 in boxes_of(scene).tolist():
                    right, bottom = min(x + 32, width), min(y + 32, height)
                    cut = [max(x1, x) - x, max(y1, y) - y, min(x2, right) - x, min(y2, bottom) - y]
                    if cut[2] <= cut[0] or cut[3] <= cut[1]:
                        continue
                    inside = (cut[2] - cut[0]) * (cut[3] - cut[1])
                    (found if 2 * inside >= (x2 - x1) * (y2 - y1) else parts).append(cut)
                if found:
                    expected[f"{scene}-{y:04}-{x:04}.png"] = found, parts
    train = [name for name in expected if name.startswith("2019_YELL_2_528000")]
    assert [Path(data.train.name_of(index)).name for index in range(len(data.train))] == train
    assert [entry["file_name"] for entry in data.truth["images"]] == [n for n in expected if n not in train]
    for index, name in enumerate(train):
        assert data.train.objects.starts[index + 1] - data.train.objects.starts[index] == len(expected[name][0])
    for index, entry in enumerate(data.truth["images"]):
        found, parts = expected[entry["file_name"]]
        assert entry["file_name"].startswith(entry["scene"] + "-")
        pixels, target = data.test[index]
        assert target["boxes"].tolist() == found
        own = [a for a in data.truth["annotations"] if a["image_id"] == entry["id"]]
        assert [a["iscrowd"] for a in own] == [0] * len(found) + [1] * len(parts)
        y, x = map(int, re.findall(r"-(\d{4})", entry["file_name"]))
        assert np.array_equal(
            (pixels.permute(1, 2, 0) * 255).round().numpy(), picture(entry["scene"])[y : y + 32, x : x + 32]
        )
    assert any(parts for _, parts in expected.values())
    assert sum(len(found) for found, _ in expected.values()) == len(data.train.objects.labels) + len(
        data.test.objects.labels
    )


def test_scenes_are_chosen_and_cut_once(small_scenes: list[str], tmp_path: Path) -> None:
    data = options(train="OSBS_029", test=["SOAP_061", "2019_YELL_2_541000"]).load(seed=0)
    assert {entry["scene"] for entry in data.truth["images"]} == {"2019_YELL_2_541000", "SOAP_061"}
    assert len(data.train) == 1  # smaller than a tile: whole
    assert data.train.objects.sizes.tolist() == [[20, 20]]
    again = options(train="OSBS_029", test=["2019_YELL_2_541000", "SOAP_061"]).load(seed=1)
    assert again.truth == data.truth
    assert len(small_scenes) == 1
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == [
        "trees-1-32-24-2019_YELL_2_541000+SOAP_061",
        "trees-1-32-24-OSBS_029",
        "trees-deepforest-2.1.0.tar",
    ]


def test_whole_scenes(small_scenes: list[str]) -> None:
    data = options(tile=5000, stride=5000).load(seed=0)
    assert (len(data.train), len(data.test)) == (1, 3)
    assert data.train.objects.boxes.astype(int).tolist() == boxes_of("2019_YELL_2_528000").tolist()
    assert not any(a["iscrowd"] for a in data.truth["annotations"])


def test_scenes_that_are_not_what_we_counted(small_scenes: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(trees.COUNTS, "OSBS_029", (61, 400, 400))
    with pytest.raises(
        ValueError, match="OSBS_029 has 12 boxes in 20 x 20 pixels, expected 61 boxes in 400 x 400 pixels"
    ):
        options(train="OSBS_029").load(seed=0)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["trees-deepforest-2.1.0.tar"]  # nothing half-cut
    monkeypatch.setattr(fetch, "TREES_SHA256", "0")
    with pytest.raises(ValueError, match=r"fetch_trees: .*trees-deepforest-2.1.0.tar has sha256 .*Delete it to fetch"):
        options(train="OSBS_029").load(seed=0)


def test_a_wheel_that_is_another_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))

    def other(package: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "deepforest.whl", "w") as wheel:
            wheel.writestr("deepforest/__init__.py", "")
        return folder / "deepforest.whl"

    def half(package: str, folder: Path) -> Path:
        (folder / "deepforest.whl").write_bytes(b"PK half a wheel")
        return folder / "deepforest.whl"

    for download, message in ((other, r"deepforest.whl lacks a file .*is it deepforest==2.1.0"), (half, "is damaged")):
        monkeypatch.setattr(fetch, "pip_download", download)
        with pytest.raises(ValueError, match=f"fetch_trees: .*{message}"):
            fetch.fetch_trees()
    monkeypatch.undo()
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(
        fetch.FetchError, match=r"could not fetch deepforest==2.1.0 with pip .*data=coco data.path=FOLDER"
    ):
        fetch.fetch_trees()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": "OSBS_29"}, "train = 'OSBS_29': must be .*'OSBS_029'"),
        ({"test": ["OSBS_29"]}, "there is no scene 'OSBS_29'; allowed: 2019_YELL_2_528000, .*OSBS_029"),
        ({"test": ["2019_YELL_2_528000"]}, "2019_YELL_2_528000 is trained on"),
        ({"test": ["OSBS_029", "OSBS_029"]}, "is there again"),
        ({"test": []}, "test = "),
        ({"stride": 300}, "stride = 300: must be at most tile = 256"),
        ({"tile": 0}, "tile = 0"),
    ],
)
def test_wrong_options(given: dict[str, Any], message: str) -> None:
    node, problems = validate(DATA["trees"], {"name": "trees", **given})
    assert node is None
    assert re.search(message, problems[0]), problems


@pytest.mark.skipif(not (fetch.cache_folder() / "trees-deepforest-2.1.0.tar").is_file(), reason="needs the real scenes")
def test_the_real_scenes() -> None:
    counts = []
    with tarfile.open(fetch.fetch_trees()) as files:
        for scene, (num_boxes, width, height) in trees.COUNTS.items():
            boxes = trees.voc_boxes(files.extractfile(f"{scene}.xml").read())  # type: ignore[union-attr]
            assert len(boxes) == num_boxes
            ground = np.broadcast_to(np.uint8(0), (height, width, 3))
            counts.append([len(found) for *_, found, _ in trees.tiles_of(ground, boxes, 256, 192)])
    assert list(map(len, counts)) == [116, 30, 1, 1]
    assert sum(map(len, counts)) == 148
    assert sum(map(sum, counts)) == 1303
