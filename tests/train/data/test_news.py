"""Articles and their headlines: what counts as the same, and a split that nothing changes."""

import json
from collections import Counter
from pathlib import Path

from tests.refusals import refuses
from train.data import Headlines, News
from train.data.news import Article, read_news, split_news, without_copies
from train.data.texts import normalised


def news(path: Path, **options: object) -> News:
    return News.model_validate({"name": "news", "path": str(path), "vocab_size": 500, "max_length": 32, **options})


def test_the_real_articles(real_news: Path) -> None:
    assert len(real_news.read_text().splitlines()) == 2225
    articles = read_news(str(real_news))
    assert len(articles) == 2056
    train, test, classes = split_news(articles)
    assert classes == ("business", "entertainment", "politics", "sports", "tech")
    assert (len(train), len(test)) == (1645, 411)
    assert min(Counter(article.label for article in test).values()) >= 64
    assert not {normalised(article.text) for article in train} & {normalised(article.text) for article in test}
    assert articles[3].title == "High fuel prices hit BA's profits"
    assert articles[3].body.startswith("British Airways has blamed")


def test_a_split_whatever_the_seed(news_file: Path) -> None:
    first, again = news(news_file).load(0), news(news_file).load(7)
    assert first.classes == ("arts", "games")
    assert (len(first.train), len(first.test)) == (48, 12)  # type: ignore[arg-type]
    assert first.test.texts == again.test.texts  # type: ignore[attr-defined]
    assert first.tokenizer.to_str() == again.tokenizer.to_str()
    assert not set(first.train.texts) & set(first.test.texts)  # type: ignore[attr-defined]
    for data in (first.train, first.test):
        tokens, length, label = data[0]
        assert tokens.shape == (32,)
        assert 0 < length <= 32
        assert first.classes[label][:4] in data.texts[0]  # type: ignore[attr-defined]
        assert data.texts[0].startswith("Title")  # type: ignore[attr-defined]


def test_copies_are_left_out_before_the_split(news_file: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in news_file.read_text().splitlines()]
    copies = [{**row, "name": "copy", "text": f"  {row['text'].upper()}\n"} for row in rows]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + copies))
    assert read_news(str(path)) == read_news(str(news_file))


def test_reworked_stories_are_copies() -> None:
    story = ["Title", *(f"{word} a b c d e f g and so on" for word in ("one", "two", "three", "four"))]
    reworked = [
        "Another title",
        *story[1:3],
        "a paragraph that is new in here and long enough",
        "and this one is new as well I say",
    ]
    other = ["Title", story[1], *(f"{word} h i j k l m n" for word in ("one", "two", "three"))]
    articles = [Article(str(i), "x", "\n\n".join(lines)) for i, lines in enumerate((story, reworked, other))]
    assert [article.name for article in without_copies(articles)] == ["0", "2"]


def test_headlines(news_file: Path, tmp_path: Path) -> None:
    data = Headlines(name="headlines", path=str(news_file), vocab_size=500, max_length=16, max_target_length=6).load(0)
    assert (len(data.train), len(data.test)) == (48, 12)
    source, source_length, target, target_length = data.test[0]
    assert source.shape == (16,)
    assert target.shape == (6,)
    assert source_length == 16
    assert (target[0], target[target_length - 1]) == (1, 2)
    assert not target[target_length:].any()
    assert data.test.targets[0].startswith("Title")
    assert data.tokenizer.decode(target.tolist()) == data.test.targets[0][: len(data.tokenizer.decode(target.tolist()))]
    assert "Title" not in data.test.sources[0]
    assert not set(data.train.targets) & set(data.test.targets)
    rows = [json.loads(line) for line in news_file.read_text().splitlines()]
    for row in rows[:10]:
        row["text"] = "The same title\n" + row["text"].partition("\n")[2]
    (tmp_path / "titles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Headlines(name="headlines", path=str(tmp_path / "titles.jsonl"), vocab_size=500).load(0)
    assert (data.train.targets + data.test.targets).count("The same title") == 1


def test_files_that_hold_no_articles(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"name": "a", "label": "x", "text": "y"}\n{"name": "b"}\n')
    with refuses(r"wrong.jsonl:2: no article with name, label and text"):
        read_news(str(path))
    with refuses(r"absent.jsonl': no readable file of articles"):
        read_news(str(tmp_path / "absent.jsonl"))
