"""Your own texts as lines of json, in one file or many, plain or packed by gzip."""

import gzip
import json
import reprlib
import zlib
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from train.data.texts import (
    Damage,
    DamagedText,
    Labelled,
    OwnTexts,
    PairRows,
    Pairs,
    Rows,
    Running,
    refuse_unused,
    unknown_label,
)

MAX_TARGET_LENGTH = 64
ALWAYS_ALLOWED, TIMES_THE_LABELS = 1000, 10  # classes that numbers may stand for


class TextJsonl(OwnTexts):
    """Files such as `train: train-*.jsonl.gz` and `val: val.jsonl`, in the folder `path` where one is given; one text a line.

    `use: labels` reads the keys `text_key` and `label_key` (a text, or the number of a class); classes are the labels of the
    training files in their order. `use: pairs` reads `source_key` and `target_key`; targets are cut at `max_target_length` (64
    tokens unless given). `use: running` reads `text_key`, a document a line.
    """

    name: Literal["text_jsonl"]
    path: str | None = None
    train: str = Field("train*.jsonl*", min_length=1)
    val: str = Field("val*.jsonl*", min_length=1)
    use: Literal["labels", "running", "pairs"] = "labels"
    text_key: str | None = None
    label_key: str | None = None
    source_key: str | None = None
    target_key: str | None = None
    max_target_length: int | None = Field(None, ge=3)
    encoding: str = "utf-8"

    @model_validator(mode="after")
    def options_have_a_use(self) -> "TextJsonl":
        refuse_unused(
            self.use,
            [
                ("text_key", self.text_key, "labels or running"),
                ("label_key", self.label_key, "labels"),
                ("source_key", self.source_key, "pairs"),
                ("target_key", self.target_key, "pairs"),
                ("max_target_length", self.max_target_length, "pairs"),
                ("too_long", "refuse" if self.too_long == "refuse" else None, "labels or pairs"),
            ],
        )
        try:
            "".encode(self.encoding)
        except LookupError:
            raise ValueError(
                f"encoding = {self.encoding!r}: Python knows no such encoding; utf-8 is the default"
            ) from None
        return self

    def load(self, seed: int) -> Labelled | Running | Pairs:
        damage = Damage(self.max_damaged)
        if self.use == "pairs":
            pairs = [self.pair_rows(pattern, damage) for pattern in (self.train, self.val)]
            return self.pairs(pairs[0], pairs[1], self.max_target_length or MAX_TARGET_LENGTH, self.too_long)
        if self.use == "running":
            texts = [
                [row[0] for _, row in self.read(pattern, [self.text_key or "text"], damage)]
                for pattern in (self.train, self.val)
            ]
            return self.running(texts[0], texts[1], self.path or self.train)
        keys = [self.text_key or "text", self.label_key or "label"]
        train, val = (list(self.read(pattern, keys, damage)) for pattern in (self.train, self.val))
        for split in (train, val):
            refuse_mixed([(name, label) for name, (_, label) in split])
        classes = class_names([(name, label) for name, (_, label) in train])
        rows = [to_rows(split, classes) for split in (train, val)]
        return self.labelled(rows[0], rows[1], classes, self.too_long)

    def pair_rows(self, pattern: str, damage: Damage) -> PairRows:
        rows = PairRows([], [], [])
        for name, (source, target) in self.read(
            pattern, [self.source_key or "source", self.target_key or "target"], damage
        ):
            rows.names.append(name)
            rows.sources.append(source)
            rows.targets.append(target)
        return rows

    def read(self, pattern: str, keys: list[str], damage: Damage) -> Iterator[tuple[str, list[Any]]]:
        """FILE:LINE and the values of the keys, of each line that has them; the last key may be a label."""
        for file in find_files(pattern, self.path):
            for name, line in read_lines(file, self.encoding, damage):
                try:
                    yield name, values(name, line, keys, self.use)
                except DamagedText as error:
                    damage.add(error)


def find_files(pattern: str, folder: str | None) -> list[Path]:
    """The files of a pattern, in the order of their names.

    Raises:
        ValueError: there is none.
    """
    whole = str(Path(folder or "", pattern))
    found = sorted(Path(path) for path in glob(whole))
    if not found:
        raise ValueError(f"{whole}: no such file")
    return found


