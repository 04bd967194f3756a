"""Questions about the order of words: their words alone say nothing, and their labels are right."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.refusals import refuses
from train.data import Order
from train.data.news import read_news
from train.data.order import Pool, Sentence, named, to_sentence
from train.text_baseline import baseline

CAPITALS = {"blair", "brown", "tony", "sony", "gordon"}


def order(path: Path, **options: object) -> Order:
    return Order.model_validate({"name": "order", "path": str(path), "vocab_size": 300, **options})


def names_in(text: str) -> list[str] | None:
    sentence = to_sentence(text, CAPITALS)
    return sentence.names and [" ".join(sentence.words[start:end]) for start, end in sentence.names]


def test_names_are_found_by_value() -> None:
    assert names_in("Yesterday Tony Blair told Gordon Brown that it was over.") == ["tony blair", "gordon brown"]
    assert names_in("To the surprise of Brown, Blair said it was over.") == ["blair", "brown"]
    assert names_in("Yesterday Blair said that it was all over.") is None  # one name
    assert names_in("Blair said on Monday that it was all over.") is None  # a day is no name
    assert names_in("Tony Blair told Blair that it was all over.") is None  # shares a word
    assert names_in("Blair said what Brown said about it all.") is None  # two that act
    assert names_in("He saw Blair, said Brown, and it was over.") is None  # a comma before the verb
    assert names_in("Blair told Brown's friends that it was over.") is None
    assert to_sentence('He "never" said £5m, at all!', CAPITALS).words == ("he", "never", "said", "5m", "at", "all")


def test_named_by_value() -> None:
    words = ("at", "tony", "blair", "told", "brown", "no")
    assert named(Sentence(words, ((1, 3), (4, 5))), ("x", "y")) == ["at", "x", "told", "y", "no"]
    assert named(Sentence(words, ((4, 5), (1, 3))), ("x", "y")) == ["at", "y", "told", "x", "no"]
    assert names_in("Yesterday Tony Blair told Gordon Brown of bob and all.") is None  # who is to be called bob?


def test_forms_of_both_questions(news_file: Path) -> None:
    data = order(news_file, num_test=10_000).load(0)
    assert data.classes == ("intact", "shuffled", "acts", "acted on")
    assert data.groups == ("intact", "intact", "actor", "actor")
    pool: Pool = data.test.pool  # type: ignore[attr-defined]
    known = {sentence.words for sentence in pool.sentences}
    forms = defaultdict(list)
    for text, label in zip(data.test.texts, data.test.labels, strict=True):  # type: ignore[attr-defined]
        kind = data.classes[label]
        if data.groups[label] == "intact":
            assert (tuple(text.split()) in known) == (kind == "intact")
            forms["intact", tuple(sorted(text.split()))].append(kind)
        else:
            name, sentence = text.split(" [SEP] ")
            assert name in ("alice", "bob")
            assert (f" {name} beat " in sentence) == (kind == "acts")
            assert name in sentence
            forms["actor", name, tuple(sorted(sentence.split()))].append(kind)
    for (question, *_), kinds in forms.items():
        counts = Counter(kinds)
        assert len(set(counts.values())) == 1  # each bag of words is as often one as the other
        assert set(counts) == set(data.classes[:2] if question == "intact" else data.classes[2:])


def test_no_sentence_is_on_both_sides(news_file: Path) -> None:
    data = order(news_file).load(0)
    train, test = ({s.words for s in split.pool.sentences} for split in (data.train, data.test))  # type: ignore[attr-defined]
    assert train
    assert test
    assert not train & test


def test_questions_repeat_and_differ(news_file: Path) -> None:
    first, again, other = (order(news_file).load(seed) for seed in (3, 3, 4))
    for i in (0, 1, 99_999):
        assert torch.equal(first.train[i][0], again.train[i][0])
        assert first.train[i][1:] == again.train[i][1:]
    assert not all(torch.equal(first.train[i][0], other.train[i][0]) for i in range(5))
    assert first.test.texts == other.test.texts  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        first.train[100_000]


def test_tokens_are_those_of_the_text(news_file: Path) -> None:
    data = order(news_file, num_train=50).load(0)
    for split in (data.train, data.test):
        for i, (text, label) in enumerate(zip(split.texts, split.labels, strict=True)):  # type: ignore[attr-defined]
            tokens, length, found = split[i]
            assert tokens[:length].tolist() == data.tokenizer.encode(text).ids
            assert not tokens[length:].any()
            assert found == label
            assert (4 in tokens) == ("[SEP]" in text)


@pytest.mark.parametrize("question", ["intact", "actor"])
def test_one_question_alone(news_file: Path, question: str) -> None:
    data = order(news_file, question=question, num_train=20).load(0)
    assert len(data.classes) == 2
    assert data.groups == (question, question)
    assert {label for _, _, label in (data.train[i] for i in range(20))} == {0, 1}


@pytest.mark.long
def test_words_alone_say_nothing_of_real_questions(real_news: Path, tmp_path: Path) -> None:
    articles = read_news(str(real_news))
    path = tmp_path / "politics.jsonl"
    path.write_text("".join(json.dumps(asdict(article)) + "\n" for article in articles if article.label == "politics"))
    data = Order(name="order", path=str(path), num_train=600, num_test=400).load(0)
    assert len(data.train.pool.numbers["actor"]) > 400  # type: ignore[attr-defined]
    groups = baseline(data, longest=1)["groups"]
    assert set(groups) == {"intact", "actor"}
    assert all(0.4 < accuracy <= 0.5 for accuracy in groups.values())  # the same words, the same answer


def test_data_without_names_are_said(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"name": "{i}", "label": "x", "text": "title {i}\\nthere are {i} of these words here and no name"}}\n'
        for i in range(10)
    )
    (tmp_path / "plain.jsonl").write_text(rows)
    assert len(order(tmp_path / "plain.jsonl", question="intact").load(0).test) == 4  # type: ignore[arg-type]
    with refuses("data.question = 'both': no training sentence for actor"):
        order(tmp_path / "plain.jsonl").load(0)


def test_long_sentences_are_left_out(news_file: Path) -> None:
    data = order(news_file, max_length=14, num_train=300, question="intact").load(0)
    lengths = [data.train[i][1] for i in range(300)]
    assert max(lengths) <= 14
    assert np.mean(lengths) > 6
