"""From the frames of a recogniser to text: the likeliest label of each frame, or a search for the likeliest text.

The search is flashlight's (arXiv:1812.07625), through torchaudio. Texts that end alike are one: their probabilities are summed.
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models.ctc import BLANK, greedy
from train.data.tokenize import UNK

SILENCE = "<silence>"  # what is said where a tokenizer has no token for a blank
CERTAIN, NEVER = 0.0, -100.0  # log probabilities in a frame that is put behind the last


class Decoder:
    """Writes what is said in a batch of recordings; of each row only its own frames are read.

    Args:
        tokenizer: whose token 0 is the blank of CTC.
        name: "greedy", or "beam" for the search that all other options are for.
        beam_size: how many texts are kept at a time.
        beam_threshold: how much less likely than the best one they may be, in nats.
        lexicon: the words that texts are made of, for a tokenizer of characters; None: anything goes.
        lm: a file that KenLM reads: of words with a lexicon, else of tokens, with | for a blank.
        lm_weight: how often the log probability of the language model counts.
        word_score: what each word of the lexicon adds to the score of a text.

    Raises:
        ValueError: a word that the tokenizer cannot spell, a lexicon for tokens that hold blanks, a score for words without a
            lexicon, a language model that cannot be read, or flashlight is not there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str = "greedy",
        beam_size: int = 16,
        beam_threshold: float = 50.0,
        lexicon: Sequence[str] | None = None,
        lm: str | None = None,
        lm_weight: float = 1.0,
        word_score: float = 0.0,
    ):
        self.tokenizer = tokenizer
        self.has_lexicon = lexicon is not None
        self.separator = tokenizer.token_to_id(" ")  # None where a blank is a part of longer tokens, as in BPE
        if (
            self.has_lexicon and self.separator is None
        ):  # flashlight gives the last token of a word one frame and no more
            raise ValueError(
                "decoding.lexicon: needs a token that stands between words; data.tokenizer = 'characters' has one, if there are "
                "texts of several words"
            )
        if word_score and not self.has_lexicon:
            raise ValueError(f"decoding.word_score = {word_score}: is for a lexicon, decoding.lexicon is not given")
        self.search: Any = None
        if name == "beam":
            options = {"beam_size": beam_size, "beam_threshold": beam_threshold, "word_score": word_score}
            self.search = self.create_search(lexicon, lm, lm_weight=lm_weight, **options)

    def __call__(self, log_probs: Tensor, num_frames: Tensor) -> list[str]:
        """The text of each row, with single blanks between its words.

        Args:
            log_probs: (B, N, V).
            num_frames: (B,), how many frames of each row are real.
        """
        texts = self.tokenizer.decode_batch(self.tokens(log_probs, num_frames))
        return [" ".join(text.split()) for text in texts]

    def tokens(self, log_probs: Tensor, num_frames: Tensor) -> list[list[int]]:
        """The tokens of each row's text, for which it has frames enough; those of the text, encoded, may be others and more."""
        if self.search is None:
            return greedy(log_probs, num_frames)
        frames = log_probs.detach().float().cpu()
        return [self.find(row[:count]) for row, count in zip(frames, num_frames.tolist(), strict=True)]

    def find(self, log_probs: Tensor) -> list[int]:
        """The likeliest tokens of one recording (N, V) that the search has come across."""
        if self.has_lexicon:  # the last word ends in a blank, as the others do
            last = log_probs.new_full((1, log_probs.shape[1]), NEVER)
            last[0, self.separator] = CERTAIN
            log_probs = torch.cat([log_probs, last])
        found = self.search(log_probs.contiguous()[None])[0]
        if not found:  # in frames that are no numbers
            return []
        if self.has_lexicon:
            return self.spell(" ".join(found[0].words))
        vocab_size = self.tokenizer.get_vocab_size()
        return [token for token in found[0].tokens.tolist() if token < vocab_size]

    def create_search(self, lexicon: Sequence[str] | None, lm: str | None, **options: Any) -> Any:
        try:
            from torchaudio.models.decoder import ctc_decoder
        except (ImportError, RuntimeError) as error:  # the second where only flashlight is missing
            raise ValueError("decoding.name = 'beam' needs flashlight-text: pip install 'relpos2d[speech]'") from error
        names = token_names(self.tokenizer)
        options |= {"tokens": [*names, SILENCE], "blank_token": names[BLANK], "log_add": True}
        options["sil_token"] = SILENCE if self.separator is None else names[self.separator]
        if lm is not None and not Path(lm).is_file():
            raise ValueError(f"decoding.lm = {lm!r}: there is no such file")
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "entries.txt"
                if lexicon is not None:
                    file.write_text("".join(self.lexicon_lines(lexicon, names)), encoding="utf-8")
                    return ctc_decoder(lexicon=str(file), lm=lm, **options)
                # in our order: left alone, torchaudio numbers the tokens for the language model in another one
                file.write_text("".join(f"{name}\n" for name in options["tokens"]), encoding="utf-8")
                return ctc_decoder(lexicon=None, lm=lm, lm_dict=str(file), **options)
        except RuntimeError as error:
            if lm is None:
                raise
            raise ValueError(f"decoding.lm = {lm!r}: no language model that KenLM can read ({error})") from error

    def lexicon_lines(self, words: Iterable[str], names: Sequence[str]) -> Iterable[str]:
        """A line a word: itself, and the names of its tokens and of the blank behind it."""
        for word in words:
            yield f"{word} {' '.join(names[token] for token in self.spell(f'{word} '))}\n"

    def spell(self, word: str) -> list[int]:
        tokens = self.tokenizer.encode(word, add_special_tokens=False).ids
        if UNK in tokens:
            strange = next(c for c in word if UNK in self.tokenizer.encode(c, add_special_tokens=False).ids)
            raise ValueError(
                f"decoding.lexicon: the word {word.strip()!r} has the character {strange!r} (U+{ord(strange):04X}), which no "
                f"training text has"
            )
        return tokens


def token_names(tokenizer: Tokenizer) -> list[str]:
    """What the search calls each token: its text, with | for a blank; no two are called the same."""
    names: dict[str, None] = {}
    for token in range(tokenizer.get_vocab_size()):
        name = "".join("|" if letter.isspace() else letter for letter in tokenizer.id_to_token(token) or "")
        while name in names:
            name += "|"
        names[name] = None
    return list(names)


def create_decoder(tokenizer: Tokenizer, options: dict[str, Any], texts: Sequence[str]) -> Decoder:
    """The decoder of a config.

    Args:
        options: of `Decoder`, but for `lexicon`: "train" stands for the words of the training texts, all else is a file.
        texts: of training.

    Raises:
        ValueError: there is no such file, or the decoder cannot be made.
    """
    if (wanted := options.get("lexicon")) is not None:
        lexicon = words_of(texts) if wanted == "train" else read_words(Path(wanted))
        options = {**options, "lexicon": lexicon}
    return Decoder(tokenizer, **options)


def words_of(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in text.split()})


def read_words(path: Path) -> list[str]:
    """The words of a file: what stands first in each line, so that a lexicon with pronunciations will do.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    try:
        words = words_of(line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"decoding.lexicon = {str(path)!r}: no readable list of words ({error})") from error
    if not words:
        raise ValueError(f"decoding.lexicon = {str(path)!r}: holds no word")
    return words
