"""Verses: books, their ends for testing, and nothing on both sides."""

import shutil
from pathlib import Path

import pytest

from tests.refusals import refuses
from train.data import Verses
from train.data.fetch import fetch_bible
from train.data.verses import read_verses, split_verses


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_the_real_verses() -> None:
    books = read_verses(str(fetch_bible()))
    assert len(books) == 66
    assert sum(map(len, books.values())) == 31_102
    assert books["Ge"][0] == "In the beginning God created the heaven and the earth."
    train, test = split_verses(books)
    assert (sum(map(len, train)), sum(map(len, test))) == (27_992, 3_101)


def test_the_last_tenth_of_each_book_is_for_testing(tmp_path: Path) -> None:
    lines = [f"{book}1:{number} Verse {number} of {book}." for book in ("Ge", "2Kings") for number in range(1, 21)]
    lines[19] = "Ge1:20 verse 1 of  GE."  # stands in the training text
    path = tmp_path / "verses.txt"
    path.write_text("\n".join(lines))
    train, test = split_verses(read_verses(str(path)))
    assert [len(book) for book in train] == [18, 18]
    assert test == [["Verse 19 of Ge."], ["Verse 19 of 2Kings.", "Verse 20 of 2Kings."]]
    data = Verses(name="verses", path=str(path), max_length=16, tokenizer="bytes").load(0)
    text = data.tokenizer.decode(data.test.tokens.tolist())
    assert text == "Verse 19 of Ge.\nVerse 19 of 2Kings.\nVerse 20 of 2Kings.\n"
    assert data.test_bytes == len(text)
    assert data.origin == "36 and 3 verses"
    path.write_text("Ge1:1 Fine.\nnothing of the kind\n")
    with refuses(r"verses.txt:2: no verse such as `Ge1:1"):
        read_verses(str(path))
