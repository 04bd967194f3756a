"""Images with boxes around objects: what a detector is trained and tested on, and the keys that all such data share."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import ExifTags, Image
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from torch.utils.data import Dataset

from train.data.images import IMAGENET_MEAN, IMAGENET_STD, UPRIGHT, Colour, Data, Probability, ascending, colour, to_rgb
from train.data.masks import Size, pixels_of
from train.data.stream import DamagedExample

BACK = {5: 5, 6: 8, 7: 7, 8: 6}  # the EXIF orientations that exchange height and width, and what undoes them

Id = int | str
Target = dict[str, torch.Tensor]
BoxExample = tuple[torch.Tensor, Target]  # (3, height, width) float32 in 0..1; boxes, labels, image_id, perhaps masks
Augment = Callable[
    [np.ndarray, np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
]


@dataclass(frozen=True)
class Boxed:
    """What a detector is trained and tested on.

    Args:
        classes: the names of the categories; label 1 is the first of them, 0 is the background.
        category_ids: their ids in the file, in the same order.
        truth: COCO json of the test split: its ids and crowds, defaults filled in, without what was left out.
        left_out: how many annotations and images were left out or mended, by reason ("training: ...", "test: ...").
    """

    train: "BoxedImages"
    test: "BoxedImages"
    classes: tuple[str, ...]
    category_ids: tuple[Id, ...]
    truth: dict[str, Any]
    has_masks: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_damaged: int = 0
    left_out: dict[str, int] = field(default_factory=dict)


class DetectionData(Data):
    """What all kinds of images with boxes share: how they are read, and how they are augmented.

    Images keep their size; a detector resizes them itself. Training changes image, boxes and masks together, in this order: the
    image is made larger or smaller by a factor of `scale` (from, to); a part of `crop_size` pixels (one side of a square, or
    height and width; a smaller image stays as it is) is cut out, with `box_safe` one that holds a box where there is one; a
    mirror image, left to right or top to bottom, with the probabilities `horizontal_flip` and `vertical_flip`; a turn by 90,
    180 or 270 degrees with the probability `rotate90`; `color_jitter` is the strength of changes in brightness, contrast and
    saturation. Boxes are cut at the new edge. One stays if at least `min_visibility` of its area (0..1) is left and both of its
    sides have `min_box_size` pixels or more. Testing changes nothing.

    With `masks` the segmentations are read too. Images without objects are trained on unless `empty_images` is false. A box
    that lies in its image by less than half stops the reading; with `mostly_outside: drop` it is left out and counted.
    `check_files` opens every image at the start, so that what does not fit its annotations is counted before anything is
    trained. Transparent images are laid on `background`. Up to `max_damaged` examples may be unreadable.
    """

    masks: bool = False
    empty_images: bool = True
    mostly_outside: Literal["refuse", "drop"] = "refuse"
    check_files: bool = True
    scale: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    crop_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    box_safe: bool = True
    horizontal_flip: Probability = 0.5
    vertical_flip: Probability = 0.0
    rotate90: Probability = 0.0
    color_jitter: PositiveFloat | None = None
    min_visibility: Probability = 0.1
    min_box_size: NonNegativeFloat = 1.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    background: Colour = (255, 255, 255)
    max_damaged: NonNegativeInt = 10

    @field_validator("scale")
    @classmethod
    def range_ascends(cls, value: tuple[float, float]) -> tuple[float, float]:
        return ascending(value)

    @field_validator("background")
    @classmethod
    def background_is_a_colour(cls, value: Colour) -> Colour:
        return colour(value)


@dataclass(frozen=True)
class Objects:
    """The images of a split and what is in them, in a few arrays: a million Python objects would be copied into every worker.

    Image i has the objects `starts[i]` to `starts[i + 1]`.

    Args:
        sizes: (images, 2), height and width as the annotations mean them.
        boxes: (objects, 4) float32, corners x1 y1 x2 y2 in pixels.
        labels: (objects,) int64 from 1.
        masks: run lengths as pycocotools packs them, one object after the other; object j has the bytes
            `mask_starts[j]` to `mask_starts[j + 1]`. None: boxes alone are wanted.
    """

    image_ids: tuple[Id, ...]
    files: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None = None
    mask_starts: np.ndarray | None = None


class BoxedImages(Dataset[BoxExample]):
    """Images with the boxes, labels and perhaps masks of what is in them.

    Raises:
        DamagedExample: in reading one: the file is no image, or its size is not that of the annotations.
    """

    def __init__(self, objects: Objects, background: Colour, augment: Augment | None = None):
        self.objects, self.background, self.augment = objects, background, augment
        self.image_ids = objects.image_ids

    @property
    def aspect_ratios(self) -> np.ndarray:
        """Height / width of each image, before anything is cut out of it."""
        return self.objects.sizes[:, 0] / self.objects.sizes[:, 1]

    def __len__(self) -> int:
        return len(self.image_ids)

    def name_of(self, index: int) -> str:
        return os.fsdecode(self.objects.files[index])

    def __getitem__(self, index: int) -> BoxExample:
        index = range(len(self))[index]
        height, width = self.objects.sizes[index].tolist()
        try:
            image = np.asarray(open_as_annotated(self.name_of(index), (height, width), self.background))
        except Exception as error:  # there is hardly a type that no decoder raises for damaged data
            raise DamagedExample(self.name_of(index), error) from error
        here = slice(*self.objects.starts[index : index + 2].tolist())
        boxes, labels = self.objects.boxes[here].copy(), self.objects.labels[here].copy()
        masks = self.masks(here, (height, width)) if self.objects.masks is not None else None
        if self.augment is not None:
            image, boxes, kept, masks = self.augment(image, boxes, masks)
            labels = labels[kept]
        target = {
            "boxes": torch.from_numpy(boxes),
            "labels": torch.from_numpy(labels),
            "image_id": torch.tensor(index),
        }
        if masks is not None:
            target["masks"] = torch.from_numpy(masks)
        planes = torch.from_numpy(image.transpose(2, 0, 1).copy())
        return planes.float().div_(255), target

    def masks(self, here: slice, size: Size) -> np.ndarray:
        """(objects, height, width) uint8 of 0 and 1."""
        assert self.objects.masks is not None
        assert self.objects.mask_starts is not None
        starts = self.objects.mask_starts[here.start : here.stop + 1].tolist()
        masks = np.zeros((len(starts) - 1, *size), dtype=np.uint8)
        for mask, (start, stop) in zip(masks, pairwise(starts), strict=True):
            mask[:] = pixels_of(self.objects.masks[start:stop].tobytes(), size)
        return masks

    @staticmethod
    def collate(examples: Sequence[BoxExample]) -> tuple[list[torch.Tensor], list[Target]]:
        """Images of different sizes stay a list."""
        return [image for image, _ in examples], [target for _, target in examples]


def open_as_annotated(path: str | Path, size: Size, background: Colour) -> Image.Image:
    """The image as RGB, turned such that it has the size that its annotations give.

    That is upright, as its EXIF orientation says. Where only the pixels as stored have the size, a quarter turn away, the
    annotations were made by a program that does not know of the orientation, and it is not applied.

    Raises:
        ValueError: it has another size either way.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, on broken EXIF and large images, which are read all the same
        with Image.open(path) as image:
            before = exif_orientation(image) if image.format == "TIFF" else 1  # Pillow turns TIFF as it decodes it
            rgb = to_rgb(image, background)
            after = exif_orientation(image)
    as_stored = is_as_stored((rgb.height, rgb.width), before, after, size)
    if as_stored and before in BACK:
        return rgb.transpose(UPRIGHT[BACK[before]])
    return rgb.transpose(UPRIGHT[after]) if after in UPRIGHT and not as_stored else rgb


