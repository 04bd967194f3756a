"""Digits to be found: real glyphs of any size drawn on made grounds, with the exact box and mask of each."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field, PositiveInt, field_validator, model_validator

from train.data.boxes import Boxed, DetectionData
from train.data.coco import load_boxed
from train.data.digits import NUM_CLASSES, Glyphs, read_digits, split_digits
from train.data.fetch import cached_folder
from train.data.images import Probability, ascending
from train.data.masks import box_around, run_lengths

VERSION = 1  # of what is drawn: raise it with any change of a pixel
USUAL_CANVAS, USUAL_DIGITS = (128, 128), (2, 6)
FAINTEST = 64  # of 255: what is fainter in a glyph is not drawn
TRIES = 60  # places that are tried for a glyph
FULL = 0.5  # of the canvas: glyphs must not take more


class DigitBoxes(DetectionData):
    """Handwritten digits on coloured canvases of `canvas` (height, width) pixels.

    A canvas has `num_digits` (least, most) digits; without it as many as are usual on its area, 2 to 6 on 128 x 128. The longer
    side of a digit has `glyph_size` (least, most) pixels. Two boxes overlap by an IoU of at most `max_overlap`, and no digit
    covers ink of another. `ground` is what lies below: smooth colours, noise, strokes, or one of these in turn (mixed). `ink`
    says whether a digit is lighter or darker than the ground around it, by `contrast` (0..1) or more.

    The fetch step draws them once, as PNG files and COCO json in the cache. Training and test canvases have different glyphs
    and different grounds, and neither depends on the seed of a run. Another canvas has glyphs of the same size. They are never
    mirrored unless asked for.
    """

    name: Literal["digit_boxes"]
    path: str | None = None
    canvas: tuple[PositiveInt, PositiveInt] = USUAL_CANVAS
    num_digits: tuple[int, int] | None = None
    glyph_size: tuple[int, int] = (18, 36)
    max_overlap: Probability = 0.05
    ground: Literal["mixed", "smooth", "noise", "strokes"] = "mixed"
    ink: Literal["any", "light", "dark"] = "any"
    contrast: float = Field(0.35, ge=0.05, le=0.45)
    num_train: PositiveInt = 2_000
    num_test: PositiveInt = 400
    horizontal_flip: Probability = 0.0

    @field_validator("num_digits", "glyph_size")
    @classmethod
    def counts_ascend(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if value is None else ascending(value)

    @model_validator(mode="after")
    def digits_have_room(self) -> "DigitBoxes":
        least, largest = self.glyph_size
        if least < 8:
            raise ValueError(
                f"glyph_size = {list(self.glyph_size)}: must be at least 8 pixels, below which no digit is legible"
            )
        if self.counts[0] < 0:
            raise ValueError(f"num_digits = {list(self.counts)}: must not be negative")
        height, width = self.canvas
        if largest > min(height, width) or self.counts[1] * largest**2 > FULL * height * width:
            raise ValueError(
                f"canvas = {height} x {width} is too small for num_digits = {self.counts[1]} of glyph_size = {largest}: they must "
                f"not take more than half of it"
            )
        return self

    @property
    def counts(self) -> tuple[int, int]:
        """The least and most digits of a canvas."""
        if self.num_digits is not None:
            return self.num_digits
        share = math.prod(self.canvas) / math.prod(USUAL_CANVAS)
        return max(1, round(USUAL_DIGITS[0] * share)), max(1, round(USUAL_DIGITS[1] * share))

    def load(self, seed: int) -> Boxed:
        train, test = split_digits(*read_digits(self.path))
        return load_boxed(self, self.drawn("train", train, self.num_train), self.drawn("test", test, self.num_test))

    def drawn(self, split: str, glyphs: Glyphs, num_canvases: int) -> tuple[Path, Path]:
        """The folder of the canvases of a split and the file of their annotations, drawn if they are not in the cache."""
        options = {
            "canvas": self.canvas,
            "num_digits": self.counts,
            "glyph_size": self.glyph_size,
            "max_overlap": self.max_overlap,
            "ground": self.ground,
            "ink": self.ink,
            "contrast": self.contrast,
            "num_canvases": num_canvases,
            "glyphs": [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in glyphs],
        }
        key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]

        def draw(folder: Path) -> None:
            draw_canvases(folder, Canvases(self, split, glyphs), num_canvases)

        folder = cached_folder(f"digit_boxes-{VERSION}-{split}-{key}", draw)
        return folder, folder / "annotations.json"


def draw_canvases(folder: Path, canvases: "Canvases", num_canvases: int) -> None:
    """Writes canvases as PNG files, and annotations.json beside them."""
    height, width = canvases.options.canvas
    images, annotations = [], list[dict[str, Any]]()
    for index in range(num_canvases):
        pixels, digits, seen = canvases.canvas(index)
        name = f"{index:06}.png"
        Image.fromarray(pixels).save(folder / name, compress_level=1)
        images.append({"id": index + 1, "file_name": name, "height": height, "width": width})
        for number, digit in enumerate(digits):
            annotations.append({"id": len(annotations) + 1, "image_id": index + 1, **annotation(digit, seen == number)})
    content = {
        "info": {"description": "handwritten digits on made grounds"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": digit, "name": str(digit)} for digit in range(NUM_CLASSES)],
    }
    (folder / "annotations.json").write_text(json.dumps(content))


def annotation(digit: int, mask: np.ndarray) -> dict[str, Any]:
    """The box, the area and the run lengths of a mask, as COCO json has them; the digit is its own category id."""
    return {
        "category_id": digit,
        "bbox": box_around(mask),
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": {"size": list(mask.shape), "counts": run_lengths(mask)},
    }


class Canvases:
    """The canvases of a split; canvas i is always the same."""

    def __init__(self, options: DigitBoxes, split: str, glyphs: Glyphs):
        self.options, self.stream = options, {"train": 0, "test": 1}[split]
        self.glyphs, self.labels = [whole_glyph(glyph) for glyph in glyphs[0].numpy()], glyphs[1].numpy()

    def canvas(self, index: int) -> tuple[np.ndarray, list[int], np.ndarray]:
        """The pixels (height, width, 3), the digits, and (height, width) which of them is seen at each pixel (-1: none)."""
        rng = np.random.default_rng([self.stream, index])
        pixels = draw_ground(rng, self.options)
        seen = np.full(self.options.canvas, -1)
        least, most = self.options.counts
        sizes = rng.integers(*self.options.glyph_size, endpoint=True, size=rng.integers(least, most, endpoint=True))
        digits: list[int] = []
        boxes: list[Box] = []
        for size in sorted(sizes.tolist(), reverse=True):  # the large ones first, while there is room
            number = int(rng.integers(len(self.glyphs)))
            glyph = resized(self.glyphs[number], size)
            box = free_place(rng, glyph, seen, boxes, self.options.max_overlap)
            if box is None:
                continue
            y, x, end_y, end_x = box
            here = slice(y, end_y), slice(x, end_x)
            colour = draw_ink(rng, float(pixels[here][glyph > 0].mean()), self.options.ink, self.options.contrast)
            pixels[here] += glyph[..., None] / np.float32(255) * (colour - pixels[here])
            seen[here][glyph > 0] = len(digits)
            digits.append(int(self.labels[number]))
            boxes.append(box)
        return np.rint(255 * pixels).astype(np.uint8), digits, seen


Box = tuple[int, int, int, int]  # y, x and their ends


def whole_glyph(glyph: np.ndarray) -> np.ndarray:
    """The part of a glyph that has ink in it."""
    ink = glyph >= FAINTEST
    if not ink.any():
        raise ValueError("digit_boxes: there is a glyph without ink")
    x, y, width, height = box_around(ink)
    return glyph[y : y + height, x : x + width]


def resized(glyph: np.ndarray, size: int) -> np.ndarray:
    """A glyph whose longer side is `size`, without what is too faint to be seen; no row or column at its edge is empty."""
    height, width = (max(1, round(side * size / max(glyph.shape))) for side in glyph.shape)
    large = np.asarray(Image.fromarray(glyph).resize((width, height), Image.Resampling.BICUBIC))
    large = np.where(large < FAINTEST, 0, large)
    return whole_glyph(large)


def free_place(
    rng: np.random.Generator, glyph: np.ndarray, seen: np.ndarray, boxes: list[Box], max_overlap: float
) -> Box | None:
    """Where a glyph goes, anywhere on the canvas; None if no place was found.

    It may overlap others by their boxes, and must not cover their ink.
    """
    height, width = glyph.shape
    for _ in range(TRIES):
        y, x = (int(rng.integers(side - length + 1)) for side, length in zip(seen.shape, glyph.shape, strict=True))
        box = (y, x, y + height, x + width)
        covers = (seen[y : y + height, x : x + width][glyph > 0] >= 0).any()
        if not covers and all(overlap(box, other) <= max_overlap for other in boxes):
            return box
    return None


def overlap(box: Box, other: Box) -> float:
    """Intersection over union."""
    height, width = min(box[2], other[2]) - max(box[0], other[0]), min(box[3], other[3]) - max(box[1], other[1])
    both = max(height, 0) * max(width, 0)
    areas = [(end_y - y) * (end_x - x) for y, x, end_y, end_x in (box, other)]
    return both / (sum(areas) - both)


def draw_ink(rng: np.random.Generator, ground: float, ink: str, contrast: float) -> np.ndarray:
    """A colour in 0..1 whose mean differs by `contrast` or more from that of the ground."""
    ranges = {"light": (ground + contrast, 1.0), "dark": (0.0, ground - contrast)}
    allowed = [(low, high) for name, (low, high) in ranges.items() if ink in ("any", name) and low < high]
    low, high = allowed[int(rng.integers(len(allowed)))]
    return tinted(rng, rng.uniform(low, high))


def tinted(rng: np.random.Generator, mean: float) -> np.ndarray:
    """A colour in 0..1 of a mean."""
    tint = rng.uniform(-1, 1, 3)
    tint -= tint.mean()
    room = min(mean, 1 - mean) / max(np.abs(tint).max(), 1e-6)
    return (mean + min(room, 0.5) * tint).astype(np.float32)


def draw_ground(rng: np.random.Generator, options: DigitBoxes) -> np.ndarray:
    """(height, width, 3) float32 in 0..1: smooth colours, with noise or strokes on them."""
    height, width = options.canvas
    kind = rng.choice(["smooth", "noise", "strokes"]) if options.ground == "mixed" else options.ground
    ground = clouds(rng, height, width, cell=48)
    if kind == "noise":
        ground += rng.uniform(0.1, 0.4) * (clouds(rng, height, width, cell=6) - 0.5)
        ground += rng.uniform(0.02, 0.08) * rng.standard_normal((height, width, 1), dtype=np.float32)
    if kind == "strokes":
        ground = strokes(rng, ground)
    ground = np.clip(ground, 0, 1)
    if options.ink == "any":
        return ground
    room = 1 - options.contrast - 0.05  # such that there is a colour that is lighter, or darker, than any ground
    return ground * room if options.ink == "light" else 1 - (1 - ground) * room


def clouds(rng: np.random.Generator, height: int, width: int, cell: int) -> np.ndarray:
    """(height, width, 3) float32 in 0..1 that changes smoothly over some `cell` pixels."""
    corners = rng.uniform(0, 1) + rng.uniform(0.1, 0.5) * rng.standard_normal(
        (-(-height // cell) + 1, -(-width // cell) + 1, 3)
    )
    small = Image.fromarray(np.rint(255 * np.clip(corners, 0, 1)).astype(np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32) / 255


def strokes(rng: np.random.Generator, ground: np.ndarray) -> np.ndarray:
    """A ground with arcs and lines on it, one for every 2,000 pixels or so."""
    image = Image.fromarray(np.rint(255 * np.clip(ground, 0, 1)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    height, width = ground.shape[:2]
    for _ in range(int(rng.integers(1, max(2, height * width // 1000), endpoint=True))):
        colour = tuple(np.rint(255 * tinted(rng, rng.uniform(0.1, 0.9))).astype(int).tolist())
        x, y = int(rng.integers(width)), int(rng.integers(height))
        if rng.random() < 0.5:
            ends = rng.integers(-60, 60, 2, endpoint=True).tolist()
            draw.line((x, y, x + ends[0], y + ends[1]), fill=colour, width=1)
        else:
            radii = rng.integers(10, 60, 2).tolist()
            start, sweep = rng.uniform(0, 360), rng.uniform(40, 160)
            draw.arc(
                (x - radii[0], y - radii[1], x + radii[0], y + radii[1]), start, start + sweep, fill=colour, width=1
            )
    return np.asarray(image).astype(np.float32) / 255
