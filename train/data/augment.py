"""Training and test transforms of images: the one file that knows torchvision's transforms, albumentations and timm's policies."""

import os
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import InterpolationMode, v2

if TYPE_CHECKING:
    from train.data.images import ImageData, Transform

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # else importing it asks a server for its newest version
import albumentations as A
import cv2

cv2.setNumThreads(0)  # a data worker is one process on one core, and OpenCV's threads do not survive the fork

RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
POLICIES = {  # the sections that timm reads, by the name of a policy; it passes over others in silence
    "rand": (rand_augment_transform, ("m", "n", "p", "mstd", "mmax", "inc", "tweights", "t3a", "t3aw")),
    "augmix": (augment_and_mix_transform, ("m", "w", "d", "a", "b", "mstd")),
    **{name: (auto_augment_transform, ("mstd",)) for name in ("3a", "original", "originalr", "v0", "v0r")},
}


def train_transform(data: "ImageData") -> "Transform":
    """Pillow RGB -> (3, height, width) float32. Draws from torch, and for what is timm's from `random` and numpy."""
    crop_and_flip, jitter = LIBRARIES[data.augment](data)
    steps = [crop_and_flip]
    if data.auto_augment is not None:
        options: dict[str, Any] = {
            "translate_const": int(min(data.height, data.width) * 0.45),
            "img_mean": tuple(min(255, max(0, round(255 * value))) for value in data.mean),
        }
        if data.auto_augment.startswith("augmix"):
            options["translate_pct"] = 0.3  # as timm's own recipe has it
        if data.interpolation in RESAMPLE:  # else timm draws one each time
            options["interpolation"] = RESAMPLE[data.interpolation]
        steps.append(create_policy(data.auto_augment, options))
    if jitter is not None:
        steps.append(jitter)
    steps += to_tensor(data)
    if data.random_erasing:
        steps.append(RandomErasing(data.random_erasing, mode="pixel", device="cpu"))
    return v2.Compose(steps)


def test_transform(data: "ImageData") -> "Transform":
    """Pillow RGB -> (3, height, width) float32: the centre, resized. The same whatever library augments."""
    resample = RESAMPLE["bicubic" if data.interpolation == "random" else data.interpolation]
    return v2.Compose([Centre(data.height, data.width, data.crop_fraction, resample), *to_tensor(data)])


def to_tensor(data: "ImageData") -> list[Callable[[Any], Any]]:
    return [to_planes, v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std, inplace=True)]


def to_planes(image: Image.Image) -> torch.Tensor:
    # as Pillow has them, colours beside each other, normalising takes five times as long
    return v2.functional.pil_to_tensor(image).contiguous()


def create_policy(policy: str, options: dict[str, Any] | None = None) -> Callable[[Image.Image], Image.Image]:
    """timm's augmentation by a policy such as "rand-m9-mstd0.5-inc1".

    Raises:
        ValueError: timm knows no such policy, or would ignore a part of it.
    """
    name, *sections = policy.split("-")
    if name not in POLICIES:
        raise ValueError(f"{policy!r}: unknown policy {name!r}; must begin with one of {', '.join(POLICIES)}")
    create, allowed = POLICIES[name]
    for section in sections:
        key = section if section.startswith("t") else re.sub(r"\d+(\.\d+)?$", "", section)
        if key not in allowed or (key == section and not key.startswith("t")):
            raise ValueError(
                f"{policy!r}: {name} takes no {section!r}; allowed: {', '.join(allowed)}, with their numbers"
            )
    try:
        return create(policy, options)
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(f"{policy!r}: no policy of timm ({error})") from error


class Centre:
    """The centre of an image, `fraction` of the largest part that has the wanted shape, resized in one step."""

    def __init__(self, height: int, width: int, fraction: float, resample: Image.Resampling):
        self.height, self.width, self.fraction, self.resample = height, width, fraction, resample

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = self.fraction * min(image.height / self.height, image.width / self.width)
        top, left = (image.height - self.height * scale) / 2, (image.width - self.width * scale) / 2
        box = (max(left, 0), max(top, 0), min(image.width - left, image.width), min(image.height - top, image.height))
        return image.resize((self.width, self.height), self.resample, box)


class Albumentations:
    """albumentations' transforms as a function of a Pillow image that follows torch's random state."""

    def __init__(self, *transforms: A.BasicTransform | A.BaseCompose):
        self.compose = A.Compose(transforms)

    def __call__(self, image: Image.Image) -> Image.Image:
        seed = int(torch.randint(2**32, ()))
        # set_random_seed would give each transform the same numbers: only narrow crops would be mirrored
        self.compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        return Image.fromarray(self.compose(image=np.asarray(image))["image"])


class SmoothCrop(A.RandomResizedCrop):
    """albumentations' random crop, resized by Pillow: OpenCV does not smooth what it shrinks."""

    def apply(self, img: np.ndarray, crop_coords: tuple[int, int, int, int], **_: Any) -> np.ndarray:
        left, top, right, bottom = crop_coords
        height, width = self.size
        resample = RESAMPLE["bicubic" if self.interpolation == cv2.INTER_CUBIC else "bilinear"]
        return np.asarray(Image.fromarray(img[top:bottom, left:right]).resize((width, height), resample))


def torchvision_steps(data: "ImageData") -> tuple[Callable[[Any], Any], Callable[[Any], Any] | None]:
    """(crop and flip, colour jitter if there is one)"""

    def crop(interpolation: str) -> v2.Transform:
        return v2.RandomResizedCrop(
            (data.height, data.width), data.crop_scale, data.crop_ratio, InterpolationMode(interpolation)
        )

    crops = v2.RandomChoice([crop(name) for name in RESAMPLE]) if data.interpolation == "random" else None
    crop_and_flip = v2.Compose([crops or crop(data.interpolation), v2.RandomHorizontalFlip(data.horizontal_flip)])
    strength = data.color_jitter
    return crop_and_flip, v2.ColorJitter(strength, strength, strength) if strength else None


def albumentations_steps(data: "ImageData") -> tuple[Callable[[Any], Any], Callable[[Any], Any] | None]:
    """(crop and flip, colour jitter if there is one)"""

    def crop(interpolation: str) -> SmoothCrop:
        flag = cv2.INTER_CUBIC if interpolation == "bicubic" else cv2.INTER_LINEAR
        return SmoothCrop((data.height, data.width), data.crop_scale, data.crop_ratio, interpolation=flag)

    crops = A.OneOf([crop(name) for name in RESAMPLE], p=1) if data.interpolation == "random" else None
    crop_and_flip = Albumentations(crops or crop(data.interpolation), A.HorizontalFlip(p=data.horizontal_flip))
    strength = data.color_jitter
    return crop_and_flip, Albumentations(A.ColorJitter(strength, strength, strength, 0, p=1)) if strength else None


LIBRARIES = {"torchvision": torchvision_steps, "albumentations": albumentations_steps}