def is_as_stored(found: Size, before: int, after: int, size: Size) -> bool:
    """Whether annotations for an image of `size` belong to its pixels as stored, and not once upright.

    Args:
        found: the size of an image as it was opened.
        before, after: the EXIF orientations that were applied already, and that are not yet.

    Raises:
        ValueError: they belong to neither.
    """
    upright = found[::-1] if after in BACK else found
    stored = found[::-1] if before in BACK else found
    if size in (stored, upright):
        return size != upright
    also = f" ({stored[1]} and {stored[0]} as stored)" if stored != upright else ""
    raise ValueError(
        f"it is {upright[1]} pixels wide and {upright[0]} high{also}, its annotations say {size[1]} and {size[0]}"
    )


def size_in_header(image: Image.Image) -> tuple[Size, int, int]:
    """The first three arguments of is_as_stored for an image that is not decoded."""
    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it to look for EXIF behind the pixels
        return (image.height, image.width), 1, 1
    orientation = exif_orientation(image)
    # Pillow gives the size of a TIFF once upright
    return (image.height, image.width), *((orientation, 1) if image.format == "TIFF" else (1, orientation))


def exif_orientation(image: Image.Image) -> int:
    """1, upright, where there is none that can be read."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # EXIF that cannot be read turns nothing
        return 1
    return orientation if orientation in UPRIGHT else 1
