"""Lines of json: what they hold, and which line is wrong."""

import gzip
import json
from pathlib import Path
from typing import get_args

import pytest

from tests.refusals import refuses
from train.data import Labelled, Pairs, Running, TextJsonl
from train.data.stream import TooManyDamaged
from train.data.tokenize import TokenizerKind
from train.schema import validate


def load(path: Path, **options: object) -> Labelled | Running | Pairs:
    node, problems = validate(TextJsonl, {"name": "text_jsonl", "path": str(path), "tokenizer": "bytes", **options})
    assert node is not None, problems
    return node.load(seed=0)


def write(path: Path, *rows: object) -> None:
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_shards_with_labels(tmp_path: Path) -> None:
    write(tmp_path / "train-1.jsonl.gz", {"text": "three", "label": "cat"})
    write(tmp_path / "train-0.jsonl", {"text": "one", "label": "dog"}, "", {"text": "two", "label": "cat", "more": 1})
    write(tmp_path / "val.jsonl", {"text": "four", "label": "dog"})
    data = load(tmp_path)
    assert isinstance(data, Labelled)
    assert data.classes == ("cat", "dog")
    assert data.train.texts == ["one", "two", "three"]  # type: ignore[attr-defined]
    assert data.train.labels == [1, 0, 0]  # type: ignore[attr-defined]
    assert data.test.labels == [1]  # type: ignore[attr-defined]


def test_numbers_as_labels_and_other_keys(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"body": "x", "class": 2}, {"body": "y", "class": 0})
    data = load(tmp_path, train="a.jsonl", val="a.jsonl", text_key="body", label_key="class")
    assert isinstance(data, Labelled)
    assert data.classes == ("0", "1", "2")
    assert data.test.labels == [2, 0]  # type: ignore[attr-defined]


def test_pairs_and_running_text(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"source": "long text", "target": "short"}, {"source": "other", "target": "o"})
    write(tmp_path / "val.jsonl", {"source": "long text", "target": "short"})
    data = load(tmp_path, use="pairs", max_length=6, max_target_length=5)
    assert isinstance(data, Pairs)
    source, source_length, target, target_length = data.test[0]
    assert data.tokenizer.decode(source.tolist()) == "long t"
    assert (source_length, target_length) == (6, 5)
    assert (target[0], target[-1], data.tokenizer.decode(target.tolist())) == (1, 2, "sho")
    assert data.train[1][2].tolist()[3:] == [0, 0]
    assert data.train[1][3] == 3
    assert load(tmp_path, use="pairs").max_target_length == 64  # type: ignore[union-attr]
    running = load(tmp_path, use="running", text_key="source", max_length=4)
    assert isinstance(running, Running)
    assert running.test.tokens[-1] == 2
    assert running.tokenizer.decode(running.train.tokens.tolist()) == "long textother"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "label": ', r"train.jsonl:2: no readable json"),
        ("[1, 2]", r"train.jsonl:2: must be an object such as \{'text': ...\}, is list"),
        ({"txt": "a", "label": "x"}, r"train.jsonl:2: has no key 'text'; there are txt, label"),
        ({"text": None, "label": "x"}, r"train.jsonl:2: text must be text, is None"),
        ({"text": " ", "label": "x"}, r"train.jsonl:2: text is empty"),
        ({"text": "a", "label": True}, r"train.jsonl:2: label must be text or a whole number, is True"),
        ({"text": "a\ud800", "label": "x"}, r"train.jsonl:2: text has half a character \(\\ud800\) at place 1"),
        ({"text": "\udfff a", "label": "x"}, r"train.jsonl:2: text has half a character \(\\udfff\) at place 0"),
        ({"text": "a", "label": "x\udc00"}, r"train.jsonl:2: label has half a character \(\\udc00\) at place 1"),
        ({"\ud800": "a"}, r"train.jsonl:2: has no key 'text'; there are \\ud800"),
        ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", r"train.jsonl:2: no readable json \(nested too deeply\)"),
        ({"text": [[1] * 3] * 9, "label": "x"}, r"train.jsonl:2: text must be text, is .{,120}\.\.\.\];"),
    ],
)
def test_bad_lines_are_named_and_counted(line: object, message: str, tmp_path: Path) -> None:
    good = {"text": "a", "label": "x"}
    write(tmp_path / "train.jsonl", good, line, good)
    write(tmp_path / "val.jsonl", good)
    with pytest.warns(UserWarning, match=message):
        data = load(tmp_path, max_damaged=1)
    assert len(data.train) == 2  # type: ignore[arg-type]
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples, data.max_damaged = 0 are allowed: .*train.jsonl:2"):
        load(tmp_path)


