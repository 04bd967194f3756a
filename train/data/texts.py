"""What every text data set is made of: texts become tokens once, when they are loaded, and arrays hold them from then on."""

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from train.data.images import Data, listed
from train.data.stream import DamagedExample, too_many
from train.data.tokenize import BOS, EOS, PAD, SMALLEST, TokenizerKind, encode_texts, pieces, train_tokenizer
from train.schema import nearest

DEFAULT_VOCAB_SIZE = 8192
TEST_FRACTION = 0.2

Window = tuple[Tensor, int]
LabelledExample = tuple[Tensor, int, int]
PairExample = tuple[Tensor, int, Tensor, int]
TooLong = Literal["truncate", "refuse"]
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Labelled:
    """Texts in classes. An example is (tokens int64 (max_length,) with padding 0 on the right, how many are no padding, label).

    `groups` names, for each class, the question that it is an answer to, where there are several.
    """

    train: Dataset[LabelledExample]
    test: Dataset[LabelledExample]
    classes: tuple[str, ...]
    tokenizer: Tokenizer
    max_length: int
    groups: tuple[str, ...] | None = None
    max_damaged: int = 0


@dataclass(frozen=True)
class Running:
    """Text to be continued. An example is (tokens int64 (max_length + 1,), number of predictions): with n predictions the model
    reads tokens[:n] and says tokens[1 : n + 1]; padding 0 follows. `test_bytes` are those of the text as it was read.
    """

    train: "DrawnWindows"
    test: "WholeText"
    tokenizer: Tokenizer
    max_length: int
    test_bytes: int
    train_bytes: int
    origin: str = ""
    max_damaged: int = 0


@dataclass(frozen=True)
class Pairs:
    """Texts and what to make of them. An example is (source int64 (max_length,), how many of it are no padding, target int64
    (max_target_length,) as [BOS] ... [EOS], how many of it are no padding), padding 0 on the right.
    """

    train: "PairTexts"
    test: "PairTexts"
    tokenizer: Tokenizer
    max_length: int
    max_target_length: int
    max_damaged: int = 0


class TextData(Data):
    """What all kinds of texts share: the tokenizer, which is trained on the training texts, and the length in tokens.

    `vocab_size` is an upper limit, 8192 where it is left open; the tokenizer "bytes" always has 262.
    """

    tokenizer: TokenizerKind = "bpe"
    vocab_size: int | None = Field(None, ge=32)
    lowercase: bool = False
    max_length: PositiveInt = 256

    @model_validator(mode="after")
    def tokenizer_has_room(self) -> "TextData":
        if self.vocab_size is None:
            return self
        if self.tokenizer == "bytes" and self.vocab_size != SMALLEST:
            raise ValueError(f"vocab_size = {self.vocab_size}: the tokenizer bytes always has {SMALLEST}; leave it out")
        if self.tokenizer == "bpe" and self.vocab_size < SMALLEST:
            raise ValueError(
                f"vocab_size = {self.vocab_size}: must be at least {SMALLEST}, all bytes and special tokens"
            )
        return self

    @abstractmethod
    def load(self, seed: int) -> Any:
        """Reads the data as Labelled, Running or Pairs."""
        raise NotImplementedError(type(self).__name__)

    def train_tokenizer(self, texts: Sequence[str]) -> Tokenizer:
        return train_tokenizer(texts, self.tokenizer, self.vocab_size or DEFAULT_VOCAB_SIZE, self.lowercase)

    def labelled(self, train: "Rows", test: "Rows", classes: Sequence[str], too_long: TooLong) -> Labelled:
        """Texts with the numbers of their classes as labels, for one who classifies them."""
        for split, rows in (("training", train), ("test", test)):
            self.refuse_empty(split, rows.texts)
        tokenizer = self.train_tokenizer(train.texts)
        datasets = [LabelledTexts(rows, tokenizer, self.max_length, too_long) for rows in (train, test)]
        return Labelled(datasets[0], datasets[1], tuple(classes), tokenizer, self.max_length)

    def running(self, train: Sequence[str], test: Sequence[str], origin: str) -> Running:
        """Documents, each ended by [EOS], for one who continues them."""
        for split, documents in (("training", train), ("test", test)):
            self.refuse_empty(split, documents)
        train_pieces = [pieces(document) for document in train]
        tokenizer = self.train_tokenizer([piece for document in train_pieces for piece in document])
        train_tokens = encode_documents(tokenizer, train_pieces)
        test_tokens = encode_documents(tokenizer, [pieces(document) for document in test])
        if len(train_tokens) <= self.max_length:
            raise ValueError(
                f"data.max_length = {self.max_length}: the training text has {len(train_tokens)} tokens, one more than "
                f"max_length are needed"
            )
        return Running(
            train=DrawnWindows(train_tokens, self.max_length),
            test=WholeText(test_tokens, self.max_length),
            tokenizer=tokenizer,
            max_length=self.max_length,
            test_bytes=num_bytes(test),
            train_bytes=num_bytes(train),
            origin=origin,
        )

    def pairs(self, train: "PairRows", test: "PairRows", max_target_length: int, too_long: TooLong) -> Pairs:
        """Sources and targets, for one who makes the second of the first. One vocabulary serves both."""
        for split, rows in (("training", train), ("test", test)):
            self.refuse_empty(split, rows.sources)
        tokenizer = self.train_tokenizer([*train.sources, *train.targets])
        datasets = [PairTexts(rows, tokenizer, self.max_length, max_target_length, too_long) for rows in (train, test)]
        return Pairs(datasets[0], datasets[1], tokenizer, self.max_length, max_target_length)

    def refuse_empty(self, split: str, texts: Sequence[str]) -> None:
        if not texts:
            raise ValueError(f"data.name = {self.name!r}: there is no {split} text")


