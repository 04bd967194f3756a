"""python -m train.detect_images: what is found in files, whole or in tiles, as COCO json and pictures."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

from train import detect_images as module
from train.coco_scores import score
from train.detect_images import main

RED, BLUE = (255, 0, 0), (0, 0, 255)
CATEGORIES = ("r", 7)  # the ids of labels 1 and 2
Box = tuple[int, int, int, int]  # x, y, width, height


class ByColour(nn.Module):
    """Finds red (label 1) and blue (label 2) rectangles, each by the share of its area that it has seen of 1600 pixels."""

    def __init__(self, has_masks: bool = False):
        super().__init__()
        self.has_masks, self.score_thresh, self.detections_per_img = has_masks, 0.05, 3
        self.weight = nn.Parameter(torch.zeros(1))
        self.batches: list[list[tuple[int, ...]]] = []

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        assert not self.training
        self.batches.append([tuple(image.shape[1:]) for image in images])
        return [self.found(image) for image in images]

    def found(self, image: Tensor) -> dict[str, Tensor]:
        assert image.dtype == torch.float32
        assert 0 <= image.min() <= image.max() <= 1
        boxes, labels, scores, masks = [], [], [], []
        for label, channel in ((1, 0), (2, 2)):
            seen = (image[channel] > 0.9) & (image.sum(dim=0) < 1.1)
            for area in rectangles(seen):
                rows, columns = area.any(dim=1).nonzero()[:, 0], area.any(dim=0).nonzero()[:, 0]
                boxes.append([int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1])
                labels.append(label)
                scores.append(min(0.99, area.sum().item() / 1600))
                masks.append(area[None] * 0.8)
        sure = [place for place, found in enumerate(scores) if found > self.score_thresh][: self.detections_per_img]
        output = {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)[sure],
            "labels": torch.tensor(labels, dtype=torch.int64)[sure],
            "scores": torch.tensor(scores, dtype=torch.float32)[sure],
        }
        if self.has_masks:
            output["masks"] = torch.stack(masks)[sure] if masks else torch.zeros(0, 1, *image.shape[1:])
        return output


def rectangles(seen: Tensor) -> list[Tensor]:
    """The connected areas of a mask of rectangles that do not touch."""
    areas = []
    left = seen.clone()
    while left.any():
        y, x = left.nonzero()[0].tolist()
        bottom = y + int(left[y:, x].long().cumprod(0).sum())
        right = x + int(left[y, x:].long().cumprod(0).sum())
        area = torch.zeros_like(left)
        area[y:bottom, x:right] = True
        areas.append(area)
        left &= ~area
    return areas


def painted(path: Path, size: tuple[int, int], *shapes: tuple[tuple[int, int, int], Box]) -> Path:
    """An image of `size` (width, height) with rectangles."""
    image = Image.new("RGB", size, (200, 200, 200))
    pen = ImageDraw.Draw(image)
    for colour, (x, y, w, h) in shapes:
        pen.rectangle((x, y, x + w - 1, y + h - 1), fill=colour)
    image.save(path)
    return path


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ByColour:
    """What any checkpoint is restored as, whether there is one or not."""
    return stand_in(monkeypatch, ByColour())


def stand_in(monkeypatch: pytest.MonkeyPatch, model: Any, task: str = "detect") -> Any:
    restored = SimpleNamespace(
        config=SimpleNamespace(task=task, data=SimpleNamespace(background=(0, 0, 255))),
        model=model.eval(),
        description=SimpleNamespace(classes=("rose", "sky"), category_ids=CATEGORIES),
        folder=Path("run"),
        checkpoint=Path("run/checkpoints/step_3"),
    )
    monkeypatch.setattr(module, "restore", lambda checkpoint, which: restored)
    return model


def found_in(folder: Path) -> tuple[list[tuple[str, Any, list[float]]], dict[str, Any]]:
    """What is in the two files: (name of the image, category, box) of each result, and the images and categories."""
    about = json.loads((folder / "images.json").read_text())
    names = {image["id"]: Path(image["file_name"]).name for image in about["images"]}
    results = json.loads((folder / "detections.json").read_text())
    return [(names[found["image_id"]], found["category_id"], found["bbox"]) for found in results], about


def test_what_is_written(model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    paths = [
        painted(photos / "a.png", (90, 70), (RED, (10, 20, 40, 30)), (RED, (60, 5, 20, 42)), (BLUE, (5, 60, 80, 10))),
        painted(photos / "b.png", (64, 64)),
        painted(tmp_path / "a.png", (50, 80), (BLUE, (0, 0, 50, 80))),
    ]
    output = tmp_path / "new" / "found"
    assert main(["run", str(photos), str(paths[2]), "--output", str(output), "--threshold", "0.4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"{paths[0]}: 2 rose, 1 sky (the model finds no more in an image; --tile N does)",
        f"{paths[1]}: nothing",
        f"{paths[2]}: 1 sky",
    ]
    found, about = found_in(output)
    assert found == [
        ("a.png", "r", [10.0, 20.0, 40.0, 30.0]),  # the surest first
        ("a.png", "r", [60.0, 5.0, 20.0, 42.0]),
        ("a.png", 7, [5.0, 60.0, 80.0, 10.0]),
        ("a.png", 7, [0.0, 0.0, 50.0, 80.0]),
    ]
    assert about["images"] == [
        {"id": number, "file_name": str(path), "height": height, "width": width}
        for number, (path, (width, height)) in enumerate(
            zip(paths, ((90, 70), (64, 64), (50, 80)), strict=True), start=1
        )
    ]
    assert about["categories"] == [{"id": "r", "name": "rose"}, {"id": 7, "name": "sky"}]
    assert sorted(path.name for path in output.iterdir()) == sorted(
        ["a.png", "b.png", "a_2.png", "detections.json", "images.json"]
    )
    for name in ("a.png", "b.png", "a_2.png"):
        with Image.open(output / name) as picture:
            assert picture.format == "PNG"
    assert model.score_thresh == 0.4
    assert model.batches == [[(70, 90)], [(64, 64)], [(80, 50)]]
    results = json.loads((output / "detections.json").read_text())
    assert set(score(about, results)["per_class"].values()) == {-1}  # they fit together


def test_thresholds_and_batches(model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, side in enumerate((10, 20, 30)):
        painted(tmp_path / f"{number}.png", (60, 50), (RED, (5, 5, side, side)))
    for threshold, expected in (("0", 3), ("0.0625", 2), ("0.3", 1), ("1", 0)):  # scores: 0.0625, 0.25, 0.5625
        output = tmp_path / f"at_{threshold}"
        options = ["--output", str(output), "--threshold", threshold, "--batch-size", "2", "--no-pictures"]
        files = [str(tmp_path / f"{number}.png") for number in range(3)]
        assert main(["run", *files, *options]) == 0
        assert len(found_in(output)[0]) == expected
        assert sorted(path.name for path in output.iterdir()) == ["detections.json", "images.json"]
        assert model.batches[-2:] == [[(50, 60)] * 2, [(50, 60)]]
    assert capsys.readouterr().out.count("nothing") == 0 + 1 + 2 + 3


def test_images_are_read_as_in_training(model: ByColour, tmp_path: Path) -> None:
    upright = Image.open(painted(tmp_path / "u.png", (80, 50), (RED, (10, 5, 40, 30))))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.close()
    clear = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    output = tmp_path / "out"
    files = [str(tmp_path / "turned.png"), str(tmp_path / "clear.png")]
    assert main(["run", *files, "--output", str(output), "--no-pictures"]) == 0
    found, about = found_in(output)
    assert found[0] == ("turned.png", "r", [10.0, 5.0, 40.0, 30.0])
    assert (about["images"][0]["height"], about["images"][0]["width"]) == (50, 80)
    assert found[1] == ("clear.png", 7, [0.0, 0.0, 40.0, 40.0])  # on the background of the data


def test_what_cannot_be_read_is_named_and_the_others_are_done(
    model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    painted(tmp_path / "good.png", (60, 60), (RED, (5, 5, 40, 40)))
    (tmp_path / "bad.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    files = [str(tmp_path / name) for name in ("bad.png", "empty", "absent.png", "good.png")]
    output = tmp_path / "out"
    assert main(["run", *files, "--output", str(output), "--batch-size", "3", "--no-pictures"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in told] == [files[1], files[0], files[2]]
    found, about = found_in(output)
    assert found == [("good.png", "r", [5.0, 5.0, 40.0, 40.0])]
    assert [image["id"] for image in about["images"]] == [1]
    assert main(["run", files[0], "--output", str(tmp_path / "none")]) == 1
    assert "error: no image could be read, so nothing is written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png", "empty", "good.png", "out"]


def test_a_name_that_is_no_text_can_be_told(
    model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = painted(tmp_path / os.fsdecode(b"\xff\n.png"), (60, 60), (RED, (5, 5, 40, 40)))
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/\ufffd\ufffd.png: 1 rose\n"
    about = json.loads((tmp_path / "out" / "images.json").read_text())
    assert about["images"][0]["file_name"] == str(path)
    assert (tmp_path / "out" / f"{path.stem}.png").is_file()


def test_nothing_is_written_over(model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = painted(tmp_path / "a.png", (60, 60))
    for taken in (tmp_path, path):
        assert main(["run", str(path), "--output", str(taken)]) == 1
        assert f"error: {taken}: is there already; give another --output" in capsys.readouterr().err
    assert model.batches == []
    (tmp_path / "free").mkdir()
    assert main(["run", str(path), "--output", str(tmp_path / "free")]) == 0


def test_masks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, ByColour(has_masks=True))
    path = painted(tmp_path / "a.png", (70, 60), (RED, (10, 12, 30, 40)))
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 0
    (result,) = json.loads((tmp_path / "out" / "detections.json").read_text())
    expected = np.zeros((60, 70), dtype=bool)
    expected[12:52, 10:40] = True
    assert result["segmentation"]["size"] == [60, 70]
    assert_same_mask(result["segmentation"], expected)


def assert_same_mask(segmentation: dict[str, Any], expected: np.ndarray) -> None:
    packed = coco_mask.encode(np.asfortranarray(expected.astype(np.uint8)))
    assert segmentation["size"] == list(expected.shape)
    assert segmentation["counts"] == packed["counts"].decode()


class Plain(nn.Module):
    """The smallest backbone that torchvision's detectors take."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Conv2d(3, 32, 8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"0": self.layers(x)}


