"""Any data set that timm's `create_dataset` can read by number."""

import io
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import timm.data
from PIL import Image
from pydantic import PositiveInt, model_validator

from train.data.images import ImageData, Images, LabelledImages, Names, Transform, check_classes, check_labels

STREAMS = {"wds": "data=image_shards", "hfids": "data=hub", "tfds": "data=hub (if the hub has the data)"}


class TimmData(ImageData):
    """A data set by timm's name for it: `torch/cifar10`, `hfds/NAME`, or "" for folders or tars of images in `root`.

    `root` is the folder of all splits, or where downloads are kept. `train` and `val` are splits: for folders the names of folders
    in `root` (or of files: `train.tar`), where timm also knows `val` by validation, valid, eval. Classes are the training split's,
    by the names that timm finds; hidden folders are none. `classes` are names for the numbers of a data set without names, or
    others than it has; `num_classes` says only how many there are. `class_map` is a file of timm's kind, for folders, tars and
    `hfds/`: a class that it lacks is left out.
    """

    name: Literal["timm"]
    dataset: str
    root: str | None = None
    train: str = "train"
    val: str = "validation"
    download: bool = False
    class_map: str | None = None
    classes: Names | None = None
    num_classes: PositiveInt | None = None

    @model_validator(mode="after")
    def timm_can(self) -> "TimmData":
        if self.kind in STREAMS:
            raise ValueError(
                f"dataset = {self.dataset!r}: timm reads {self.kind}/ as a stream, which cannot be continued at the same "
                f"example; {STREAMS[self.kind]} reads such data by number"
            )
        if self.root is None and self.kind != "hfds":
            raise ValueError(f"root: missing; dataset = {self.dataset!r} needs a folder")
        if self.download and self.kind != "torch":
            raise ValueError(f"download = true: is for torch/ only, and dataset = {self.dataset!r}")
        if self.class_map is not None and self.kind == "torch":
            raise ValueError(f"class_map = {self.class_map!r}: timm takes none for dataset = {self.dataset!r}")
        if self.classes is not None and self.num_classes is not None:
            raise ValueError(f"num_classes = {self.num_classes}: follows from classes; give one of the two")
        return self

    @property
    def kind(self) -> str:
        prefix, slash, _ = self.dataset.partition("/")
        return prefix.lower() if slash else ""

    @property
    def is_folder(self) -> bool:
        """Whether the splits are folders, or tars, in `root`."""
        return self.kind not in ("torch", "hfds") or self.dataset.lower() in ("torch/folder", "torch/image_folder")

    def load(self, seed: int) -> Images:
        train, val = self.create(self.train), self.create(self.val)
        names = visible(names_of(train))
        labels = labels_of(train, names, f"data.train = {self.train!r}")
        classes = self.class_names(names, labels)
        val_labels = labels_of(val, names, f"data.val = {self.val!r}")
        return self.images(
            TimmDataset(train, labels, self, self.train, classes, self.train_transform()),
            TimmDataset(val, val_labels, self, self.val, classes, self.test_transform()),
            classes,
        )

    def create(self, split: str) -> Any:
        """timm's own object.

        Raises:
            ValueError: timm cannot make it, with what it says; or would read everything in `root` for want of the split.
        """
        where = f"data.dataset = {self.dataset!r}, root {self.root!r}, split {split!r}"
        if self.is_folder and not os.path.exists(self.root or ""):
            raise ValueError(f"data.root = {self.root!r}: no such folder or tar")
        try:
            data = timm.data.create_dataset(
                self.dataset,
                root=self.root,
                split=split,
                class_map=self.class_map,  # type: ignore[arg-type]  # a file too
                download=self.download,
            )
        except Exception as error:  # timm asserts, and passes on what five packages raise
            raise ValueError(f"{where}: {' '.join(str(error).split()) or type(error).__name__}") from error
        source = getattr(data, "reader", data)
        if self.is_folder and os.path.realpath(source.root) == os.path.realpath(self.root or ""):
            raise ValueError(f"{where}: there is no such folder in it, and timm would read all splits as one")
        if hasattr(source, "cache_tarfiles"):
            source.cache_tarfiles = False  # processes would share the position in an open file
        return data

    def class_names(self, names: Sequence[str] | None, labels: np.ndarray) -> tuple[str, ...]:
        if self.classes is not None:
            return self.classes
        found = list(names) if names is not None else []
        num_classes = self.num_classes or len(found) or int(labels.max(initial=-1)) + 1
        return tuple(found + [str(number) for number in range(len(found), num_classes)])


class TimmDataset(LabelledImages):
    """Reads each image through timm, undecoded where it can be, so that it is decoded as every other image is."""

    def __init__(
        self,
        data: Any,
        labels: np.ndarray,
        options: TimmData,
        split: str,
        classes: Sequence[str],
        transform: Transform,
    ):
        self.data, self.where = data, f"{options.dataset or options.root}[{split}]"
        self.numbers = np.flatnonzero(labels != HIDDEN)
        super().__init__(labels[self.numbers], transform, options.background)
        check_labels(self.where, self.labels, len(classes), self.name_of)

    def name_of(self, index: int) -> str:
        number = int(self.numbers[index])
        reader = getattr(self.data, "reader", None)
        return f"{self.where}[{number}]" + (f" {reader.filename(number, absolute=True)}" if reader else "")

    def source_of(self, index: int) -> str | io.BytesIO | Image.Image:
        number = int(self.numbers[index])
        if hasattr(self.data, "reader"):
            with self.data.reader[number][0] as file:
                return io.BytesIO(file.read())
        if hasattr(self.data, "samples"):
            return self.data.samples[number][0]
        return self.data[number][0]


HIDDEN = np.iinfo(np.int64).min  # the label of what stands in a hidden folder


def names_of(data: Any) -> list[str] | None:
    """The class names of a data set of timm's by number, if it knows them."""
    source = getattr(data, "reader", data)
    numbers = getattr(source, "class_to_idx", None) or getattr(source, "class_name_to_idx", None)
    if hasattr(source, "classes"):
        found = [name if isinstance(name, str) else ", ".join(name) for name in source.classes]
        count = Counter(found)  # ImageNet has two cranes
        return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(found)]
    if not numbers:
        return None
    name_of = {number: name for name, number in numbers.items()}
    return [str(name_of.get(number, number)) for number in range(max(name_of) + 1)]


def visible(names: list[str] | None) -> list[str] | None:
    return names and [name for name in names if not name.startswith(".")]


def labels_of(data: Any, classes: Sequence[str] | None, where: str) -> np.ndarray:
    """The label of each example as the number of its class in the training split.

    Raises:
        ValueError: a class is not in the training split, or timm does not tell labels without reading the images.
    """
    source = getattr(data, "reader", data)
    if hasattr(source, "targets"):
        found = source.targets
    elif hasattr(source, "samples"):
        found = [label for _, label in source.samples]
    elif hasattr(source, "iter_targets"):
        found = list(source.iter_targets())
    else:
        raise ValueError(f"{where}: {type(source).__name__} does not tell the labels of its images")
    labels, names = np.asarray(found), names_of(data)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{where}: the labels of {type(source).__name__} must be one whole number an image")
    if classes is None or names is None:
        return labels.astype(np.int64)
    check_classes(where, visible(names) or [], classes)
    check_labels(where, labels, len(names), str)
    number_of = {name: number for number, name in enumerate(classes)}
    return np.array([number_of.get(name, HIDDEN) for name in names])[labels]
