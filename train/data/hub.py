"""Image data sets of the Hugging Face hub, or of a local folder that its `datasets` package can read."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from train.data.images import ImageData, Images, LabelledImages, Transform, check_classes, check_labels


class Hub(ImageData):
    """A data set by its name on the hub, or a folder: one made by `save_to_disk`, or of parquet or image files.

    `subset` and `revision` as the hub has them; `train` and `val` are splits. The columns of images and labels are found where only
    one can be meant. Classes are the names that the labels carry; without names they are 0 to the highest number, or, for labels
    that are text, the texts in their order.
    """

    name: Literal["hub"]
    path: str = Field(min_length=1)
    subset: str | None = None
    revision: str | None = None
    train: str = "train"
    val: str = "validation"
    image_key: str | None = None
    label_key: str | None = None

    def load(self, seed: int) -> Images:
        train, val = self.read(self.train), self.read(self.val)
        classes = class_names(train, self.label_key)
        return self.images(
            HubDataset(train, self, self.train, classes, self.train_transform()),
            HubDataset(val, self, self.val, classes, self.test_transform()),
            classes,
        )

    def read(self, split: str) -> Any:
        """The split as `datasets.Dataset`.

        Raises:
            ValueError: it cannot be read, with what `datasets` says.
        """
        datasets = import_datasets()
        where = f"data.path = {self.path!r}, split {split!r}"
        try:
            if is_saved(Path(self.path)):
                if self.subset or self.revision:
                    raise ValueError("what save_to_disk made has no subset and no revision")
                found = datasets.load_from_disk(self.path)
                if isinstance(found, datasets.DatasetDict):
                    if split not in found:
                        raise ValueError(f"there is no such split; there are {', '.join(found)}")
                    found = found[split]
            else:
                found = datasets.load_dataset(self.path, name=self.subset, revision=self.revision, split=split)
        except Exception as error:  # each of datasets, pyarrow, the hub and the network has types of its own
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
        return found


class HubDataset(LabelledImages):
    """Reads each image from the table of a split, undecoded, so that it is decoded as every other image is."""

    def __init__(self, table: Any, options: Hub, split: str, classes: tuple[str, ...], transform: Transform):
        self.where = f"{options.path}[{split}]"
        self.image_key = image_column(table, options.image_key)
        labels = numbers(table, label_column(table, options.label_key), classes, self.where)
        super().__init__(labels, transform, options.background)
        undecoded = import_datasets().Image(decode=False)
        self.table = table.select_columns([self.image_key]).cast_column(self.image_key, undecoded)

    def name_of(self, index: int) -> str:
        return f"{self.where}[{index}]"

    def source_of(self, index: int) -> str | io.BytesIO:
        image = self.table[int(index)][self.image_key]
        return io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]


def import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data.name = 'hub' needs the package `datasets`: pip install 'relpos2d[hub]'") from error
    return datasets


def is_saved(path: Path) -> bool:
    """Whether save_to_disk made this folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def image_column(table: Any, key: str | None) -> str:
    """The column of images.

    Raises:
        ValueError: it is missing, or several may be meant.
    """
    datasets = import_datasets()
    images = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
    return one_column("image_key", key, images, table)


def label_column(table: Any, key: str | None) -> str:
    """The column of labels: the one whose numbers have names, or the one that is called label.

    Raises:
        ValueError: it is missing, holds no labels, or several may be meant.
    """
    datasets = import_datasets()
    with_names = [name for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)]
    plain = [name for name, feature in table.features.items() if is_plain_label(feature)]
    if key is not None:
        return one_column("label_key", key, with_names + plain, table)
    return one_column("label_key", key, with_names or [name for name in plain if name in ("label", "labels")], table)


def is_plain_label(feature: Any) -> bool:
    """Whole numbers or text."""
    kind = str(getattr(feature, "dtype", ""))
    return type(feature).__name__ == "Value" and kind.startswith(("int", "uint", "string", "large_string"))


def one_column(option: str, key: str | None, found: list[str], table: Any) -> str:
    columns = ", ".join(f"{name} ({feature})" for name, feature in table.features.items())
    if key is not None and key not in found:
        raise ValueError(f"data.{option} = {key!r}: no such column of {option.partition('_')[0]}s; there are {columns}")
    if key is None and len(found) != 1:
        raise ValueError(f"data.{option}: must be named, since {len(found)} columns may be meant; there are {columns}")
    return found[0] if key is None else key


def class_names(table: Any, key: str | None) -> tuple[str, ...]:
    column = label_column(table, key)
    names = getattr(table.features[column], "names", None)
    if names:
        return tuple(names)
    values = np.unique(column_values(table, column))
    if values.dtype.kind in "iu":
        return tuple(str(number) for number in range(int(values.max(initial=-1)) + 1))
    return tuple(str(value) for value in values)


def numbers(table: Any, column: str, classes: tuple[str, ...], where: str) -> np.ndarray:
    """The label of each example as the number of its class.

    Raises:
        ValueError: there is a label that is no class, or an example without a label.
    """
    values = column_values(table, column)
    names = getattr(table.features[column], "names", None)
    if names is None and values.dtype.kind not in "iu":
        names, values = np.unique(values, return_inverse=True)
    num_labels = len(classes) if names is None else len(names)
    check_labels(where, values, num_labels, lambda index: f"{where}[{index}]")
    if names is None:
        return values
    names = [str(name) for name in names]
    check_classes(where, names, classes)
    number_of = {name: number for number, name in enumerate(classes)}
    return np.array([number_of[name] for name in names])[values]  # a split may count in another order


def column_values(table: Any, column: str) -> np.ndarray:
    values = table.select_columns([column]).with_format("arrow")[:][column]
    if values.null_count:
        raise ValueError(f"column {column!r}: {values.null_count} of {len(table)} examples have no label")
    return np.asarray(values.to_pylist())
