"""Images of any kind from class folders, always as right RGB, and what every image data set is made of."""

import os
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from torch.utils.data import Dataset

from train.data.stream import DamagedExample
from train.schema import Node, nearest

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp", ".avif", ".gif"),
    *(".jp2", ".pbm", ".pgm", ".ppm", ".pnm"),
)

# what turns an image upright, by its EXIF orientation
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def without_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(f"each name must be there once, and {listed(repeated)} is there again")
    return names


def listed(names: Sequence[str]) -> str:
    """At most ten names in a row."""
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:10])}, ... ({len(names)})"


Example = tuple[torch.Tensor, int]  # (channels, height, width) float32, normalised; label
Transform = Callable[[Image.Image], torch.Tensor]
Colour = tuple[int, int, int]
Share = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(without_repeats)]


def ascending(value: tuple[Any, Any]) -> tuple[Any, Any]:
    if value[0] > value[1]:
        raise ValueError(f"{list(value)}: the first number must not be greater than the second")
    return value


def colour(value: Colour) -> Colour:
    if not all(0 <= channel <= 255 for channel in value):
        raise ValueError(f"{list(value)}: red, green and blue must lie in 0..255")
    return value


@dataclass(frozen=True)
class Images:
    """What a classifier is trained and tested on. `max_damaged` examples may turn out to be unreadable."""

    train: Dataset[Example]
    test: Dataset[Example]
    classes: tuple[str, ...]
    num_channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_damaged: int = 0


class Data(Node):
    """A data set by name; further keys are its own."""

    name: str

    @abstractmethod
    def load(self, seed: int) -> Any:
        """Reads the data. `seed` changes what is drawn during training, never the test split."""
        raise NotImplementedError(type(self).__name__)


class ImageData(Data):
    """What all kinds of RGB images share: their size, and how they are augmented.

    Training crops a part of the image, `crop_scale` of its area and with sides as `crop_ratio`, and resizes it to `image_size`
    (one side of a square, or height and width). Then, each if given: a mirror image with the probability `horizontal_flip`;
    `auto_augment`, a policy as timm writes it ("rand-m9-mstd0.5-inc1", or DeiT III's "3a"); `color_jitter`, the strength of changes
    in brightness, contrast and saturation; `random_erasing`, the probability that a rectangle becomes noise. `augment` names the
    library that draws crop, mirror image and colours. Testing takes the centre, `crop_fraction` of what fits, with either library.
    `interpolation: random` is one of the other two for each training image, and bicubic in testing.

    Transparent images are laid on `background`. Up to `max_damaged` examples may be unreadable.
    """

    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    crop_fraction: Share = 0.875
    augment: Literal["torchvision", "albumentations"] = "torchvision"
    crop_scale: tuple[Share, Share] = (0.35, 1.0)
    crop_ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"
    horizontal_flip: Probability = 0.5
    color_jitter: PositiveFloat | None = None
    auto_augment: str | None = None
    random_erasing: Probability = 0.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    background: Colour = (255, 255, 255)
    max_damaged: NonNegativeInt = 10

    @field_validator("crop_scale", "crop_ratio")
    @classmethod
    def range_ascends(cls, value: tuple[float, float]) -> tuple[float, float]:
        return ascending(value)

    @field_validator("background")
    @classmethod
    def background_is_a_colour(cls, value: Colour) -> Colour:
        return colour(value)

    @field_validator("auto_augment")
    @classmethod
    def policy_is_known(cls, value: str | None) -> str | None:
        if value is not None:
            from train.data.augment import create_policy

            create_policy(value)
        return value

    @property
    def height(self) -> int:
        return self.image_size if isinstance(self.image_size, int) else self.image_size[0]

    @property
    def width(self) -> int:
        return self.image_size if isinstance(self.image_size, int) else self.image_size[1]

    def train_transform(self) -> Transform:
        from train.data.augment import train_transform  # here: importing albumentations takes two seconds

        return train_transform(self)

    def test_transform(self) -> Transform:
        from train.data.augment import test_transform

        return test_transform(self)

    def images(self, train: "LabelledImages", test: "LabelledImages", classes: Sequence[str]) -> Images:
        """What a kind of data has read, with what all kinds have.

        Raises:
            ValueError: one of the two is empty.
        """
        for split, data in (("training", train), ("test", test)):
            if not len(data):
                raise ValueError(f"data.name = {self.name!r}: there is no {split} example")
        return Images(
            train, test, tuple(classes), 3, self.height, self.width, self.mean, self.std, max_damaged=self.max_damaged
        )


