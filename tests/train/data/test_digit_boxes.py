"""Digits on made grounds: boxes and masks are those of the ink, and training and test canvases share nothing."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.data import DATA, DigitBoxes, digit_boxes
from train.data.digit_boxes import Canvases
from train.data.digits import read_digits, split_digits
from train.data.masks import box_around, unpacked
from train.schema import validate


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options(path: str, **given: Any) -> DigitBoxes:
    tree = {"name": "digit_boxes", "path": path, "num_train": 8, "num_test": 4, **given}
    return DigitBoxes.model_validate_json(json.dumps(tree))


def canvases(path: str, split: str = "train", **given: Any) -> Canvases:
    train, test = split_digits(*read_digits(path))
    return Canvases(options(path, **given), split, train if split == "train" else test)


def test_what_is_loaded(digits_csv: str) -> None:
    data = options(digits_csv, masks=True).load(seed=0)
    assert data.classes == tuple("0123456789")
    assert data.category_ids == tuple(range(10))
    assert (len(data.train), len(data.test), data.left_out, data.has_masks) == (8, 4, {}, True)
    labels = set()
    for dataset in (data.train, data.test):
        for index in range(len(dataset)):
            pixels, target = dataset[index]
            assert pixels.shape == (3, 128, 128)
            assert 1 <= len(target["boxes"]) <= 6
            assert target["masks"].shape == (len(target["boxes"]), 128, 128)
            labels |= set(target["labels"].tolist())
            for box, mask in zip(target["boxes"].int().tolist(), target["masks"].numpy(), strict=True):
                x, y, width, height = box_around(mask)
                assert box == [x, y, x + width, y + height]
                assert 18 <= max(width, height) <= 36
    assert labels <= set(range(1, 11))
    assert len(labels) > 5
    first = data.truth["annotations"][0]
    assert set(first) == {"id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"}
    counts = unpacked(first["segmentation"]["counts"])
    assert counts is not None
    assert sum(counts[1::2]) == first["area"]


@pytest.mark.parametrize("ground", ["smooth", "noise", "strokes"])
def test_what_differs_from_the_ground_is_in_a_mask(
    digits_csv: str, ground: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = canvases(digits_csv, ground=ground)
    grounds = []
    real = digit_boxes.draw_ground

    def remembered(*arguments: Any) -> np.ndarray:
        grounds.append(real(*arguments))
        return grounds[-1].copy()

    monkeypatch.setattr(digit_boxes, "draw_ground", remembered)
    for index in range(6):
        pixels, digits, seen = drawn.canvas(index)
        below = np.rint(255 * grounds[-1]).astype(np.uint8)
        assert np.array_equal(pixels[seen < 0], below[seen < 0])
        changed = (pixels != below).any(axis=2)
        assert changed[seen >= 0].mean() > 0.97  # here and there ink has the colour of the ground
        assert set(seen.ravel().tolist()) == {-1, *range(len(digits))}
        for number in range(len(digits)):
            ink, under = (image[seen == number].mean() / 255 for image in (pixels, below))
            assert abs(ink - under) > 0.15  # 0.35 where the ink is full


@pytest.mark.parametrize(("ink", "lighter"), [("light", True), ("dark", False)])
def test_ink_may_be_lighter_or_darker_than_every_ground(digits_csv: str, ink: str, lighter: bool) -> None:
    drawn = canvases(digits_csv, ink=ink, contrast=0.45)
    for index in range(5):
        pixels, digits, seen = drawn.canvas(index)
        for number in range(len(digits)):
            y, x = np.nonzero(seen == number)
            around = pixels[max(y.min() - 2, 0) : y.max() + 3, max(x.min() - 2, 0) : x.max() + 3]
            bare = seen[max(y.min() - 2, 0) : y.max() + 3, max(x.min() - 2, 0) : x.max() + 3] < 0
            assert (pixels[seen == number].mean() > around[bare].mean()) == lighter


def test_training_and_test_share_no_glyph_and_no_canvas(digits_csv: str) -> None:
    train, test = canvases(digits_csv, "train"), canvases(digits_csv, "test")
    assert not {g.tobytes() for g in train.glyphs} & {g.tobytes() for g in test.glyphs}
    drawn = [one.canvas(index)[0].tobytes() for one in (train, test) for index in range(4)]
    assert len(set(drawn)) == 8
    assert train.canvas(3)[0].tobytes() == canvases(digits_csv).canvas(3)[0].tobytes()


def test_the_canvases_do_not_depend_on_the_seed(digits_csv: str, cache: Path) -> None:
    first, second = options(digits_csv).load(seed=0), options(digits_csv).load(seed=1)
    assert first.truth == second.truth
    assert torch.equal(first.test[2][0], second.test[2][0])
    assert len(list(cache.iterdir())) == 2


def test_boxes_overlap_by_no_more_than_is_allowed_and_no_ink_is_covered(digits_csv: str) -> None:
    for allowed, crowded in ((0.0, False), (0.3, True)):
        drawn = canvases(digits_csv, num_digits=[8, 8], glyph_size=[28, 28], max_overlap=allowed)
        largest = 0.0
        for index in range(8):
            _, digits, seen = drawn.canvas(index)
            boxes = [box_around(seen == number) for number in range(len(digits))]
            assert len(boxes) >= 5
            for one, (x, y, w, h) in enumerate(boxes):
                assert max(w, h) == 28  # whole
                for ox, oy, ow, oh in boxes[:one]:
                    both = max(0, min(x + w, ox + ow) - max(x, ox)) * max(0, min(y + h, oy + oh) - max(y, oy))
                    largest = max(largest, both / (w * h + ow * oh - both))
        assert largest <= allowed
        assert (largest > 0.05) == crowded


def test_a_larger_canvas_has_more_digits_of_the_same_size(digits_csv: str) -> None:
    assert options(digits_csv, canvas=[256, 256]).counts == (8, 24)
    assert options(digits_csv, canvas=[64, 64], glyph_size=[18, 30]).counts == (1, 2)
    assert options(digits_csv, canvas=[256, 256], num_digits=[2, 3]).counts == (2, 3)
    data = options(digits_csv, canvas=[160, 224], num_train=3, num_test=2).load(seed=0)
    assert data.train[0][0].shape == (3, 160, 224)
    sides = data.train.objects.boxes[:, 2:] - data.train.objects.boxes[:, :2]
    assert sides.max(axis=1).min() >= 18
    assert sides.max() <= 36


def test_a_canvas_may_be_empty(digits_csv: str) -> None:
    data = options(digits_csv, num_digits=[0, 1]).load(seed=0)
    counts = np.diff(data.train.objects.starts)
    assert set(counts.tolist()) == {0, 1}
    assert len(options(digits_csv, num_digits=[0, 1], empty_images=False).load(seed=0).train) == counts.sum()


def test_drawn_once_by_several_at_once_and_anew_for_other_options(digits_csv: str, cache: Path) -> None:
    calls: list[int] = []
    draw = digit_boxes.draw_canvases

    def counted(folder: Path, *rest: Any) -> None:
        draw(folder, *rest)
        calls.append(1)

    digit_boxes.draw_canvases = counted
    try:
        threads = [threading.Thread(target=options(digits_csv).load, args=(0,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = sorted(path.name for path in cache.iterdir())
        assert [re.sub("[0-9a-f]{16}$", "", name) for name in names] == ["digit_boxes-1-test-", "digit_boxes-1-train-"]
        count = len(calls)
        options(digits_csv, max_damaged=3, horizontal_flip=0.5, mean=[0.5, 0.5, 0.5]).load(seed=0)
        assert len(calls) == count
        options(digits_csv, num_test=5).load(seed=0)
        assert len(calls) == count + 1
        options(digits_csv, ink="dark").load(seed=0)
        assert len(calls) == count + 3
    finally:
        digit_boxes.draw_canvases = draw


def test_a_drawing_that_was_stopped_leaves_nothing(
    digits_csv: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Image.Image.save

    def stopped(self: Image.Image, *rest: Any, **more: Any) -> None:
        saved(self, *rest, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        options(digits_csv).load(seed=0)
    monkeypatch.undo()
    monkeypatch.setenv("RELPOS2D_DATA", str(cache))
    assert list(cache.iterdir()) == []
    assert len(options(digits_csv).load(seed=0).train) == 8


def test_a_disk_that_is_full_is_an_error(digits_csv: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        options(digits_csv).load(seed=0)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_digits": [3, 2]}, "the first number must not be greater than the second"),
        ({"num_digits": [-1, 2]}, r"num_digits = \[-1, 2\]: must not be negative"),
        ({"glyph_size": [7, 20]}, r"glyph_size = \[7, 20\]: must be at least 8 pixels"),
        ({"glyph_size": [30, 20]}, "the first number must not be greater than the second"),
        ({"canvas": [32, 200]}, "canvas = 32 x 200 is too small for num_digits = .* of glyph_size = 36"),
        ({"num_digits": [2, 20]}, "canvas = 128 x 128 is too small for num_digits = 20 of glyph_size = 36"),
        ({"max_overlap": 1.5}, "max_overlap = 1.5"),
        ({"contrast": 0.7}, "contrast = 0.7"),
        ({"ground": "photo"}, "must be 'mixed', 'smooth', 'noise' or 'strokes'"),
        ({"num_train": 0}, "num_train = 0"),
    ],
)
def test_wrong_options(given: dict[str, Any], message: str) -> None:
    node, problems = validate(DATA["digit_boxes"], {"name": "digit_boxes", **given})
    assert node is None
    assert re.search(message, problems[0]), problems


def test_wrong_digits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no readable csv of digits"):
        options(str(tmp_path / "no.csv")).load(seed=0)
    rows = [[0] * 784 + [digit] for digit in list(range(10)) * 2]
    np.savetxt(tmp_path / "blank.csv", rows, fmt="%d", delimiter=",")
    with pytest.raises(ValueError, match="digit_boxes: there is a glyph without ink"):
        options(str(tmp_path / "blank.csv")).load(seed=0)
