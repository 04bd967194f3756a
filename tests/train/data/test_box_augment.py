"""Augmentation with boxes: pixels, boxes and masks move together, exactly, and nothing is lost or added at an edge."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from train.data import Boxed, DetectionData
from train.data.box_augment import BoxAugment, Crop, Mirror, QuarterTurns, UpsideDown, Zoom, train_augment

HEIGHT, WIDTH = 37, 53


class Options(DetectionData):
    name: str = "options"

    def load(self, seed: int) -> Boxed:
        raise NotImplementedError


def augment(**given: Any) -> BoxAugment:
    return train_augment(Options.model_validate_json(json.dumps({"horizontal_flip": 0.0, **given})))


def drawn_boxes(rng: np.random.Generator, count: int = 6) -> np.ndarray:
    """Boxes with whole corners, the first as large as the image, the second a single pixel."""
    start = rng.integers(0, [WIDTH - 1, HEIGHT - 1], (count, 2))
    end = rng.integers(start + 1, [WIDTH, HEIGHT], endpoint=True)
    boxes = np.concatenate([start, end], axis=1).astype(np.float32)
    boxes[0] = [0, 0, WIDTH, HEIGHT]
    boxes[1, 2:] = boxes[1, :2] + 1
    return boxes


def masks_of(boxes: np.ndarray) -> np.ndarray:
    masks = np.zeros((len(boxes), HEIGHT, WIDTH), dtype=np.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.astype(int), strict=True):
        mask[y1:y2, x1:x2] = 1
    return masks


def numbered_pixels() -> np.ndarray:
    """No two pixels are the same."""
    numbers = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    return np.stack([numbers // 256, numbers % 256, numbers * 0 + 7], axis=2).astype(np.uint8)


def around(mask: np.ndarray) -> list[int]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


EXACT = {
    "nothing": {},
    "horizontal_flip": {"horizontal_flip": 1.0},
    "vertical_flip": {"vertical_flip": 1.0},
    "rotate90": {"rotate90": 1.0},
    "crop": {"crop_size": [20, 31]},
    "crop anywhere": {"crop_size": 17, "box_safe": False},
    "twice as large": {"scale": [2.0, 2.0]},
    "all": {"scale": [2.0, 2.0], "crop_size": [61, 40], "horizontal_flip": 0.5, "vertical_flip": 0.5, "rotate90": 0.5},
}


@pytest.mark.parametrize("name", EXACT)
def test_boxes_masks_and_pixels_stay_together(name: str) -> None:
    transform, rng = augment(**EXACT[name], min_visibility=0.0), np.random.default_rng(0)
    pixels = numbered_pixels()
    for seed in range(12):
        boxes = drawn_boxes(rng)
        masks = masks_of(boxes)
        torch.manual_seed(seed)
        image, found, kept, left = transform(pixels, boxes, masks)
        assert left is not None
        assert (found.dtype, left.dtype, image.dtype) == (np.float32, np.uint8, np.uint8)
        assert len(found) == len(kept) == len(left) > 0
        assert left.shape[1:] == image.shape[:2]
        for one, mask in zip(found, left, strict=True):
            assert one.tolist() == around(mask)
            assert mask.sum() == (one[2] - one[0]) * (one[3] - one[1])
        if EXACT[name].get("scale") is None:  # then a pixel keeps its number
            numbers = image[..., 0].astype(int) * 256 + image[..., 1]
            for mask, original in zip(left, masks[kept], strict=True):
                assert set(numbers[mask > 0]) <= set(np.flatnonzero(original))
                if "crop_size" not in EXACT[name]:
                    assert mask.sum() == original.sum()
        torch.manual_seed(seed)
        without = transform(pixels, boxes, None)
        assert without[3] is None
        for one, other in zip((image, found, kept), without[:3], strict=True):
            assert np.array_equal(one, other)


def test_mirrors_and_turns_undo_themselves_exactly() -> None:
    rng = np.random.default_rng(0)
    boxes = np.sort(rng.uniform(0, HEIGHT, (200, 2, 2)), axis=1).reshape(200, 4).astype(np.float32)
    pixels = numbered_pixels()
    four = [QuarterTurns(p=1) for _ in range(4)]
    for turn in four:
        turn.get_params = lambda: {"factor": 1}  # type: ignore[method-assign]
    for steps in ([Mirror(p=1)] * 2, [UpsideDown(p=1)] * 2, four):
        image, found, kept, _ = BoxAugment(list(steps), 1.0, 0.0)(pixels, boxes, None)
        assert np.array_equal(image, pixels)
        assert kept.tolist() == list(range(200))
        assert np.array_equal(found, boxes)


def test_a_quarter_turn_goes_against_the_clock() -> None:
    turn = QuarterTurns(p=1)
    turn.get_params = lambda: {"factor": 1}  # type: ignore[method-assign]
    image, boxes, _, _ = BoxAugment([turn], 0.0, 0.0)(
        numbered_pixels(), np.float32([[0, 0, 10, 5], [WIDTH - 3, 1, WIDTH, 2]]), None
    )
    assert np.array_equal(image, np.rot90(numbered_pixels()))
    assert boxes.tolist() == [[0, WIDTH - 10, 5, WIDTH], [1, 0, 2, 3]]


def test_turns_are_one_two_or_three_quarters_each_as_likely() -> None:
    transform, first = augment(rotate90=1.0), []
    for seed in range(60):
        torch.manual_seed(seed)
        image = transform(numbered_pixels(), np.zeros((0, 4), np.float32), None)[0]
        first.append(next(k for k in range(4) if np.array_equal(image, np.rot90(numbered_pixels(), k))))
    assert set(first) == {1, 2, 3}
    assert min(map(first.count, (1, 2, 3))) > 8


def test_each_draw_is_its_own() -> None:
    transform = augment(horizontal_flip=0.5, vertical_flip=0.5)
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        image = transform(numbered_pixels(), np.zeros((0, 4), np.float32), None)[0]
        seen.add((image[0, 0].tolist() > image[0, -1].tolist(), image[0, 0].tolist() > image[-1, 0].tolist()))
    assert len(seen) == 4


@pytest.mark.parametrize("factor", [0.3, 0.77, 1.0, 1.31, 2.6])
def test_zoom_is_that_of_the_size_that_comes_out(factor: float) -> None:
    boxes = np.float32([[0, 0, WIDTH, HEIGHT], [10, 5, 20, 30], [WIDTH - 1, HEIGHT - 1, WIDTH, HEIGHT]])
    image, found, kept, masks = BoxAugment([Zoom((factor, factor))], 1.0, 0.0)(
        numbered_pixels(), boxes, masks_of(boxes)
    )
    height, width = round(HEIGHT * factor), round(WIDTH * factor)
    assert image.shape == (height, width, 3)
    assert masks is not None
    assert masks.shape == (3, height, width)
    assert kept.tolist() == [0, 1, 2]  # nothing of them is lost, so a visibility of 1 keeps them
    assert found[0].tolist() == [0, 0, width, height]
    assert found[2, 2:].tolist() == [width, height]
    assert found[1] == pytest.approx(
        [10 * width / WIDTH, 5 * height / HEIGHT, 20 * width / WIDTH, 30 * height / HEIGHT]
    )
    for one, mask in zip(found[:2], masks[:2], strict=True):
        assert np.abs(one - around(mask)).max() <= 0.51


def test_shrinking_smooths() -> None:
    stripes = np.zeros((40, 40, 3), dtype=np.uint8)
    stripes[:, ::2] = 200
    image = BoxAugment([Zoom((0.25, 0.25))], 0.0, 0.0)(stripes, np.zeros((0, 4), np.float32), None)[0]
    assert image.min() > 80
    assert image.max() < 120


def test_zoom_draws_from_the_whole_range_and_leaves_a_pixel_at_least() -> None:
    transform, boxes = augment(scale=[0.5, 2.0]), np.zeros((0, 4), np.float32)
    heights = []
    for seed in range(60):
        torch.manual_seed(seed)
        heights.append(transform(numbered_pixels(), boxes, None)[0].shape[0])
    assert 18 <= min(heights) < 24
    assert 68 < max(heights) <= 74
    tiny = BoxAugment([Zoom((0.1, 0.1))], 0.0, 0.0)(np.zeros((2, 3, 3), np.uint8), np.float32([[0, 0, 3, 2]]), None)
    assert tiny[0].shape == (1, 1, 3)
    assert tiny[1].tolist() == [[0, 0, 1, 1]]


def test_a_safe_crop_holds_a_box_and_another_is_drawn_anywhere() -> None:
    box = np.float32([[40.25, 30.5, 49.75, 36]])
    safe, where = BoxAugment([Crop((12, 16), True)], 0.0, 0.0), set()
    for seed in range(60):
        torch.manual_seed(seed)
        image, found, _, _ = safe(numbered_pixels(), box, None)
        assert image.shape == (12, 16, 3)
        assert (found[0, 2:] - found[0, :2]).tolist() == [9.5, 5.5]  # whole
        where.add(tuple(image[0, 0].tolist()))
    rows, columns = (24, 25), (34, 35, 36, 37)  # from which all of it is seen
    assert where == {tuple(numbered_pixels()[y, x].tolist()) for y in rows for x in columns}
    anywhere, corner, kept = BoxAugment([Crop((36, 50), False)], 1.0, 0.0), np.float32([[0, 0, 4, 4]]), []
    for seed in range(60):
        torch.manual_seed(seed)
        kept.append(len(anywhere(numbered_pixels(), corner, None)[1]))
    assert 0 < sum(kept) < 20  # one place of eight


def test_a_safe_crop_lies_in_a_box_that_is_larger() -> None:
    inside, box = BoxAugment([Crop((10, 10), True)], 0.0, 0.0), np.float32([[3, 0, 50, 37]])
    for seed in range(30):
        torch.manual_seed(seed)
        _, found, _, _ = inside(numbered_pixels(), box, None)
        assert found.tolist() == [[0, 0, 10, 10]]


def test_every_box_is_chosen_for_a_safe_crop() -> None:
    boxes = np.float32([[0, 0, 4, 4], [45, 0, 49, 4], [0, 30, 4, 34]])
    safe, chosen = BoxAugment([Crop((8, 8), True)], 1.0, 0.0), set()
    for seed in range(40):
        torch.manual_seed(seed)
        chosen |= set(safe(numbered_pixels(), boxes, None)[2].tolist())
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize("size", [(100, 100), (100, 10), (10, 100), (HEIGHT, WIDTH)])
def test_an_image_that_is_smaller_than_a_crop_stays_as_it_is(size: tuple[int, int]) -> None:
    box = np.float32([[1, 2, 5, 9]])
    image, found, _, _ = BoxAugment([Crop(size, True)], 1.0, 0.0)(numbered_pixels(), box, None)
    assert image.shape == (min(size[0], HEIGHT), min(size[1], WIDTH), 3)
    assert (found[0, 2:] - found[0, :2]).tolist() == [4, 7]


@pytest.mark.parametrize(
    ("visibility", "expected"), [(1.0, []), (0.5, [[0, 0, 5, 9]]), (0.51, []), (0.0, [[0, 0, 5, 9]])]
)
def test_j4_visibility_is_judged_at_its_limit(visibility: float, expected: list[Any]) -> None:
    at_the_edge = BoxAugment([], visibility, 0.0)
    boxes, kept = at_the_edge.visible(np.array([[-5.0, 0, 5, 9]]), (HEIGHT, WIDTH))
    assert boxes.tolist() == expected
    assert len(kept) == len(expected)


def test_j4_a_box_that_is_wholly_visible_is_kept_whatever_its_corners() -> None:
    rng = np.random.default_rng(0)
    start = rng.uniform(0, 20, (2000, 2))
    boxes = np.concatenate([start, start + rng.uniform(0.01, 15, (2000, 2))], axis=1).astype(np.float32)
    for options in ({}, {"horizontal_flip": 1.0}, {"vertical_flip": 1.0}, {"rotate90": 1.0}, {"scale": [0.7, 1.9]}):
        found = augment(**options, min_visibility=1.0, min_box_size=0.0)(numbered_pixels(), boxes, None)[1]
        assert len(found) == 2000, options


def test_small_boxes_are_left_out_below_the_limit() -> None:
    boxes = np.float32([[10, 10, 11, 11], [10, 10, 10.9, 30], [10, 10, 30, 10.9], [10.3, 10.7, 11.3, 11.7]])
    assert augment(min_box_size=1.0)(numbered_pixels(), boxes, None)[2].tolist() == [0, 3]
    assert augment(min_box_size=0.9)(numbered_pixels(), boxes, None)[2].tolist() == [0, 1, 2, 3]
    assert augment(min_box_size=1.1)(numbered_pixels(), boxes, None)[2].tolist() == []
    assert augment(scale=[0.5, 0.5], min_box_size=0.6)(numbered_pixels(), boxes, None)[2].tolist() == []


@pytest.mark.parametrize("masked", [True, False])
def test_j5_nothing_left_is_no_box_of_four_numbers(masked: bool) -> None:
    boxes = np.float32([[50, 0, 53, 3]])
    crop = Crop((8, 8), False)
    crop.get_params_dependent_on_data = lambda params, data: {"here": (slice(20, 28), slice(0, 8))}  # type: ignore[method-assign]
    for given in (boxes, boxes[:0]):
        transform = BoxAugment([crop, Mirror(p=1), QuarterTurns(p=1), UpsideDown(p=1)], 0.0, 0.0)
        image, found, kept, masks = transform(numbered_pixels(), given, masks_of(given) if masked else None)
        assert (image.shape, found.shape, found.dtype, kept.shape) == ((8, 8, 3), (0, 4), np.float32, (0,))
        assert (None if masks is None else masks.shape) == ((0, 8, 8) if masked else None)


def test_colours_change_and_boxes_do_not() -> None:
    transform, boxes = augment(color_jitter=0.5), drawn_boxes(np.random.default_rng(0))
    images = []
    for seed in range(4):
        torch.manual_seed(seed)
        image, found, _, masks = transform(numbered_pixels(), boxes, masks_of(boxes))
        assert np.array_equal(found, boxes)
        assert np.array_equal(masks, masks_of(boxes))
        images.append(image)
    assert len({image.tobytes() for image in images}) == 4


def test_what_is_given_is_not_changed() -> None:
    boxes = drawn_boxes(np.random.default_rng(0))
    pixels, masks, before = numbered_pixels(), masks_of(boxes), boxes.copy()
    pixels.flags.writeable = False
    augment(**EXACT["all"], color_jitter=0.3)(pixels, boxes, masks)
    assert np.array_equal(boxes, before)
    assert np.array_equal(masks, masks_of(before))
