"""Beam search finds the text whose alignments are likeliest together, keeps to its words, and reads no frame behind the end."""

import builtins
import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models.ctc import collapse
from tests.refusals import refuses
from train.data.tokenize import train_tokenizer
from train.decode import Decoder, create_decoder, token_names

TEXTS = ["a cab", "abba", "bad dad | dab"]
SPECIAL = 6

ARPA = """\\data\\
ngram 1={count}
ngram 2=1

\\1-grams:
{lines}

\\2-grams:
-1\t<s> </s>

\\end\\
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Characters: blank, five more special tokens, then ' ', a, b, c, d and |."""
    return train_tokenizer(TEXTS, "characters", 100)


def frames(tokenizer: Tokenizer, path: str, sure: float = 0.9) -> Tensor:
    """(1, N, V) log probabilities in which each letter of the path is likeliest in its frame, `-` for the blank."""
    vocab_size = tokenizer.get_vocab_size()
    probabilities = torch.full((1, len(path), vocab_size), (1 - sure) / (vocab_size - 1))
    for frame, letter in enumerate(path):
        probabilities[0, frame, 0 if letter == "-" else tokenizer.token_to_id(letter)] = sure
    return probabilities.log()


def decode(decoder: Decoder, log_probs: Tensor) -> str:
    (text,) = decoder(log_probs, torch.tensor([log_probs.shape[1]]))
    return text


