"""Masks as COCO json has them, polygons or run lengths: checked, packed, and as pixels."""

import reprlib
from typing import Any

import numpy as np

LARGEST = 1e12  # of a number in json; larger ones are no size of anything

Size = tuple[int, int]  # height, width


def is_number(value: Any) -> bool:
    """A number of json that is finite; true is none."""
    return type(value) in (int, float) and abs(value) < LARGEST  # false for nan too


def packed(segmentation: Any, size: Size) -> bytes | None:
    """Polygons or run lengths as pycocotools packs them; None where no polygon has three points.

    Raises:
        ValueError: it is neither, or does not fit the image; pycocotools is missing.
    """
    try:
        from pycocotools import mask
    except ImportError as error:
        raise ValueError("masks need the package `pycocotools`: pip install 'relpos2d[detect]'") from error

    if isinstance(segmentation, dict):
        runs = {"size": list(size), "counts": checked_runs(segmentation, size)}
        return mask.frPyObjects(runs, *size)["counts"]
    polygons = whole_polygons(segmentation, size)
    return mask.merge(mask.frPyObjects(polygons, *size))["counts"] if polygons else None


def whole_polygons(segmentation: Any, size: Size) -> list[list[float]]:
    """The polygons of three points or more; pycocotools would take one of two points for a box.

    Raises:
        ValueError: they are no polygons, or reach far out of the image.
    """
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError(f"{reprlib.repr(segmentation)} must be a list of polygons, or run lengths (size and counts)")
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) % 2 or not all(map(is_number, polygon)):
            raise ValueError(f"{reprlib.repr(polygon)} is no polygon, a list x1, y1, x2, y2, ... of finite numbers")
        farthest = max(map(abs, polygon), default=0)
        if farthest > 2 * max(size):  # drawing it would take forever
            raise ValueError(f"{farthest} lies far out of the image, which is {size[1]} wide and {size[0]} high")
    return [polygon for polygon in segmentation if len(polygon) >= 6]


def checked_runs(segmentation: dict[str, Any], size: Size) -> list[int]:
    """Run lengths, packed or not, as a list; pycocotools reads other memory where they do not fit the image.

    Raises:
        ValueError: they do not fit it.
    """
    if segmentation.get("size") != list(size):
        raise ValueError(f"size = {reprlib.repr(segmentation.get('size'))} must be height and width, {list(size)}")
    counts = segmentation.get("counts")
    if isinstance(counts, str):
        counts = unpacked(counts)
    if not isinstance(counts, list) or not all(is_number(count) and count == int(count) >= 0 for count in counts):
        raise ValueError(f"counts = {reprlib.repr(segmentation.get('counts'))} are no run lengths")
    if sum(counts) != size[0] * size[1]:
        raise ValueError(f"counts sum up to {sum(counts)} pixels, and the image has {size[0]} x {size[1]}")
    return [int(count) for count in counts]


def unpacked(text: str) -> list[int] | None:
    """Run lengths out of the text that pycocotools packs them into; None if it is not such a text.

    A number has five bits a character, the lowest first, and from the fourth on it is the difference to the last but one.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            return None
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return None if shift else counts


def runs_of(mask: bytes) -> list[int]:
    """The run lengths of a packed mask."""
    counts = unpacked(mask.decode("ascii"))
    assert counts is not None  # packed by us
    return counts


def pixels_of(mask: bytes, size: Size) -> np.ndarray:
    """A packed mask as (height, width) uint8 of 0 and 1."""
    counts = runs_of(mask)
    values = np.arange(len(counts), dtype=np.uint8) % 2
    return np.repeat(values, counts).reshape(size[::-1]).T  # column by column


def area_of(mask: bytes) -> float:
    """How many pixels a packed mask has."""
    return float(sum(runs_of(mask)[1::2]))


def run_lengths(pixels: np.ndarray) -> list[int]:
    """How many pixels of a mask are out, in, out, ... column by column."""
    flat = pixels.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    return np.diff(changes, prepend=0, append=flat.size).tolist()


def box_around(pixels: np.ndarray) -> list[int]:
    """The box x, y, width, height around what is in a mask; of no area if nothing is."""
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    if not len(rows):
        return [0, 0, 0, 0]
    x, y = int(columns[0]), int(rows[0])
    return [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y]


def box_of(segmentation: Any, mask: bytes, size: Size) -> list[float]:
    """The box x, y, width, height around a segmentation, given as it is and packed: of polygons, around their points."""
    if isinstance(segmentation, dict):
        return [float(side) for side in box_around(pixels_of(mask, size))]
    points = np.concatenate(whole_polygons(segmentation, size)).reshape(-1, 2)
    return [*points.min(axis=0).tolist(), *np.ptp(points, axis=0).tolist()]