@dataclass
class Rows:
    """Texts, the numbers of their classes, and how a person finds each."""

    names: list[str]
    texts: list[str]
    labels: list[int]


@dataclass
class PairRows:
    names: list[str]
    sources: list[str]
    targets: list[str]


class TokenTable:
    """The tokens of many texts in one array."""

    def __init__(self, tokens: Iterable[Sequence[int] | np.ndarray]):
        arrays = [np.asarray(row, dtype=np.int32) for row in tokens]
        self.ends = torch.from_numpy(np.cumsum([0, *map(len, arrays)]))
        self.tokens = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *arrays]))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        return self.tokens[int(self.ends[index]) : int(self.ends[index + 1])]

    def padded(self, index: int, length: int) -> Window:
        """(length,) int64 with padding on the right, and how many tokens are none."""
        return pad(self[index], length)


class LabelledTexts(Dataset[LabelledExample]):
    def __init__(self, rows: Rows, tokenizer: Tokenizer, max_length: int, too_long: TooLong):
        self.texts, self.labels, self.max_length = rows.texts, rows.labels, max_length
        self.table = encode(tokenizer, rows.names, rows.texts, max_length, too_long)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> LabelledExample:
        return *self.table.padded(index, self.max_length), self.labels[index]


class PairTexts(Dataset[PairExample]):
    def __init__(
        self, rows: PairRows, tokenizer: Tokenizer, max_length: int, max_target_length: int, too_long: TooLong
    ):
        self.sources, self.targets = rows.sources, rows.targets
        self.max_length, self.max_target_length = max_length, max_target_length
        self.source_table = encode(tokenizer, rows.names, rows.sources, max_length, too_long)
        inner = encode(tokenizer, rows.names, rows.targets, max_target_length - 2, too_long, "max_target_length - 2")
        self.target_table = TokenTable([[BOS, *inner[index].tolist(), EOS] for index in range(len(inner))])

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> PairExample:
        target = self.target_table.padded(index, self.max_target_length)
        return *self.source_table.padded(index, self.max_length), *target


class DrawnWindows(Dataset[Window]):
    """As many windows as lie side by side in the text. Window i starts anywhere in the i-th of as many equal shares of the places
    there are, by torch's random numbers: every place is as likely as every other."""

    def __init__(self, tokens: Tensor, max_length: int):
        self.tokens, self.max_length = tokens, max_length
        self.num_places = len(tokens) - max_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.max_length

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = int((index + torch.rand((), dtype=torch.float64).item()) * self.num_places / len(self))
        return self.tokens[start : start + self.max_length + 1].long(), self.max_length