def read_lines(file: Path, encoding: str, damage: Damage) -> Iterator[tuple[str, str]]:
    """FILE:LINE and the text of each line that is not blank.

    Raises:
        ValueError: the file cannot be read.
    """
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode(encoding)
                except UnicodeDecodeError as error:
                    byte = f"byte {error.start} of the line ({error.object[error.start]:#04x})"
                    damage.add(DamagedText(f"{file}:{number}", f"{byte} is no {encoding}"))
                    continue
                text = text.removeprefix("\ufeff") if number == 1 else text
                if text.strip():
                    yield f"{file}:{number}", text
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}:{number + 1}: no readable file ({error})") from error


def values(name: str, line: str, keys: list[str], use: str) -> list[Any]:
    """What a line has under the keys.

    Raises:
        DamagedText: it is no json, a key is missing, or a value is none that the key can have.
    """
    row = row_of(name, line, keys[0])
    for position, key in enumerate(keys):
        if key not in row:
            there = ", ".join(row).encode(errors="backslashreplace").decode()
            raise DamagedText(name, f"has no key {key!r}; there are {there or 'none'}")
        if isinstance(row[key], str):
            refuse_half_characters(name, row[key], f"{key} ")
        is_label = use == "labels" and position == 1
        if is_label and type(row[key]) in (str, int):
            continue
        if not isinstance(row[key], str):
            kinds = "text or a whole number" if is_label else "text"
            raise DamagedText(name, f"{key} must be {kinds}, is {reprlib.repr(row[key])}")
        if not row[key].strip():
            raise DamagedText(name, f"{key} is empty")
    return [row[key] for key in keys]


def row_of(name: str, line: str, key: str) -> dict[str, Any]:
    """The object that a line of json is; `key`: one that it should have.

    Raises:
        DamagedText: it is none.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DamagedText(name, f"no readable json ({error})") from error
    except RecursionError as error:
        raise DamagedText(name, "no readable json (nested too deeply)") from error
    if not isinstance(row, dict):
        raise DamagedText(name, f"must be an object such as {{{key!r}: ...}}, is {type(row).__name__}")
    return row


def refuse_half_characters(name: str, text: str, what: str = "") -> None:
    """Refuse half of a surrogate pair, which json and some encodings can spell but no text can hold; `what` it is stands in front.

    Raises:
        DamagedText: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a character (\\u{ord(text[error.start]):04x})"
        raise DamagedText(name, f"{what}has {half} at place {error.start}") from error


def refuse_mixed(found: list[tuple[str, str | int]]) -> None:
    """Refuse numbers and texts as labels of the same files; `found`: FILE:LINE and the label.

    Raises:
        ValueError: there are both.
    """
    first_of = {isinstance(label, int): (name, label) for name, label in reversed(found)}
    if len(first_of) == 2:
        (number_name, number), (text_name, text) = first_of[True], first_of[False]
        raise ValueError(
            f"{number_name}: label {number} is a whole number, but {text_name}: label {text!r} is text; "
            "all must be of one kind"
        )


def class_names(found: list[tuple[str, str | int]]) -> tuple[str, ...]:
    """The names of the classes: 0 to the highest number, or the texts in their order; `found`: FILE:LINE and the label.

    Raises:
        ValueError: numbers that stand for far more classes than there are labels.
    """
    texts = {label for _, label in found if isinstance(label, str)}
    if texts:
        return tuple(sorted(texts))
    numbers = {label: name for name, label in reversed(found) if isinstance(label, int)}
    highest, allowed = max(numbers, default=-1), max(ALWAYS_ALLOWED, TIMES_THE_LABELS * len(numbers))
    if highest >= allowed:
        raise ValueError(
            f"{numbers[highest]}: label {highest} would make a class of each number up to it, but there are {len(numbers)} "
            f"different labels, with which numbers below {allowed} are allowed; number them from 0, or write them as text"
        )
    return tuple(str(number) for number in range(highest + 1))


def to_rows(found: list[tuple[str, list[Any]]], classes: tuple[str, ...]) -> Rows:
    """Texts with the numbers of their classes.

    Raises:
        ValueError: a label is no class.
    """
    number_of = {name: number for number, name in enumerate(classes)}
    for name, (_, label) in found:
        if str(label) not in number_of:
            raise unknown_label(name, str(label), classes)
    return Rows(
        [name for name, _ in found],
        [text for _, (text, _) in found],
        [number_of[str(label)] for _, (_, label) in found],
    )
