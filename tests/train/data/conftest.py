"""Texts for the tests of text data: articles that the tests make, and the real ones, fetched and read once."""

import json
from pathlib import Path

import numpy as np
import pytest

from train.data.fetch import fetch_news

NAMES = ("Blair", "Brown", "Howard", "Tony Adams", "Microsoft", "Arsenal", "Sony", "Federer")


def article(rng: np.random.Generator, label: str, number: int) -> str:
    """A title and three paragraphs of words of its class."""
    words = [f"{label}{chr(97 + i)}" for i in range(20)] + ["the", "of", "and", "in", "to"]

    def phrase(count: int) -> str:
        return " ".join(rng.choice(words, count).tolist())

    lines = [f"Title {number} {phrase(3)}"]
    for _ in range(3):
        actor, other = rng.choice(NAMES, 2, replace=False).tolist()
        lines.append(f"Today {actor} beat {other} {phrase(5)}. Nobody {phrase(7)}.")
    return "\n\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def news_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 made articles in each of two classes, as lines of json."""
    rng = np.random.default_rng(0)
    rows = [
        {"name": f"{label}/{number:03}", "label": label, "text": article(rng, label, number)}
        for label in ("arts", "games")
        for number in range(30)
    ]
    path = tmp_path_factory.mktemp("news") / "news.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def real_news() -> Path:
    """The real 2,225 articles, through pip."""
    return fetch_news()
