"""The King James bible as running text, one verse a line."""

import re
from pathlib import Path
from typing import Literal

from train.data.fetch import fetch_bible
from train.data.texts import Running, TextData, normalised

TEST_FRACTION = 0.1


class Verses(TextData):
    """31,102 verses in 66 books; the last tenth of each book is for testing, so that every book's style is on both sides.

    A test verse that stands in the training text word for word is left out. Stories that are told in two books in other words stay
    on both sides. `path` is a file of such verses (`Ge1:1 In the beginning ...`) in place of the package's.
    """

    name: Literal["verses"]
    path: str | None = None

    def load(self, seed: int) -> Running:
        train, test = split_verses(read_verses(self.path))
        texts = [["\n".join(book) + "\n" for book in books if book] for books in (train, test)]
        return self.running(texts[0], texts[1], f"{sum(map(len, train))} and {sum(map(len, test))} verses")


def read_verses(path: str | None = None) -> dict[str, list[str]]:
    """The verses of each book, without their numbers.

    Raises:
        ValueError: a line is no verse.
    """
    file = Path(path) if path else fetch_bible()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.path = {path!r}: no readable file of verses ({error})") from error
    books: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        verse = re.fullmatch(r"(\d?[A-Za-z]+)\d+:\d+ +(.+)", line)
        if verse is None:
            raise ValueError(f"{file}:{number}: no verse such as `Ge1:1 In the beginning ...`: {line[:60]!r}")
        books.setdefault(verse[1], []).append(verse[2].strip())
    return books


def split_verses(books: dict[str, list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """The verses to train on and to test on, by book."""
    train: list[list[str]] = []
    test: list[list[str]] = []
    for verses in books.values():
        num_test = max(1, round(len(verses) * TEST_FRACTION))
        train.append(verses[:-num_test])
        test.append(verses[-num_test:])
    known = {normalised(verse) for book in train for verse in book}
    return train, [[verse for verse in book if normalised(verse) not in known] for book in test]
