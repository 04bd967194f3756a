"""From an article of the BBC to its headline."""

from typing import Literal

from pydantic import Field

from train.data.news import read_news, split_news
from train.data.texts import PairRows, Pairs, TextData, TooLong, first_of_each, normalised


class Headlines(TextData):
    """The source is an article without its first line, the target is that line.

    Articles that stand in the collection twice, by their text or by their title, are left out before it is split; a fifth of
    each class is for testing, whatever the seed. `path` as for news.
    """

    name: Literal["headlines"]
    path: str | None = None
    max_length: int = Field(192, ge=1)
    max_target_length: int = Field(24, ge=3)
    too_long: TooLong = "truncate"

    def load(self, seed: int) -> Pairs:
        articles = [article for article in read_news(self.path) if article.title and article.body]
        articles = first_of_each(articles, lambda article: normalised(article.body))
        train, test, _ = split_news(first_of_each(articles, lambda article: normalised(article.title)))
        rows = [
            PairRows([a.name for a in split], [a.body for a in split], [a.title for a in split])
            for split in (train, test)
        ]
        return self.pairs(rows[0], rows[1], self.max_target_length, self.too_long)
