"""Images in tar shards as webdataset writes them, read exactly: any example by its number, in any order, by any process."""

import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from train.data.fetch import cache_folder, write_atomically
from train.data.images import (
    Colour,
    ImageData,
    Images,
    LabelledImages,
    Names,
    Transform,
    check_classes,
    check_labels,
    is_image_name,
    without_repeats,
)

BLOCK = 512  # a tar consists of blocks and ends with empty ones

Entry = tuple[int, int, int, bytes, bytes]
COLUMNS = ("shard_of", "offsets", "sizes", "names", "labels")  # of the entries, and of an index


class ImageShards(ImageData):
    """Your own images in tar shards: `train: "train-{000000..000127}.tar"`, `val: "val-*.tar"`, in the folder `path`.

    The members of a shard with the same name up to its first dot are one example: `0001.jpg` with its label in `0001.cls`, or in
    `0001.json` under `label_key`. A label is the number of a class, or its name. `classes` are the names, or a file with one a
    line; without them the classes are 0 to the highest number, or the names in their order, as found in the training shards.

    Shards must be local, uncompressed files. Their headers are read once, and remembered in the cache folder until a shard changes;
    after that an example is read from its place, so that order, resuming and processes are as exact as for folders.
    """

    name: Literal["image_shards"]
    path: str | None = None
    train: str = Field(min_length=1)
    val: str = Field(min_length=1)
    classes: Names | str | None = None
    label_key: str | None = None

    def load(self, seed: int) -> Images:
        train, val = (read_index(find_shards(pattern, self.path), self.label_key) for pattern in (self.train, self.val))
        names = self.class_names(train)
        labels = [index.numbers(names, pattern) for index, pattern in ((train, self.train), (val, self.val))]
        return self.images(
            ShardDataset(train, labels[0], self.train_transform(), self.background),
            ShardDataset(val, labels[1], self.test_transform(), self.background),
            names,
        )

    def class_names(self, train: "Index") -> tuple[str, ...]:
        if isinstance(self.classes, tuple):
            return self.classes
        if self.classes is not None:
            return read_class_names(Path(self.path or "", self.classes))
        if train.numbered:
            return tuple(str(number) for number in range(int(train.labels.astype(np.int64).max()) + 1))
        return tuple(os.fsdecode(label) for label in np.unique(train.labels))


@dataclass
class Index:
    """Where the examples of some shards are, one an entry. Arrays, since a million objects would be copied into each worker."""

    shards: np.ndarray  # paths
    shard_of: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    names: np.ndarray
    labels: np.ndarray

    @property
    def numbered(self) -> bool:
        return all(re.fullmatch(rb"-?\d+", label) for label in np.unique(self.labels))

    def name_of(self, index: int) -> str:
        return f"{os.fsdecode(self.shards[self.shard_of[index]])}/{os.fsdecode(self.names[index])}"

    def numbers(self, classes: Sequence[str], where: str) -> np.ndarray:
        """The label of each example as the number of its class.

        Raises:
            ValueError: there are labels that belong to no class.
        """
        if self.numbered:
            labels = self.labels.astype(np.int64)
            check_labels(where, labels, len(classes), self.name_of)
            return labels
        found, inverse = np.unique(self.labels, return_inverse=True)
        names = [os.fsdecode(label) for label in found]
        check_classes(where, names, classes)
        number_of = {name: number for number, name in enumerate(classes)}
        return np.array([number_of[name] for name in names])[inverse]


class ShardDataset(LabelledImages):
    """Reads each image from its place in a shard."""

    def __init__(self, index: Index, labels: np.ndarray, transform: Transform, background: Colour):
        super().__init__(labels, transform, background)
        self.index = index

    def name_of(self, index: int) -> str:
        return self.index.name_of(index)

    def source_of(self, index: int) -> io.BytesIO:
        path, size = os.fsdecode(self.index.shards[self.index.shard_of[index]]), int(self.index.sizes[index])
        # opened each time: there may be more shards than a process may have files, and processes share no position
        with open(path, "rb") as shard:
            shard.seek(int(self.index.offsets[index]))
            content = shard.read(size)
        if len(content) < size:
            raise ValueError(f"{path} ends too early")
        return io.BytesIO(content)


def find_shards(pattern: str, folder: str | None) -> list[Path]:
    """The files of a pattern with braces ({000..127}, {a,b}) and wildcards, sorted.

    Raises:
        ValueError: there is none, or one that the braces name is missing.
    """
    found = set()
    for name in expand_braces(pattern):
        is_there = os.path.isfile(os.path.join(folder or "", name))
        matches = [name] if is_there else glob(name, root_dir=folder, recursive=True)
        if not matches:
            where = f" in {folder}" if folder else ""
            raise ValueError(
                f"{pattern!r}: no shard {name!r}{where}; shards are named as train-{{000000..000127}}.tar or train-*.tar"
            )
        found.update(matches)
    return [Path(folder or "", path) for path in sorted(found)]


def expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` -> a-08.tar, a-09.tar, a-10.tar

    Raises:
        ValueError: the braces hold neither a range nor a list.
    """
    choices = []
    for part in re.split(r"(\{[^{}]*\})", pattern):
        if not part.startswith("{"):
            choices.append([part])
        elif numbers := re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part):
            first, last = numbers.groups()
            if int(first) > int(last):
                raise ValueError(f"{pattern!r}: the range {part} must ascend")
            choices.append([f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)])
        elif "," in part:
            choices.append(part[1:-1].split(","))
        else:
            raise ValueError(f"{pattern!r}: {part} must be a range as {{000..127}} or a list as {{a,b}}")
    return ["".join(parts) for parts in product(*choices)]


def read_index(shards: Sequence[Path], label_key: str | None) -> Index:
    """The examples of some shards; from the cache folder if no shard has changed since they were found.

    Raises:
        ValueError: a shard is damaged, or an example has no label.
    """
    stats = [(os.path.abspath(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in shards]
    key = hashlib.sha256(json.dumps([stats, label_key]).encode()).hexdigest()[:32]
    cached = cache_folder() / f"shards-{key}.npz"
    paths = np.array([os.fsencode(path) for path in shards])
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        arrays = np.load(io.BytesIO(cached.read_bytes()))
        return Index(paths, *(arrays[column] for column in COLUMNS))
    entries = scan(shards, label_key)
    columns = [np.array(column) for column in zip(*entries, strict=True)]
    content = io.BytesIO()
    np.savez(content, **dict(zip(COLUMNS, columns, strict=True)))  # type: ignore[arg-type]
    with suppress(OSError):  # a cache that cannot be written costs time only
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, content.getvalue())
    return Index(paths, *columns)


def scan(shards: Sequence[Path], label_key: str | None) -> list[Entry]:
    entries: list[Entry] = []
    for number, path in enumerate(shards):
        images: dict[str, tuple[int, int]] = {}
        labels: dict[str, str] = {}
        for name, suffix, place, content in members(path, "json" if label_key else "cls"):
            if content is not None:
                labels[name] = parse_label(content, label_key, f"{path}/{name}.{suffix}")
            elif is_image_name(os.path.basename(f"{name}.{suffix}")):
                if name in images:
                    raise ValueError(f"{path}/{name}: two images; an example has one (the second is .{suffix})")
                images[name] = place
        for name, (offset, size) in images.items():
            if name not in labels:
                wanted = f"{name}.json with the key {label_key!r}" if label_key else f"{name}.cls"
                raise ValueError(f"{path}/{name}: an image without a label; {wanted} is missing")
            entries.append((number, offset, size, os.fsencode(name), os.fsencode(labels[name])))
    if not entries:
        raise ValueError(f"{shards[0]}{' and so on' if len(shards) > 1 else ''}: no image in {len(shards)} shards")
    return entries


def members(path: Path, label_suffix: str) -> Iterator[tuple[str, str, tuple[int, int], bytes | None]]:
    """(name up to the first dot, suffix, (offset, size), content of a label) of each file in a shard; images stay unread.

    Raises:
        ValueError: the file is no tar, is compressed, or ends too early.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would grow to gigabytes
                folder, file = os.path.split(member.name)
                stem, _, suffix = file.partition(".")
                if member.isfile() and stem:
                    is_label = suffix.lower() == label_suffix
                    content = tar.extractfile(member).read() if is_label else None  # type: ignore[union-attr]
                    yield os.path.join(folder, stem), suffix, (member.offset_data, member.size), content
            tar.fileobj.seek(tar.offset)  # type: ignore[union-attr]
            if tar.fileobj.read(BLOCK) != bytes(BLOCK):  # type: ignore[union-attr]
                raise tarfile.ReadError("no end mark where the last member ends")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"{path}: no whole, uncompressed tar ({error})") from error


def parse_label(content: bytes, label_key: str | None, where: str) -> str:
    """The number or name in a .cls file, or under a key in a .json file.

    Raises:
        ValueError: there is none.
    """
    try:
        text = content.decode()
        label = json.loads(text)[label_key] if label_key else text.strip()
    except (ValueError, KeyError, TypeError) as error:
        wanted = f"JSON with the key {label_key!r}" if label_key else "a number or name as UTF-8"
        raise ValueError(f"{where}: no label; {wanted} is wanted ({type(error).__name__}: {error})") from error
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise ValueError(f"{where}: the label {label!r} must be the number or the name of a class")
    return str(label)


def read_class_names(path: Path) -> tuple[str, ...]:
    """One name a line.

    Raises:
        ValueError: there is no such file, or a name is there twice.
    """
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.classes: {path} must be a text file with the name of a class a line ({error})"
        ) from error
    if not names:
        raise ValueError(f"data.classes: {path} holds no name")
    try:
        return without_repeats(names)
    except ValueError as error:
        raise ValueError(f"data.classes: {path}: {error}") from error