class LabelledImages(Dataset[Example]):
    """Images that are read one by one; a kind of data says where they are.

    Raises:
        DamagedExample: in reading one, whatever is wrong with it.
    """

    def __init__(self, labels: Sequence[int] | np.ndarray, transform: Transform, background: Colour):
        self.labels, self.transform, self.background = np.asarray(labels, dtype=np.int64), transform, background

    @abstractmethod
    def name_of(self, index: int) -> str:
        """How a person finds this example."""

    @abstractmethod
    def source_of(self, index: int) -> str | BinaryIO | Image.Image:
        """A path, an open file or an image that is decoded already."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        try:
            image = decode(self.source_of(index), self.background)
        except Exception as error:  # there is hardly a type that no decoder raises for damaged data
            raise DamagedExample(self.name_of(index), error) from error
        return self.transform(image), int(self.labels[index])


class ImageFolder(ImageData):
    """Your own images: PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg.

    Classes are the training folders in the order of their names; the validation folder is read with that map.
    """

    name: Literal["image_folder"]
    path: str = Field(min_length=1)
    train: str = "train"
    val: str = "val"

    def load(self, seed: int) -> Images:
        train, val = Path(self.path) / self.train, Path(self.path) / self.val
        files = class_files(train)
        classes = tuple(files)
        return self.images(
            FolderDataset(train, files, classes, self.train_transform(), self.background),
            FolderDataset(val, class_files(val), classes, self.test_transform(), self.background),
            classes,
        )


class FolderDataset(LabelledImages):
    """The images below FOLDER/CLASS/, labelled by a given map of classes.

    Raises:
        ValueError: there is a class that the map lacks.
    """

    def __init__(
        self,
        folder: Path,
        files: dict[str, list[str]],
        classes: Sequence[str],
        transform: Transform,
        background: Colour,
    ):
        check_classes(str(folder), files, classes)
        label_of = {name: label for label, name in enumerate(classes)}
        super().__init__([label_of[name] for name, paths in files.items() for _ in paths], transform, background)
        # one array of bytes: a million strings would be copied into every data worker as they are counted
        self.files = np.array([os.fsencode(path) for paths in files.values() for path in paths])

    def name_of(self, index: int) -> str:
        return os.fsdecode(self.files[index])

    def source_of(self, index: int) -> str:
        return self.name_of(index)


def class_files(folder: Path) -> dict[str, list[str]]:
    """The paths of the images of each class folder, by name; hidden folders and ones without images do not count.

    Raises:
        ValueError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; images are read from {folder}/CLASS/*.jpg")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {name: image_files(folder / name) for name in names}
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise ValueError(f"{folder}: no class folder with images ({' '.join(IMAGE_SUFFIXES)})")
    return found


def image_files(folder: Path) -> list[str]:
    """The paths of all images below a folder, sorted; nothing hidden, and no folder twice where links lead in circles."""
    found = []
    visited = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if (place := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(parent, name) for name in files if is_image_name(name)]
    return sorted(found)


def refuse(error: OSError) -> None:
    """A folder that cannot be read is an error; os.walk would leave it out in silence."""
    raise ValueError(f"{error.filename}: no readable folder ({error.strerror})") from error


def is_image_name(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def check_classes(where: str, names: Sequence[str] | dict[str, Any], classes: Sequence[str]) -> None:
    """Holds class names against those of the training data.

    Raises:
        ValueError: there are others.
    """
    for name in names:
        if name not in classes:
            wanted = nearest(name, classes)
            raise ValueError(
                f"{where}: class {name!r} is not among the training classes {listed(classes)}"
                + (f"; did you mean {wanted}?" if wanted else "")
            )


def check_labels(where: str, labels: np.ndarray, num_classes: int, name_of: Callable[[int], str]) -> None:
    """Holds labels against the number of classes.

    Raises:
        ValueError: there are labels that belong to no class.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise ValueError(
            f"{where}: label {labels[wrong[0]]} of {name_of(int(wrong[0]))} must lie in 0..{num_classes - 1}, the classes "
            f"there are ({len(wrong)} of {len(labels)} examples do not)"
        )


def read_image(path: str | Path, background: Colour = (255, 255, 255)) -> Image.Image:
    """Any image file as upright RGB of 8 bits: EXIF orientation applied, transparency composed on `background`.

    Raises:
        DamagedExample: the file is damaged, no image, or of a size that no honest image has.
    """
    try:
        return decode(path, background)
    except Exception as error:  # there is hardly a type that no decoder raises for damaged data
        raise DamagedExample(str(path), error) from error


def decode(source: str | Path | BinaryIO | Image.Image, background: Colour) -> Image.Image:
    """An image, or the first one of several, as upright RGB."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, on broken EXIF and large images, which are read all the same
        if isinstance(source, Image.Image):
            return upright_rgb(source, background)
        with Image.open(source) as image:
            return upright_rgb(image, background)


def upright_rgb(image: Image.Image, background: Colour) -> Image.Image:
    rgb = to_rgb(image, background)
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # EXIF that cannot be read turns nothing
        return rgb
    return rgb.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else rgb


def to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    """Grey, 16 bit, palette, CMYK, Lab, with or without transparency -> RGB."""
    if image.mode.startswith(("I", "F")):
        return deep_grey_to_rgb(image, background)
    if image.mode == "LAB":  # which Pillow converts by colour profiles only
        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(lab, rgb, "LAB", "RGB").apply(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def deep_grey_to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    """Grey of more than 8 bits; Pillow's own conversion would clip at 255.

    Pillow hides how deep an `I` or `F` image was, so there the brightest pixel tells whether white is 1, 255, 65535 or more.
    """
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    brightest = values.max(initial=0.0)
    if image.mode.startswith("I;16") or image.format == "PPM":
        white = 65535.0
    else:
        whites = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        white = next((white for white in whites if brightest <= white), float(brightest))
    grey = np.clip(values * (255 / white), 0, 255).round().astype(np.uint8)
    rgb = Image.fromarray(grey).convert("RGB")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        rgb.paste(background, mask=Image.fromarray(values == transparent))
    return rgb
