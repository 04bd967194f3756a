"""Images of any kind from class folders, always as right RGB, and what every image data set is made of."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, PositiveInt
from torch.utils.data import Dataset
from torchvision.transforms import v2

from train.schema import Node, nearest

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm")

Example = tuple[torch.Tensor, int]  # (channels, height, width) float32, normalised; label


@dataclass(frozen=True)
class Images:
    """What a classifier is trained and tested on."""

    train: Dataset[Example]
    test: Dataset[Example]
    classes: tuple[str, ...]
    num_channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Data(Node):
    """A data set by name; further keys are its own."""

    name: str

    @abstractmethod
    def load(self, seed: int) -> Images:
        """Reads the data. `seed` changes what is drawn during training, never the test split."""
        raise NotImplementedError(type(self).__name__)


class ImageFolder(Data):
    """Your own images: PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg.

    Training crops and flips at random (torchvision's RandomResizedCrop); testing resizes the short side and crops the centre.
    Classes are the training folders in the order of their names; the validation folder is read with that map.
    """

    name: Literal["image_folder"]
    path: str = Field(min_length=1)
    train: str = "train"
    val: str = "val"
    image_size: PositiveInt = 224
    crop_fraction: float = Field(0.875, gt=0, le=1)
    min_scale: float = Field(0.35, gt=0, le=1)
    horizontal_flip: float = Field(0.5, ge=0, le=1)
    background: tuple[int, int, int] = (255, 255, 255)

    def load(self, seed: int) -> Images:
        finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
        size = self.image_size
        train_transform = v2.Compose(
            [
                v2.RandomResizedCrop((size, size), scale=(self.min_scale, 1.0), antialias=True),
                v2.RandomHorizontalFlip(self.horizontal_flip),
                *finish,
            ]
        )
        test_transform = v2.Compose(
            [v2.Resize(round(size / self.crop_fraction), antialias=True), v2.CenterCrop((size, size)), *finish]
        )
        classes = class_names(Path(self.path) / self.train)
        train = FolderDataset(Path(self.path) / self.train, classes, train_transform, self.background)
        test = FolderDataset(Path(self.path) / self.val, classes, test_transform, self.background)
        return Images(train, test, classes, 3, size, size, IMAGENET_MEAN, IMAGENET_STD)


class FolderDataset(Dataset[Example]):
    """The images below FOLDER/CLASS/, labelled by a given map of classes.

    Raises:
        ValueError: the folder is missing, holds no image, or holds a class that the map lacks.
    """

    def __init__(self, folder: Path, classes: Sequence[str], transform: Any, background: tuple[int, int, int]):
        self.transform, self.background = transform, background
        label = {name: index for index, name in enumerate(classes)}
        for name in class_names(folder):
            if name not in label:
                wanted = nearest(name, classes)
                raise ValueError(
                    f"{folder}: class {name!r} is not among the training classes {', '.join(classes)}"
                    + (f"; did you mean {wanted}?" if wanted else "")
                )
        self.examples = [(path, label[name]) for name in class_names(folder) for path in image_files(folder / name)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        path, label = self.examples[index]
        return self.transform(read_image(path, self.background)), label


def class_names(folder: Path) -> tuple[str, ...]:
    """The class folders in a folder, by name; hidden ones and ones without images do not count.

    Raises:
        ValueError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; images are read from {folder}/CLASS/*.jpg")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = [name for name in names if image_files(folder / name)]
    if not names:
        raise ValueError(f"{folder}: no class folder with images ({' '.join(IMAGE_SUFFIXES)})")
    return tuple(names)


def image_files(folder: Path) -> list[Path]:
    """All images below a folder, sorted; nothing hidden."""
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if is_image_name(name)]
    return sorted(found)


def is_image_name(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def read_image(path: Path, background: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    """Any image file as upright RGB of 8 bits: EXIF orientation applied, transparency composed on `background`.

    Raises:
        ValueError: the file is damaged or no image.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(ImageOps.exif_transpose(image), background)
    except (OSError, UnidentifiedImageError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: no readable image ({error})") from error


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Grey, 16 bit, palette, CMYK, with or without transparency -> RGB."""
    if image.mode.startswith(("I", "F")):  # 16 bit grey; Pillow's own conversion would clip at 255
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I;16") or values.max(initial=0.0) > 255 else 255.0
        return Image.fromarray(np.clip(values * (255.0 / top), 0, 255).round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