class Windows(Dataset[Window]):
    """A text in windows of `length` predictions: every token but the first is predicted once, and the last window may be short."""

    def __init__(self, tokens: Tensor, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        window, num_tokens = pad(self.tokens[index * self.length : (index + 1) * self.length + 1], self.length + 1)
        return window, num_tokens - 1


class WholeText(Windows):
    """The whole test text: [BOS], then its documents in order, each ended by [EOS]. As a data set: windows of max_length."""

    def windows(self, length: int) -> Windows:
        """The same text in windows of another length.

        Raises:
            ValueError: the length is no count.
        """
        if length < 1:
            raise ValueError(f"windows: length = {length} must be at least 1")
        return Windows(self.tokens, length)


def pad(tokens: Tensor, length: int) -> Window:
    padded = torch.full((length,), PAD, dtype=torch.int64)
    padded[: len(tokens)] = tokens
    return padded, len(tokens)


def encode(
    tokenizer: Tokenizer,
    names: Sequence[str],
    texts: Sequence[str],
    max_length: int,
    too_long: TooLong,
    option: str = "max_length",
) -> TokenTable:
    """The tokens of texts, cut at `max_length`.

    Raises:
        ValueError: a text has no token at all, or, with too_long = "refuse", too many.
    """
    rows = []
    for name, tokens in zip(names, encode_texts(tokenizer, texts), strict=True):
        if not tokens:
            raise ValueError(f"{name}: the text is empty")
        if len(tokens) > max_length and too_long == "refuse":
            raise ValueError(
                f"{name}: has {len(tokens)} tokens, data.{option} = {max_length} are allowed; "
                f"data.too_long=truncate cuts such texts"
            )
        rows.append(np.asarray(tokens[:max_length], dtype=np.int32))
    return TokenTable(rows)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> Tensor:
    """One int64 tensor: [BOS], and after each document [EOS]."""
    flat = encode_texts(tokenizer, [piece for document in documents for piece in document])
    arrays = [np.array([BOS])]
    for document in documents:
        arrays += [np.asarray(next(flat), dtype=np.int64) for _ in document]
        arrays.append(np.array([EOS]))
    return torch.from_numpy(np.concatenate(arrays))


def num_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


class DamagedText(DamagedExample):
    """A text that cannot be read."""

    def __init__(self, name: str, reason: object):
        super().__init__(name, reason)
        self.args = (f"{name}: {reason}",)


class Damage:
    """What is passed over in reading, each named in a warning, up to a limit.

    Raises:
        TooManyDamaged: there is more than that.
    """

    def __init__(self, allowed: int):
        self.allowed, self.errors = allowed, list[DamagedExample]()

    def add(self, error: DamagedText) -> None:
        self.errors.append(error)
        if len(self.errors) > self.allowed:
            raise too_many(self.errors, self.allowed) from error
        warnings.warn(f"{error}; passed over, {len(self.errors)} of {self.allowed} allowed", stacklevel=2)


class OwnTexts(TextData):
    """What data of your own share: up to `max_damaged` texts may be unreadable or empty; they are named and passed over.

    Texts longer than `max_length` are cut (`too_long: truncate`) or named and refused. With `use: running` there are no single
    texts to be cut.
    """

    too_long: TooLong = "truncate"
    max_damaged: NonNegativeInt = 0


def refuse_unused(use: str, options: Iterable[tuple[str, object, str]]) -> None:
    """Options that were given, as (key, value or None, the use that has them), against the use that was chosen.

    Raises:
        ValueError: an option would be ignored.
    """
    for key, value, wanted in options:
        if value is not None and use not in wanted.split(" or "):
            raise ValueError(f"{key} = {value!r}: is for use = {wanted}, use is {use}")


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """A text file, its line ends as \\n.

    Raises:
        DamagedText: it cannot be read, or is not in this encoding.
    """
    try:
        return re.sub("\r\n?", "\n", path.read_bytes().decode(encoding, errors=errors)).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DamagedText(
            str(path),
            f"byte {error.start} ({error.object[error.start]:#04x}) is no {encoding}; name another data.encoding",
        ) from error
    except OSError as error:
        raise DamagedText(str(path), f"no readable file ({error.strerror})") from error


def normalised(text: str) -> str:
    """What two copies of a text have in common: case and blanks do not count."""
    return " ".join(text.lower().split())


def first_of_each(rows: Iterable[RowT], key: Callable[[RowT], Hashable]) -> list[RowT]:
    """The rows without those whose key was there before."""
    seen: dict[Hashable, RowT] = {}
    for row in rows:
        seen.setdefault(key(row), row)
    return list(seen.values())


def split_by_class(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """The numbers of the training and of the test examples: a fifth of each class, chosen once and for all.

    Raises:
        ValueError: a class has only one example.
    """
    train: list[int] = []
    test: list[int] = []
    for label in sorted(set(labels)):
        members = np.flatnonzero(np.asarray(labels) == label)
        if len(members) < 2:
            raise ValueError(f"class {label} has {len(members)} examples, at least 2 are needed to split them")
        members = np.random.default_rng(label).permutation(members)
        num_test = max(1, round(len(members) * TEST_FRACTION))
        test += members[:num_test].tolist()
        train += members[num_test:].tolist()
    return sorted(train), sorted(test)


def unknown_label(name: str, label: str, classes: Sequence[str]) -> ValueError:
    wanted = nearest(label, classes)
    hint = f"; did you mean {wanted}?" if wanted else ""
    return ValueError(f"{name}: label {label!r} is not among the training classes {listed(classes)}{hint}")
