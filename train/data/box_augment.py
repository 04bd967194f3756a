"""Training transforms of images with boxes and masks: albumentations' draws, with boxes that stay exact.

albumentations (2.0.8) keeps boxes as float32 shares of the image, so that an edge moves by some 1e-4 of a pixel at every step,
and compares `area / (area + 1e-7)` with the visibility that is asked for, so that 1.0 drops whole boxes. Here boxes are float64
in pixels, reach out of the image until the last step, and are cut and judged once.
"""

import math
import random
from typing import Any

import numpy as np
import torch
from PIL import Image

from train.data.augment import RESAMPLE, A  # which keeps albumentations from asking a server for its newest version
from train.data.boxes import DetectionData
from train.data.masks import Size

NOISE = 1e-3  # pixels, or shares: what float32 may have taken from a box that is just large enough


def train_augment(data: DetectionData) -> "BoxAugment":
    """What the keys of the data say, as a function of pixels, boxes and masks."""
    transforms: list[A.BasicTransform] = []
    if data.scale != (1.0, 1.0):
        transforms.append(Zoom(data.scale))
    if data.crop_size is not None:
        size = data.crop_size if isinstance(data.crop_size, tuple) else (data.crop_size, data.crop_size)
        transforms.append(Crop(size, data.box_safe))
    if data.horizontal_flip:
        transforms.append(Mirror(p=data.horizontal_flip))
    if data.vertical_flip:
        transforms.append(UpsideDown(p=data.vertical_flip))
    if data.rotate90:
        transforms.append(QuarterTurns(p=data.rotate90))
    if data.color_jitter:
        transforms.append(A.ColorJitter(data.color_jitter, data.color_jitter, data.color_jitter, 0, p=1))
    return BoxAugment(transforms, data.min_visibility, data.min_box_size)


class BoxAugment:
    """Transforms of albumentations that follow torch's random state, and what becomes of the boxes.

    Args:
        transforms: of which each that moves pixels is one of this file.
        min_visibility: the share (0..1) of a box that must be left.
        min_box_size: the pixels that both sides of a box must have.
    """

    def __init__(self, transforms: list[A.BasicTransform], min_visibility: float, min_box_size: float):
        self.compose = A.Compose(transforms)
        self.min_visibility, self.min_box_size = min_visibility, min_box_size

    def __call__(
        self, image: np.ndarray, boxes: np.ndarray, masks: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The image, the boxes that are left, which of those given they are, and their masks.

        Args:
            image: (height, width, 3) uint8.
            boxes: (objects, 4) float32, corners in pixels.
            masks: (objects, height, width) uint8.
        """
        seed = int(torch.randint(2**32, ()))
        # set_random_seed would give each transform the same numbers
        self.compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        some = masks if masks is not None and len(masks) else None
        drawn = self.compose(image=image, bboxes=boxes.astype(np.float64), masks=some)
        image, whole = drawn["image"], drawn["bboxes"]
        boxes, kept = self.visible(whole, image.shape[:2])
        if masks is not None:
            masks = drawn["masks"][kept] if some is not None else np.zeros((0, *image.shape[:2]), dtype=np.uint8)
        return image, boxes, kept, masks

    def visible(self, whole: np.ndarray, size: Size) -> tuple[np.ndarray, np.ndarray]:
        """What an image of this size shows of boxes that may reach out of it, (left, 4) float32, and which of them are left."""
        height, width = size
        cut = np.clip(whole, 0, [width, height, width, height])
        sides = cut[:, 2:] - cut[:, :2]
        enough = sides.prod(axis=1) >= (self.min_visibility - 1e-9) * (whole[:, 2:] - whole[:, :2]).prod(axis=1)
        boxes = cut.astype(np.float32)
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        kept = np.flatnonzero(enough & has_area & (sides >= self.min_box_size - NOISE).all(axis=1))
        return boxes[kept], kept


class Zoom(A.DualTransform):
    """The image made larger or smaller by a factor; resized by Pillow, since OpenCV does not smooth what it shrinks."""

    def __init__(self, scale: tuple[float, float]):
        super().__init__(p=1)
        self.scale = scale

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        factor = self.py_random.uniform(*self.scale)
        return {"size": tuple(max(1, round(side * factor)) for side in params["shape"][:2])}

    def apply(self, img: np.ndarray, size: Size, **_: Any) -> np.ndarray:
        return np.asarray(Image.fromarray(img).resize(size[::-1], RESAMPLE["bilinear"]))

    def apply_to_mask(self, mask: np.ndarray, size: Size, **_: Any) -> np.ndarray:
        return np.asarray(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))

    def apply_to_bboxes(self, bboxes: np.ndarray, size: Size, shape: tuple[int, ...], **_: Any) -> np.ndarray:
        (height, width), (old_height, old_width) = size, shape[:2]
        # a product of whole numbers first: what ends at the edge still does
        return bboxes * [width, height, width, height] / [old_width, old_height, old_width, old_height]


class Crop(A.DualTransform):
    """A part of the image; with `around_a_box` one that holds a box, drawn by chance, as far as there is room for it."""

    def __init__(self, size: Size, around_a_box: bool):
        super().__init__(p=1)
        self.size, self.around_a_box = size, around_a_box

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        boxes = data["bboxes"]
        box = boxes[self.py_random.randrange(len(boxes))] if self.around_a_box and len(boxes) else None
        here = []
        for axis, (side, length) in enumerate(zip(params["shape"][:2], self.size, strict=True)):
            length = min(side, length)
            first, last = 0, side - length
            if box is not None:
                start, end = box[1 - axis], box[3 - axis]
                # the part holds the box, or lies in it if the box is the larger one
                bounds = sorted((math.ceil(end) - length, math.floor(start)))
                first, last = (min(max(bound, 0), side - length) for bound in bounds)
            corner = self.py_random.randint(first, last)
            here.append(slice(corner, corner + length))
        return {"here": tuple(here)}

    def apply(self, img: np.ndarray, here: tuple[slice, slice], **_: Any) -> np.ndarray:
        return img[here]

    def apply_to_bboxes(self, bboxes: np.ndarray, here: tuple[slice, slice], **_: Any) -> np.ndarray:
        y, x = here[0].start, here[1].start
        return bboxes - [x, y, x, y]


class Mirror(A.HorizontalFlip):
    def apply_to_bboxes(self, bboxes: np.ndarray, shape: tuple[int, ...], **_: Any) -> np.ndarray:
        x1, y1, x2, y2 = bboxes.T
        return np.stack([shape[1] - x2, y1, shape[1] - x1, y2], axis=1)


class UpsideDown(A.VerticalFlip):
    def apply_to_bboxes(self, bboxes: np.ndarray, shape: tuple[int, ...], **_: Any) -> np.ndarray:
        x1, y1, x2, y2 = bboxes.T
        return np.stack([x1, shape[0] - y2, x2, shape[0] - y1], axis=1)


class QuarterTurns(A.RandomRotate90):
    """One, two or three turns, against the clock."""

    def get_params(self) -> dict[str, int]:
        return {"factor": self.py_random.randint(1, 3)}

    def apply_to_bboxes(self, bboxes: np.ndarray, factor: int, shape: tuple[int, ...], **_: Any) -> np.ndarray:
        height, width = shape[:2]
        for _turn in range(factor):
            x1, y1, x2, y2 = bboxes.T
            bboxes = np.stack([y1, width - x2, y2, width - x1], axis=1)
            height, width = width, height
        return bboxes