PATHS = {
    "aa-b-b-aa": "abba",
    "-a  ccaab-": "a cab",
    "  a- --b ": "a b",
    "----": "",
    "": "",
    "aaab": "ab",
    "   ": "",
    "|a|": "|a|",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_where_frames_are_sure_there_is_one_text(tokenizer: Tokenizer, name: str, path: str) -> None:
    assert decode(Decoder(tokenizer, name=name), frames(tokenizer, path)) == PATHS[path]


def test_the_sum_over_alignments_beats_the_likeliest_of_each_frame(tokenizer: Tokenizer) -> None:
    log_probs = torch.full((1, 2, tokenizer.get_vocab_size()), -30.0)
    log_probs[..., 0] = torch.tensor(0.6).log()
    log_probs[..., tokenizer.token_to_id("a")] = torch.tensor(0.4).log()
    assert decode(Decoder(tokenizer), log_probs) == ""  # 0.6 * 0.6
    assert decode(Decoder(tokenizer, name="beam"), log_probs) == "a"  # 0.4 * 0.4 + 2 * 0.4 * 0.6


def test_beam_search_finds_the_likeliest_text(tokenizer: Tokenizer) -> None:
    letters = [0, *(tokenizer.token_to_id(letter) for letter in "ab")]
    decoders = {
        name: Decoder(tokenizer, name=name, **more) for name, more in (("greedy", {}), ("beam", {"beam_size": 64}))
    }
    log_probs = torch.full((20, 5, tokenizer.get_vocab_size()), -60.0)
    log_probs[..., letters] = torch.randn(20, 5, 3).log_softmax(dim=2)
    found = {name: decoder(log_probs, torch.full((20,), 5)) for name, decoder in decoders.items()}
    expected = []
    for row in log_probs.double().exp():
        totals: dict[str, float] = defaultdict(float)
        for path in itertools.product(letters, repeat=5):
            totals[tokenizer.decode(collapse(path))] += float(row[range(5), path].prod())
        expected.append(max(totals, key=totals.__getitem__))
    assert found["beam"] == expected
    assert found["greedy"] != expected


@pytest.mark.parametrize("options", [{}, {"name": "beam"}, {"name": "beam", "lexicon": ["a", "cab", "abba"]}])
def test_l6_a_row_of_a_batch_is_decoded_as_it_is_alone(tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    decoder = Decoder(tokenizer, **options)
    batch = torch.cat([frames(tokenizer, path) for path in ("ab-ba a-b", "a cab-dad", "d  b aab ")])
    num_frames = torch.tensor([5, 5, 0])
    together = decoder(batch, num_frames)
    assert together == ["abba", "a cab", ""]
    for row, count in enumerate(num_frames.tolist()):
        assert decoder(batch[row : row + 1, :count], num_frames[row : row + 1]) == [together[row]]


@pytest.mark.parametrize("options", [{}, {"name": "beam"}])
def test_l7_merge_first_then_drop_blanks(tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    decoder = Decoder(tokenizer, **options)
    assert decode(decoder, frames(tokenizer, "aa-aa")) == "aa"
    assert decode(decoder, frames(tokenizer, "--ab-")) == "ab"


@pytest.mark.parametrize(
    ("words", "path", "text"),
    [
        (["cab", "dab"], "cad", "cab"),
        (["cab", "dab"], "cab dad cad", "cab dab cab"),
        (["a", "ab", "cab"], "acab", "cab"),  # no two words without a blank between them
        (["a", "ab", "cab"], "a cab", "a cab"),
        (["a", "b"], "a -- b--", "a b"),
        (["cab"], "-----", ""),
        (["cab"], "  c-aab  ", "cab"),
        (["abba"], "ab-ba", "abba"),
        (["cab"], "caabbb--  ccabb", "cab cab"),
    ],
)
def test_a_lexicon_forces_its_words(tokenizer: Tokenizer, words: list[str], path: str, text: str) -> None:
    assert decode(Decoder(tokenizer, name="beam", lexicon=words), frames(tokenizer, path)) == text


@pytest.mark.parametrize(("kind", "size"), [("bpe", 290), ("unigram", 40)])
def test_tokens_that_hold_blanks(kind: Any, size: int) -> None:
    tokenizer = train_tokenizer(["bad cab", "bad dad", "cab bad"] * 3, kind, size)
    path = [0]
    for token in tokenizer.encode("bad cab").ids:
        path += [token, token, 0]
    log_probs = torch.nn.functional.one_hot(torch.tensor([path]), tokenizer.get_vocab_size()).float().mul(9)
    for name in ("greedy", "beam"):
        assert decode(Decoder(tokenizer, name=name), log_probs.log_softmax(dim=2)) == "bad cab"
    with refuses(r"decoding\.lexicon: needs a token that stands between words; data\.tokenizer = 'characters' has one"):
        Decoder(tokenizer, name="beam", lexicon=["bad", "cab"])


@pytest.mark.parametrize("options", [{}, {"name": "beam"}])
def test_tokens_fit_into_the_frames_that_they_came_from(options: dict[str, Any]) -> None:
    """Half of a character is decoded as another one, of three bytes, which would need more frames than there are."""
    tokenizer = train_tokenizer(["bad cab"], "bpe", 270)
    halves = [token for token in range(SPECIAL, 262) if tokenizer.decode([token]) == "\ufffd"][:2]
    assert len(halves) == 2
    path = torch.tensor([halves * 3])
    log_probs = torch.nn.functional.one_hot(path, tokenizer.get_vocab_size()).float().mul(9).log_softmax(dim=2)
    assert Decoder(tokenizer, **options).tokens(log_probs, torch.tensor([6])) == path.tolist()


def write_arpa(path: Path, unigrams: dict[str, float]) -> str:
    """A language model without memory, from log probabilities to base 10."""
    lines = [f"{value}\t{word}\t0" for word, value in {"<unk>": -9, "<s>": -9, "</s>": -1, **unigrams}.items()]
    path.write_text(ARPA.format(count=len(lines), lines="\n".join(lines)))
    return str(path)


def test_a_language_model_decides_between_words(tokenizer: Tokenizer, tmp_path: Path) -> None:
    log_probs = (frames(tokenizer, "cab").exp() / 2 + frames(tokenizer, "dab").exp() / 2).log()
    for likely, unlikely in (("cab", "dab"), ("dab", "cab")):
        lm = write_arpa(tmp_path / "words.arpa", {likely: -0.5, unlikely: -3})
        assert decode(Decoder(tokenizer, name="beam", lexicon=["cab", "dab"], lm=lm), log_probs) == likely
    lm = write_arpa(tmp_path / "letters.arpa", dict.fromkeys("abc|", -1.0) | {"d": -0.2})
    assert decode(Decoder(tokenizer, name="beam", lm=lm), log_probs) == "dab"


def test_lm_weight_and_word_score_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lm = write_arpa(tmp_path / "words.arpa", {"cab": -3, "dab": -0.5})
    log_probs = frames(tokenizer, "cab")
    lexicon = ["cab", "dab"]
    assert decode(Decoder(tokenizer, name="beam", lexicon=lexicon, lm=lm, lm_weight=0.1), log_probs) == "cab"
    assert decode(Decoder(tokenizer, name="beam", lexicon=lexicon, lm=lm, lm_weight=10.0), log_probs) == "dab"
    silent = frames(tokenizer, "-a-", sure=0.3)
    assert decode(Decoder(tokenizer, name="beam", lexicon=["a"], word_score=-20.0), silent) == ""
    assert decode(Decoder(tokenizer, name="beam", lexicon=["a"], word_score=20.0), silent) != ""


def test_frames_that_are_no_numbers_are_no_text(tokenizer: Tokenizer) -> None:
    assert decode(Decoder(tokenizer, name="beam"), torch.full((1, 3, tokenizer.get_vocab_size()), torch.nan)) == ""


def test_names_of_tokens_differ_and_hold_no_blank(tokenizer: Tokenizer) -> None:
    names = token_names(tokenizer)
    assert names[SPECIAL:] == ["|", "a", "b", "c", "d", "||"]
    assert len(set(names)) == tokenizer.get_vocab_size()


def test_the_words_of_training_or_of_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("cab c a b\n\nabba\n")
    log_probs = frames(tokenizer, "dad")
    assert decode(create_decoder(tokenizer, {"name": "beam", "lexicon": "train"}, TEXTS), log_probs) == "dad"
    assert decode(create_decoder(tokenizer, {"name": "beam", "lexicon": str(path)}, TEXTS), log_probs) == "cab"
    assert decode(create_decoder(tokenizer, {}, TEXTS), log_probs) == "dad"
    path.write_text(" \n")
    with refuses(r"decoding\.lexicon = '.*words\.txt': holds no word"):
        create_decoder(tokenizer, {"name": "beam", "lexicon": str(path)}, TEXTS)
    with refuses(r"decoding\.lexicon = '.*absent': no readable list of words"):
        create_decoder(tokenizer, {"name": "beam", "lexicon": str(tmp_path / "absent")}, TEXTS)
    path.write_text("cab\nzebra\n")
    with refuses(r"decoding\.lexicon: the word 'zebra' has the character 'z' \(U\+007A\)"):
        create_decoder(tokenizer, {"name": "beam", "lexicon": str(path)}, TEXTS)


def test_language_models_that_cannot_be_read_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with refuses(r"decoding\.lm = '.*absent\.arpa': there is no such file"):
        Decoder(tokenizer, name="beam", lm=str(tmp_path / "absent.arpa"))
    (tmp_path / "bad.arpa").write_text("not a model\n")
    with refuses(r"decoding\.lm = '.*bad\.arpa': no language model that KenLM can read"):
        Decoder(tokenizer, name="beam", lm=str(tmp_path / "bad.arpa"))
    with refuses(r"decoding\.word_score = 2\.0: is for a lexicon, decoding\.lexicon is not given"):
        Decoder(tokenizer, name="beam", word_score=2.0)


def test_without_flashlight_one_is_told(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def fails(name: str, *rest: Any) -> Any:
        if name == "torchaudio.models.decoder":
            raise RuntimeError("CTC Decoder suit requires flashlight-text package")
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fails)
    with refuses(r"decoding\.name = 'beam' needs flashlight-text: pip install 'relpos2d\[speech\]'"):
        Decoder(tokenizer, name="beam")
    assert decode(Decoder(tokenizer), frames(tokenizer, "ab")) == "ab"
