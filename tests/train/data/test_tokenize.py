"""Tokenizers: what comes back, which ids are special, and that the same texts give the same tokens."""

import pytest
from tokenizers import Tokenizer

from tests.refusals import refuses
from train.data.tokenize import SPECIAL_TOKENS, check_fits, encode_texts, pieces, train_tokenizer

TEXTS = ["the cat sat on the mat\n\n  and the dog did not", "a cat, and a dog: both sat", "thé größe 東京 🙂"] * 3
KINDS = ("bpe", "unigram", "wordpiece", "bytes", "characters")
SIZES = {"bpe": 300, "unigram": 60, "wordpiece": 90, "bytes": 262, "characters": 60}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_same_ids_in_all_kinds(kind: str) -> None:
    tokenizer = train_tokenizer(TEXTS, kind, SIZES[kind])  # type: ignore[arg-type]
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4, 5]
    assert tokenizer.get_vocab_size() <= SIZES[kind]
    assert not {0, 1, 2, 4, 5} & set(tokenizer.encode("a [SEP] in a text [PAD] means nothing [EOS]").ids)
    assert tokenizer.decode([1, *tokenizer.encode("the cat").ids, 2, 0, 0]) == "the cat"
    check_fits(tokenizer, tokenizer.get_vocab_size())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_give_the_same_tokens(kind: str) -> None:
    first, again, other = (train_tokenizer(texts, kind, SIZES[kind]) for texts in (TEXTS, TEXTS, TEXTS[1:2]))  # type: ignore[arg-type]
    assert first.to_str() == again.to_str()
    assert (first.to_str() == other.to_str()) == (kind == "bytes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeated", [1, 3, 7, 11])
def test_a_file_gives_a_tokenizer_back_exactly(kind: str, repeated: int) -> None:
    tokenizer = train_tokenizer([*TEXTS, *TEXTS[:1] * repeated], kind, SIZES[kind])  # type: ignore[arg-type]
    assert Tokenizer.from_str(tokenizer.to_str()).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_bytes_come_back_exactly(kind: str) -> None:
    tokenizer = train_tokenizer(TEXTS[:2], kind, 300)  # type: ignore[arg-type]
    for text in [*TEXTS, "never seen: ÿ\x00\t\r\n  日本\u2028", " ", "[SEP]", "\ufffd"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_what_unigram_has_seen_comes_back() -> None:
    tokenizer = train_tokenizer(TEXTS, "unigram", 80)
    for text in (*TEXTS, "  on the\n dog "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert 3 in tokenizer.encode("Ж").ids
    assert len(tokenizer.encode("the cat").ids) < 5  # words, not letters


def test_characters_are_those_of_the_texts_in_their_order() -> None:
    tokenizer = train_tokenizer(["l'été\n e\u0301", "été"], "characters", 100)
    letters = sorted("\n 'elté\u0301")
    assert [tokenizer.id_to_token(number) for number in range(6, 6 + len(letters))] == letters
    assert tokenizer.encode("été?").ids == [6 + letters.index(letter) for letter in "été"] + [3]
    for text in ("l'été\n e\u0301", "  t \n\n l ", "e" * 5):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    few = train_tokenizer(["aaabbc"], "characters", 8)
    assert few.encode("abc").ids == [6, 7, 3]  # the rarest goes first


def test_lower_case() -> None:
    tokenizer = train_tokenizer(["The Cat"], "bpe", 300, lowercase=True)
    assert tokenizer.decode(tokenizer.encode("THE CAT").ids) == "the cat"
    assert tokenizer.encode("THE").ids == tokenizer.encode("the").ids


def test_a_tokenizer_that_does_not_fit() -> None:
    tokenizer = train_tokenizer(TEXTS, "bpe", 300)
    with refuses(r"a tokenizer that does not fit the checkpoint: it has \d+ tokens, the checkpoint's model knows 512"):
        check_fits(tokenizer, 512)
    with refuses("kind = 'bpe' has no text"):
        train_tokenizer(["", ""], "bpe", 300)


def test_long_texts_are_encoded_in_parts_that_are_the_text() -> None:
    text = "".join(f"line {number} of many\n" for number in range(1000)) + "the end without a line end"
    parts = pieces(text)
    assert len(parts) > 4
    assert "".join(parts) == text
    tokenizer = train_tokenizer([text], "bpe", 300)
    assert tokenizer.decode([token for part in encode_texts(tokenizer, parts) for token in part]) == text