def test_bytes_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes('{"text": "é", "label": "x"}\n'.encode("latin-1"))
    write(tmp_path / "val.jsonl", {"text": "a", "label": "x"})
    with pytest.raises(TooManyDamaged, match=r"train.jsonl:1 .*byte 10 of the line \(0xe9\) is no utf-8"):
        load(tmp_path)
    assert load(tmp_path, encoding="latin-1").train.texts == ["é"]  # type: ignore[attr-defined, union-attr]


@pytest.mark.parametrize("tokenizer", get_args(TokenizerKind))
@pytest.mark.parametrize("use", ["labels", "running", "pairs"])
def test_half_a_character_is_damage_for_all(tokenizer: str, use: str, tmp_path: Path) -> None:
    good = {"text": "a few words", "label": "x", "source": "some more words", "target": "a b"}
    key = "target" if use == "pairs" else "text"
    write(tmp_path / "train.jsonl", good, {**good, key: "b \ud83d"}, {**good, key: "whole \U0001f600"})
    write(tmp_path / "val.jsonl", good)
    with pytest.warns(UserWarning, match=rf"train.jsonl:2: {key} has half a character"):
        load(tmp_path, use=use, tokenizer=tokenizer, vocab_size=None, max_length=4, max_damaged=1)


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\xef\xbb\xbfa", "label": "x"}\n')
    data = load(tmp_path, val="train.jsonl")
    assert data.train.texts == ["\ufeffa"]  # type: ignore[attr-defined, union-attr]


def test_labels_that_are_no_numbers_of_classes(tmp_path: Path) -> None:
    for numbers, message in (
        ([0, 1500000, 3000000], "train.jsonl:3: label 3000000 would make .* there are 3 different .* below 1000"),
        ([0, 1000], "train.jsonl:2: label 1000 would make"),
        ([7, *range(150), 1510], "train.jsonl:152: label 1510 would make .* there are 151 .* below 1510 are allowed"),
    ):
        write(tmp_path / "train.jsonl", *({"text": "a", "label": number} for number in numbers))
        with refuses(message):
            load(tmp_path, val="train.jsonl")
    for numbers, count in (([0, 999], 1000), ([*range(150), 1509], 1510)):
        write(tmp_path / "train.jsonl", *({"text": "a", "label": number} for number in numbers))
        assert len(load(tmp_path, val="train.jsonl").classes) == count  # type: ignore[union-attr]


def test_labels_of_both_kinds(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in ("b", 1, "1", 2)]
    write(tmp_path / "mixed.jsonl", *rows)
    write(tmp_path / "text.jsonl", rows[0], rows[2])
    message = r"mixed.jsonl:2: label 1 is a whole number, but .*mixed.jsonl:1: label 'b' is text; all must be"
    for splits in ({"train": "mixed.jsonl", "val": "text.jsonl"}, {"train": "text.jsonl", "val": "mixed.jsonl"}):
        with refuses(message):
            load(tmp_path, **splits)


def test_unknown_labels_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"text": "a", "label": "sports"}, {"text": "a", "label": "tech"})
    write(tmp_path / "val.jsonl", {"text": "a", "label": "tech"}, {"text": "a", "label": "sport"})
    with refuses(r"val.jsonl:2: label 'sport' is not among the training classes sports, tech; did you mean sports\?"):
        load(tmp_path)


def test_long_texts_can_be_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"text": "a", "label": "x"}, {"text": "abcdef", "label": "x"})
    with refuses(r"train.jsonl:2: has 6 tokens, data.max_length = 4 are allowed"):
        load(tmp_path, val="train.jsonl", max_length=4, too_long="refuse")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with refuses(r"train\*.jsonl\*: no such file"):
        load(tmp_path)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a", "label": "x"}\n' * 9000)[:-9])
    with refuses(r"train.jsonl.gz:\d+: no readable file"):
        load(tmp_path)


def test_options_that_would_be_ignored() -> None:
    _, problems = validate(TextJsonl, {"name": "text_jsonl", "use": "running", "label_key": "x"})
    assert "label_key = 'x': is for use = labels, use is running" in problems[0]
