"""Boxes are drawn where they are, in the colour of what they are worth, and no label hides another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from train import draw_boxes
from train.draw_boxes import Label, draw_detections, judged, place_label
from train.report import ACCENT, INK, WRONG
from train.tasks.detect import to_rle

GREY = np.full((300, 400, 3), 128, dtype=np.uint8)
NAMES = [{"id": 1, "name": "cat"}, {"id": "x", "name": "a dog for $5, or $6"}]


def found(box: Sequence[float], score: float = 0.9, category_id: int | str = 1, **more: Any) -> dict[str, Any]:
    return {"image_id": 7, "category_id": category_id, "bbox": list(box), "score": score, **more}


def thing(box: Sequence[float], category_id: int | str = 1, **more: Any) -> dict[str, Any]:
    return {"id": 0, "image_id": 7, "category_id": category_id, "bbox": list(box), **more}


def drawn(path: Path, results: list[dict[str, Any]], objects: list[dict[str, Any]], **options: Any) -> np.ndarray:
    """The picture of one grey image without its margins: (height, width, 3), one pixel in it for one of the image."""
    image = options.pop("image", GREY)
    draw_detections(path, [image], [results], {"categories": NAMES, "annotations": objects}, [7], **options)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    left, top = round(draw_boxes.GAP * draw_boxes.DPI), round(draw_boxes.TITLE * draw_boxes.DPI)
    return pixels[top:, left:]


def rgb(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def is_near(pixels: np.ndarray, colour: str) -> np.ndarray:
    return np.abs(pixels.astype(int) - rgb(colour)).max(axis=-1) < 60


@pytest.fixture
def true_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single image has as many pixels in the picture as it has."""
    monkeypatch.setattr(draw_boxes, "ALONE", (0.1, 12.0))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are made; no file is."""
    seen: list[Figure] = []
    monkeypatch.setattr(draw_boxes, "save", lambda figure, path: seen.append(figure))
    return seen


@pytest.mark.usefixtures("true_size")
def test_boxes_lie_where_they_are_in_the_colour_of_what_they_are_worth(tmp_path: Path) -> None:
    results = [found((60, 60, 100, 80)), found((200, 200, 90, 70), 0.6), found((300, 40, 60, 60), 0.2)]
    objects = [thing((58, 62, 100, 80)), thing((300, 40, 60, 60))]
    pixels = drawn(tmp_path / "a.png", results, objects)
    for colour, (x, y, w, h) in ((ACCENT, (60, 60, 100, 80)), (WRONG, (200, 200, 90, 70))):
        there = is_near(pixels[:300, :400], colour)
        rows, columns = np.flatnonzero(there.sum(axis=1) > 0.8 * w), np.flatnonzero(there.sum(axis=0) > 0.8 * h)
        assert (rows.max(), columns.min(), columns.max()) == pytest.approx((y + h, x, x + w), abs=2)
        assert there[y - 6, x + 10]  # the label, above
    dashes = is_near(pixels[40:100, 298:303], INK).any(axis=1)
    assert 0.3 < dashes.mean() < 0.9
    assert not is_near(pixels[38:104, 296:364], ACCENT).any()  # of too low a score
    without = drawn(tmp_path / "b.png", results, [])
    assert not is_near(without[:300, :400], WRONG).any()
    assert is_near(without[205:265, 199:203], ACCENT).any(axis=1).mean() > 0.9


def test_what_is_right_is_what_ap50_says() -> None:
    objects = [thing((0, 0, 10, 10)), thing((20, 0, 10, 10), "x"), thing((40, 0, 60, 60), iscrowd=1)]
    results = [
        found((0, 0, 10, 10), 0.9),
        found((0, 0, 10, 10), 0.8),  # the same again
        found((20, 0, 10, 10), 0.7),  # another class
        found((20, 0, 10, 5), 0.6, "x"),  # by half
        found((20, 20, 10, 10), 0.5, "x"),
        found((50, 10, 10, 10), 0.4),  # in a crowd
    ]
    assert judged(results, objects) == ({0, 3}, {1, 2, 4})
    assert judged(results, []) == (set(), {0, 1, 2, 3, 4, 5})
    assert judged([], objects) == (set(), set())


def test_titles_count(figures: list[Figure]) -> None:
    def draw(objects: list[dict[str, Any]], threshold: float = 0.3, width: int = 400) -> str:
        truth = {"categories": NAMES, "annotations": objects}
        draw_detections(Path("a.png"), [GREY[:, :width]], [results], truth, [7], threshold)
        return figures[-1].axes[0].get_title()

    results = [found((0, 0, 10, 10), 0.9), found((90, 0, 10, 10), 0.8), found((50, 50, 9, 9), 0.7, "x")]
    assert draw([thing((0, 0, 10, 10)), thing((0, 0, 9, 99), iscrowd=1)]) == "1 of 1 found, 2 wrong"
    assert draw([]) == "2 cat, 1 a dog for $5, or $6"
    assert draw([], width=100) == "3 found"  # for which there is room
    assert draw([], 0.75, width=100) == "2 cat"
    assert draw([], 0.95) == "nothing found"


@pytest.mark.usefixtures("figures")
def test_no_label_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(results: list[dict[str, Any]]) -> None:
        draw_detections(Path("a.png"), [GREY], [results], {"categories": NAMES}, [7])

    rng = np.random.default_rng(0)
    placed: list[Label | None] = []

    def remember(*given: Any) -> Label | None:
        placed.append(place_label(*given))
        return placed[-1]

    monkeypatch.setattr(draw_boxes, "place_label", remember)
    boxes = np.concatenate((rng.uniform(0, 340, (100, 2)), rng.uniform(10, 60, (100, 2))), axis=1)
    scores = np.sort(rng.uniform(0.3, 1, 100))
    draw([found(box, score) for box, score in zip(boxes.tolist(), scores, strict=True)])
    labels = [label for label in placed if label is not None]
    assert len(placed) == 100
    assert 30 < len(labels) < 100
    assert placed[0] is not None
    assert f"{scores[-1]:.2f}" in placed[0].text  # the surest first
    for place, label in enumerate(labels):
        assert 0 <= label.top < label.bottom <= 300
        assert 0 <= label.left < label.right <= 400
        assert not any(label.touches(other) for other in labels[:place])
    placed.clear()
    draw([found((10, 20, 5, 5)), found((10, 20, 5, 5), 0.5), found((390, 290, 10, 10), 0.4)])
    assert [label and label.text for label in placed] == ["cat 0.90", "cat 0.50", "cat 0.40"]
    assert placed[1] is not None
    assert placed[1].top == 20  # inside, as there is a label above


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(300, 400)], (1, 4.0, 3.0)),  # enlarged
        ([(28, 28)], (1, 4.0, 4.0)),
        ([(2500, 2000)], (1, 9.6, 12.0)),  # reduced
        ([(100, 100)] * 5, (3, 4.2, 4.2)),
        ([(100, 50), (50, 100)], (2, 4.2, 5.6)),
    ],
)
def test_the_size_of_a_picture(
    sizes: list[tuple[int, int]], expected: tuple[int, float, float], figures: list[Figure]
) -> None:
    columns, width, height = expected
    images = [np.zeros((*size, 3), dtype=np.uint8) for size in sizes]
    ids = list(range(len(sizes)))
    draw_detections(Path("a.png"), images, [[] for _ in ids], {"categories": NAMES}, ids)
    (figure,) = figures
    rows = -(-len(sizes) // columns)
    inches = columns * (width + draw_boxes.GAP) + draw_boxes.GAP, height * rows + 0.4 * rows + 0.12
    assert figure.get_size_inches().tolist() == pytest.approx(inches)
    assert figure.canvas.manager is None  # pyplot, which would keep it, has no part in it


@pytest.mark.usefixtures("true_size")
def test_masks_are_tinted_and_the_surest_lies_on_top(tmp_path: Path) -> None:
    mask = np.zeros((300, 400), dtype=np.uint8)
    mask[100:200, 100:200] = 1
    square, other = (to_rle(torch.from_numpy(np.roll(mask, step, axis=1))) for step in (0, 60))
    results = [
        found((150, 100, 110, 100), 0.5, segmentation=other),
        found((80, 80, 140, 140), 0.9, segmentation=square),
    ]
    pixels = drawn(tmp_path / "a.png", results, []).astype(int)
    tint = np.array([128 + draw_boxes.TINT * (channel - 128) for channel in rgb(ACCENT)])
    for y, x, expected in ((150, 130, tint), (150, 190, tint), (150, 240, tint), (150, 60, 128), (250, 150, 128)):
        assert np.abs(pixels[y, x] - expected).max() <= 2
    assert [place for place in range(160, 215) if pixels[185, place].max() < 0.6 * tint.max()] == [
        200
    ]  # where the surer one ends


def test_tensors_and_arrays_are_the_same_picture(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
    for name, image in (("a", pixels), ("b", tensor)):
        results = [[found((10, 10, 30, 30), category_id="x")]]
        draw_detections(tmp_path / f"{name}.png", [image], results, {"categories": NAMES, "annotations": []}, [7])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_any_name_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    original = Axes.text

    def text(self: Axes, x: float, y: float, letters: str, **options: Any) -> Any:
        told.append(letters)
        return original(self, x, y, letters, **options)

    monkeypatch.setattr(Axes, "text", text)
    categories = [{"id": 1, "name": "\u732b $x$ \\frac"}, {"id": 2, "name": "a\nb"}, {"id": 3}]
    results = [found((10, 50 * number, 30, 30), category_id=number) for number in (1, 2, 3)]
    draw_detections(tmp_path / "a.png", [GREY], [results], {"categories": categories}, [7])
    assert told == ["\u732b $x$ \\frac 0.90", "a\ufffdb 0.90", "3 0.90"]