def small_detector() -> FCOS:
    """Of random weights that make it find something; never the background, which training would see to."""
    detector = FCOS(
        Plain(),
        num_classes=3,
        min_size=64,
        max_size=96,
        anchor_generator=AnchorGenerator(((8,),), ((1.0,),)),
        score_thresh=0.05,
        detections_per_img=20,
    ).eval()
    for layer in (detector.head.classification_head.cls_logits, detector.head.regression_head.bbox_reg):
        nn.init.normal_(layer.weight, std=0.5)
    with torch.no_grad():
        detector.head.classification_head.cls_logits.bias[0] = -1e4
    return detector


def test_a_detector_of_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    detector = small_detector()
    path = painted(tmp_path / "a.png", (90, 70), (RED, (10, 20, 40, 30)))
    with Image.open(path) as image, torch.no_grad():
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
        (expected,) = detector([pixels])
    stand_in(monkeypatch, detector)
    lowest = sorted(expected["scores"].tolist())[len(expected["scores"]) // 2]
    options = ["--output", str(tmp_path / "out"), "--threshold", str(lowest), "--no-pictures"]
    assert main(["run", str(path), *options]) == 0
    results = json.loads((tmp_path / "out" / "detections.json").read_text())
    sure = expected["scores"] > lowest
    assert 0 < len(results) == int(sure.sum()) < len(sure)
    for result, box, label in zip(results, expected["boxes"][sure], expected["labels"][sure], strict=True):
        x1, y1, x2, y2 = box.tolist()
        assert result["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=2e-3)
        assert result["category_id"] == CATEGORIES[int(label) - 1]
    assert [result["score"] for result in results] == pytest.approx(expected["scores"][sure].tolist())


def test_models_that_are_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = painted(tmp_path / "a.png", (60, 60))
    for task, tool in (("classify", "predict"), ("speech_recognition", "transcribe"), ("language_modeling", "predict")):
        stand_in(monkeypatch, ByColour(), task)
        assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 1
        told = capsys.readouterr().err
        assert told == f"error: run is a run of {task}, which finds no boxes; use python -m train.{tool}\n"
    spoilt = stand_in(monkeypatch, ByColour())
    spoilt.weight.data.fill_(torch.nan)
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 1
    assert "run/checkpoints/step_3: holds weights that are not finite" in capsys.readouterr().err
    spoilt.weight.data.fill_(0)
    nowhere = {"boxes": torch.full((1, 4), torch.nan), "labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    monkeypatch.setattr(spoilt, "found", lambda image: nowhere)
    assert main(["run", str(path), "--output", str(tmp_path / "out")]) == 1
    assert "step_3: the model's outputs are not finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    monkeypatch.undo()
    assert main([str(tmp_path), str(path), "--output", str(tmp_path / "out")]) == 1
    assert "is no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "o"], "the following arguments are required: FILE"),
        (["a.png"], "the following arguments are required: --output"),
        (["a.png", "--threshold", "1.5"], "'1.5' must be a number in 0..1"),
        (["a.png", "--threshold", "-0.1"], "'-0.1' must be a number in 0..1"),
        (["a.png", "--threshold", "nan"], "'nan' must be a number in 0..1"),
        (["a.png", "--threshold", "half"], "'half' must be a number in 0..1"),
        (["a.png", "--tile", "0"], "'0' must be a whole number of pixels, at least 32"),
        (["a.png", "--tile", "31"], "'31' must be a whole number of pixels, at least 32"),
        (["a.png", "--tile", "64.5"], "'64.5' must be a whole number of pixels"),
        (["a.png", "--tile", "64", "--overlap", "1"], "'1' must be a number in 0..0.9"),
        (["a.png", "--tile", "64", "--overlap", "80"], "'80' must be a number in 0..0.9"),
        (["a.png", "--overlap", "0.5"], "--overlap needs --tile N"),
        (["a.png", "--merge", "nms"], "--merge needs --tile N"),
        (["a.png", "--tile", "64", "--merge", "wbf"], "invalid choice: 'wbf'"),
        (["a.png", "--batch-size", "0"], "'0' must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "required" not in message:
        arguments = [*arguments, "--output", "o"]
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_without_sahi(
    model: ByColour, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sahi"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sahi", None)
    path = painted(tmp_path / "a.png", (60, 60))
    assert main(["run", str(path), "--output", str(tmp_path / "out"), "--tile", "64"]) == 1
    assert "error: --tile needs the package `sahi`: pip install sahi" in capsys.readouterr().err
    assert model.batches == []
    assert not (tmp_path / "out").exists()


TILED: tuple[tuple[tuple[int, int, int], Box], ...] = (
    (RED, (40, 30, 40, 40)),  # in four tiles, whole in one
    (RED, (150, 20, 20, 50)),
    (BLUE, (90, 40, 40, 20)),
    (BLUE, (200, 100, 40, 40)),
    (RED, (0, 110, 40, 40)),
)


@pytest.mark.parametrize("merge", ["greedy_nmm", "nms"])
def test_in_tiles_each_object_is_found_once(
    merge: str, model: ByColour, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sahi")
    path = painted(tmp_path / "a.png", (241, 151), *TILED)
    tiling = ["--tile", "96", "--overlap", "0.5", "--merge", merge, "--batch-size", "4"]
    output = tmp_path / "out"
    assert main(["run", str(path), "--output", str(output), "--threshold", "0.05", "--no-pictures", *tiling]) == 0
    found, about = found_in(output)
    expected = [("a.png", "r" if colour == RED else 7, [float(side) for side in box]) for colour, box in TILED]
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert about["images"] == [{"id": 1, "file_name": str(path), "height": 151, "width": 241}]
    assert {size for batch in model.batches for size in batch} == {(96, 96)}
    assert max(map(len, model.batches)) == 4
    assert capsys.readouterr().out == f"{path}: 3 rose, 2 sky\n"  # more than the model finds at once
    scores = [result["score"] for result in json.loads((output / "detections.json").read_text())]
    assert scores == sorted(scores, reverse=True)


def test_an_image_smaller_than_a_tile_is_one(model: ByColour, tmp_path: Path) -> None:
    pytest.importorskip("sahi")
    path = painted(tmp_path / "a.png", (60, 40), (RED, (5, 5, 40, 30)))
    empty = painted(tmp_path / "b.png", (40, 100))
    assert main(["run", str(path), str(empty), "--output", str(tmp_path / "out"), "--tile", "64", "--no-pictures"]) == 0
    assert found_in(tmp_path / "out")[0] == [("a.png", "r", [5.0, 5.0, 40.0, 30.0])]
    assert model.batches == [[(40, 60)], [(64, 40)], [(64, 40)]]


def test_masks_in_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sahi")
    stand_in(monkeypatch, ByColour(has_masks=True))
    path = painted(tmp_path / "a.png", (150, 110), (RED, (50, 40, 40, 40)), (BLUE, (100, 90, 40, 20)))
    empty = painted(tmp_path / "b.png", (70, 70))
    options = [
        "--tile",
        "96",
        "--overlap",
        "0.5",
        "--threshold",
        "0.1",
        "--output",
        str(tmp_path / "out"),
        "--no-pictures",
    ]
    assert main(["run", str(path), str(empty), *options]) == 0
    rose, sky = json.loads((tmp_path / "out" / "detections.json").read_text())
    for result, category, (x, y, w, h) in ((rose, "r", (50, 40, 40, 40)), (sky, 7, (100, 90, 40, 20))):
        expected = np.zeros((110, 150), dtype=bool)
        expected[y : y + h, x : x + w] = True
        assert_same_mask(result["segmentation"], expected)
        assert (result["category_id"], result["bbox"]) == (category, [x, y, w, h])


def test_a_mask_of_nothing_in_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sahi")
    model = stand_in(monkeypatch, ByColour(has_masks=True))
    seen = model.found
    monkeypatch.setattr(model, "found", lambda image: {**seen(image), "masks": seen(image)["masks"] * 0.5})
    path = painted(tmp_path / "a.png", (60, 40), (RED, (5, 5, 40, 30)))
    assert main(["run", str(path), "--output", str(tmp_path / "out"), "--tile", "64", "--no-pictures"]) == 0
    (result,) = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert result["bbox"] == [5, 5, 40, 30]
    assert_same_mask(result["segmentation"], np.zeros((40, 60), dtype=bool))


def test_tiles_are_what_sahi_makes_of_the_same_detector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sahi")
    from sahi.models.torchvision import TorchVisionDetectionModel
    from sahi.predict import get_sliced_prediction

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which sahi sets
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which sahi forgets
    detector = small_detector()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    threshold = 0.2
    with torch.no_grad():
        whole = get_sliced_prediction(
            image,
            TorchVisionDetectionModel(
                model=detector,
                device="cpu",
                confidence_threshold=threshold,
                category_mapping={str(label): str(label) for label in range(3)},
            ),
            slice_height=96,
            slice_width=96,
            perform_standard_pred=False,
            verbose=0,
        )
    expected = [(p.category.id, p.score.value, p.bbox.to_xywh()) for p in whole.object_prediction_list]
    stand_in(monkeypatch, detector)
    options = ["--tile", "96", "--threshold", str(threshold), "--output", str(tmp_path / "out"), "--no-pictures"]
    assert main(["run", str(tmp_path / "a.png"), *options]) == 0
    results = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert len(results) == len(expected) > 3
    for result, (label, found, box) in zip(results, sorted(expected, key=lambda e: -e[1]), strict=True):
        assert (result["category_id"], result["score"]) == (CATEGORIES[label - 1], pytest.approx(float(found)))
        assert result["bbox"] == pytest.approx([float(side) for side in box], abs=2e-3)
