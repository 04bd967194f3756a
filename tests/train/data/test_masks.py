"""Masks: run lengths, packed and not, are those of pycocotools and those of the pixels."""

import sys
from typing import Any

import numpy as np
import pytest
from pycocotools import mask

from train.data.masks import area_of, box_around, box_of, packed, pixels_of, run_lengths, unpacked

SHAPE = (37, 301)


def blots(seed: int) -> np.ndarray:
    """Masks from a few single pixels to nearly everything, and from many short runs to a single one."""
    rng = np.random.default_rng(seed)
    share = [0.0, 0.001, 0.1, 0.5, 0.999, 1.0][seed]
    return (rng.random(SHAPE) < share).astype(np.uint8)


@pytest.mark.parametrize("seed", range(6))
def test_run_lengths_are_those_of_pycocotools(seed: int) -> None:
    pixels = blots(seed)
    text = mask.encode(np.asfortranarray(pixels))["counts"].decode()
    counts = run_lengths(pixels)
    assert sum(counts) == pixels.size
    assert np.array_equal(np.repeat(np.arange(len(counts)) % 2, counts).reshape(SHAPE[::-1]).T, pixels)
    assert unpacked(text) == counts
    for given in (counts, text):
        found = packed({"size": list(SHAPE), "counts": given}, SHAPE)
        assert found == text.encode()
        assert np.array_equal(pixels_of(found, SHAPE), pixels)
        assert area_of(found) == pixels.sum()


@pytest.mark.parametrize("text", ["\x00", "P", "0P", "é", "~"])
def test_texts_that_are_no_run_lengths(text: str) -> None:
    assert unpacked(text) is None


def test_boxes_around_masks() -> None:
    pixels = np.zeros(SHAPE, dtype=np.uint8)
    assert box_around(pixels) == [0, 0, 0, 0]
    pixels[36, 300] = 1
    assert box_around(pixels) == [300, 36, 1, 1]
    pixels[5, 7] = 1
    assert box_around(pixels) == [7, 5, 294, 32]
    given = {"size": list(SHAPE), "counts": run_lengths(pixels)}
    content = packed(given, SHAPE)
    assert content is not None
    assert box_of(given, content, SHAPE) == mask.toBbox({"size": list(SHAPE), "counts": content}).tolist()
    triangle: list[Any] = [[3, 4.5, 10, 5, 7, 30], [1, 1, 2, 2]]
    content = packed(triangle, SHAPE)
    assert content is not None
    assert box_of(triangle, content, SHAPE) == [3, 4.5, 7, 25.5]


def test_polygons_are_drawn_together() -> None:
    parts = [[0, 0, 10, 0, 10, 10, 0, 10], [5, 5, 15, 5, 15, 15, 5, 15]]
    content = packed(parts, SHAPE)
    assert content is not None
    assert area_of(content) == 175
    assert packed([[1, 1, 2, 2]], SHAPE) is None
    outside = packed([[-30, -30, 20, -30, 20, 20, -30, 20]], SHAPE)
    assert outside is not None
    assert area_of(outside) == 400


def test_without_pycocotools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ValueError, match=r"masks need the package `pycocotools`: pip install 'relpos2d\[detect\]'"):
        packed([[0, 0, 9, 0, 9, 9]], SHAPE)
