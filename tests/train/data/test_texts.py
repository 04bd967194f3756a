"""What text data sets are made of: padding, windows, splits, and texts that cannot be used."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.refusals import refuses
from train.data.stream import TooManyDamaged
from train.data.text_folder import TextFolder
from train.data.texts import (
    Damage,
    DamagedText,
    DrawnWindows,
    Rows,
    TokenTable,
    WholeText,
    read_text,
    split_by_class,
)
from train.schema import validate


def node(**options: object) -> TextFolder:
    found, problems = validate(TextFolder, {"name": "text_folder", "path": "nowhere", **options})
    assert found is not None, problems
    return found


@pytest.mark.parametrize("length", [1, 3, 7, 50, 51, 80])
def test_windows_predict_each_token_once(length: int) -> None:
    tokens = torch.arange(100, 151)
    windows = WholeText(tokens, 9).windows(length)
    predicted: list[int] = []
    for index in range(len(windows)):
        window, count = windows[index]
        assert window.shape == (length + 1,)
        assert window.dtype == torch.int64
        assert window[: count + 1].tolist() == list(range(int(window[0]), int(window[0]) + count + 1))
        assert not window[count + 1 :].any()
        predicted += window[1 : count + 1].tolist()
    assert predicted == list(range(101, 151))
    with pytest.raises(IndexError):
        windows[len(windows)]
    with refuses("length = 0 must be at least 1"):
        WholeText(tokens, 9).windows(0)


def test_drawn_windows_start_anywhere_by_torch_numbers() -> None:
    windows = DrawnWindows(torch.arange(53), 5)
    assert len(windows) == 10
    torch.manual_seed(0)
    starts = [[int(windows[index][0][0]) for index in range(10)] for _ in range(200)]
    assert {start for epoch in starts for start in epoch} == set(range(48))  # all places there are
    assert all(later - earlier <= 10 for epoch in starts for earlier, later in pairwise(epoch))
    torch.manual_seed(0)
    assert [int(windows[index][0][0]) for index in range(10)] == starts[0]
    window, count = windows[9]
    assert (window.tolist(), count) == (list(range(int(window[0]), int(window[0]) + 6)), 5)


def test_running_text_is_whole_and_ends_its_documents() -> None:
    data = node(tokenizer="bytes", max_length=8).running(["one document", "two"], ["däs\nEnde\n", "x"], "a test")
    assert data.test.tokens[0] == 1
    assert (data.test.tokens == 2).nonzero().flatten().tolist() == [11, 13]
    assert data.tokenizer.decode(data.test.tokens.tolist()) == "däs\nEnde\nx"
    assert data.test_bytes == 11
    assert data.test_bytes + 2 == len(data.test.tokens) - 1 == sum(data.test[i][1] for i in range(len(data.test)))
    assert (data.train_bytes, data.origin, len(data.train)) == (15, "a test", 2)
    with refuses("data.max_length = 256: the training text has 5 tokens"):
        node(tokenizer="bytes").running(["abc"], ["abc"], "")


def test_examples_are_padded_on_the_right_and_cut() -> None:
    rows = Rows(["first", "second"], ["abcdefgh", "ab"], [1, 0])
    data = node(tokenizer="bytes", max_length=5).labelled(rows, rows, ("x", "y"), "truncate")
    tokens, length, label = data.train[0]
    assert (length, label) == (5, 1)
    assert data.tokenizer.decode(tokens.tolist()) == "abcde"
    tokens, length, label = data.test[1]
    assert (tokens.dtype, tokens.shape, length, label) == (torch.int64, (5,), 2, 0)
    assert tokens[2:].tolist() == [0, 0, 0]
    with refuses(r"first: has 8 tokens, data.max_length = 5 are allowed; data.too_long=truncate"):
        node(tokenizer="bytes", max_length=5).labelled(rows, rows, ("x", "y"), "refuse")
    with refuses("second: the text is empty"):
        node(tokenizer="wordpiece").labelled(Rows(["a", "second"], ["a", " "], [0, 0]), rows, ("x",), "truncate")
    with refuses("there is no test text"):
        node().labelled(rows, Rows([], [], []), ("x", "y"), "truncate")


def test_a_table_of_tokens() -> None:
    table = TokenTable([[1, 2, 3], [], [4]])
    assert [table[i].tolist() for i in range(len(table))] == [[1, 2, 3], [], [4]]
    assert len(TokenTable([])) == 0
    with pytest.raises(IndexError):
        table[-1]


def test_vocabularies_that_a_tokenizer_cannot_have() -> None:
    for options, message in (
        ({"tokenizer": "bytes", "vocab_size": 500}, "vocab_size = 500: the tokenizer bytes always has 262"),
        ({"vocab_size": 100}, "vocab_size = 100: must be at least 262"),
        (
            {"tokenizer": "bytpair"},
            "tokenizer = 'bytpair': must be 'bpe', 'unigram', 'wordpiece', 'words', 'bytes' or 'characters'",
        ),
    ):
        _, problems = validate(TextFolder, {"name": "text_folder", "path": "x", **options})
        assert len(problems) == 1
        assert message in problems[0]


def test_the_split_is_a_fifth_of_each_class() -> None:
    labels = [0, 1] * 25 + [1] * 50
    train, test = split_by_class(labels)
    assert sorted(train + test) == list(range(100))
    assert [sum(labels[i] == label for i in test) for label in (0, 1)] == [5, 15]
    assert split_by_class(labels) == (train, test)
    with refuses("class 2 has 1 examples"):
        split_by_class([0, 0, 2])


def test_damage_is_counted_up_to_its_limit() -> None:
    damage = Damage(1)
    with pytest.warns(UserWarning, match=r"a.txt: the text is empty; passed over, 1 of 1 allowed"):
        damage.add(DamagedText("a.txt", "the text is empty"))
    with pytest.raises(
        TooManyDamaged, match=r"2 damaged examples, data.max_damaged = 1 .*a.txt, b.txt \(the last: odd\)"
    ):
        damage.add(DamagedText("b.txt", "odd"))


def test_files_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(path) == "one\ntwo\nthree\n"
    path.write_bytes("größe".encode("latin-1"))
    assert read_text(path, "latin-1") == "größe"
    assert read_text(path, errors="replace") == "gr\ufffd\ufffde"
    with refuses(r"a.txt: byte 2 \(0xf6\) is no utf-8; name another data.encoding"):
        read_text(path)
    with refuses(r"no.txt: no readable file \(No such file"):
        read_text(tmp_path / "no.txt")
