"""Tokenizers, trained on the training texts alone: the same texts give the same tokens, wherever and how often it is done.

The package `tokenizers` works on one thread here unless TOKENIZERS_PARALLELISM says otherwise: its threads do not survive the
fork of a data worker.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "words", "bytes", "characters"]

SPECIAL_TOKENS = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "[SEP]", "[MASK]")
PAD, BOS, EOS, UNK, SEP, MASK = range(len(SPECIAL_TOKENS))
NUM_BYTES = 256
SMALLEST = len(SPECIAL_TOKENS) + NUM_BYTES  # of the kinds that know every byte

SEED_FACTOR, NUM_ROUNDS = 2, 3  # unigram: how many candidates for each piece, how often they are counted anew
NEVER = -1e4  # unigram: the score of what no text is cut into
PIECE = 4000  # characters of a long text that are encoded at once


def train_tokenizer(texts: Sequence[str], kind: TokenizerKind, vocab_size: int, lowercase: bool = False) -> Tokenizer:
    """A tokenizer with the special tokens as ids 0 to 5, whatever its kind.

    Names of special tokens in a text are letters as all others to it, as long as it is not written to a file and read again.

    Args:
        kind: "bpe" on bytes and "bytes" (not trained) give every text back exactly; "unigram" (candidates from BPE, pruned by how
            often the likeliest cut uses them: arXiv:1804.10959 with counts in place of expectations) all but what it never saw;
            "wordpiece" cuts at blanks and punctuation and forgets which blanks there were; "words" knows the most frequent of what
            stands between blanks, all else is [UNK]; "characters" knows the most frequent characters, in their order.
        vocab_size: an upper limit; few texts give fewer tokens.
        lowercase: makes texts lower case first.

    Raises:
        ValueError: there is no text.
    """
    if not any(texts):
        raise ValueError(f"train_tokenizer: kind = {kind!r} has no text to train on")
    tokenizer = TRAINERS[kind]([text.lower() for text in texts] if lowercase else texts, vocab_size)
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Holds a tokenizer against the vocabulary of a checkpoint.

    Raises:
        ValueError: it has another number of tokens, or other special ones.
    """
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(
            f"a tokenizer that does not fit the checkpoint: it has {found} tokens, the checkpoint's model knows {vocab_size}"
        )
    for number, token in enumerate(SPECIAL_TOKENS):
        if tokenizer.token_to_id(token) != number:
            raise ValueError(
                f"a tokenizer that does not fit the checkpoint: {token} is {tokenizer.token_to_id(token)}, must be {number}"
            )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each text, without special ones."""
    for start in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch_fast(list(texts[start : start + 1000]), add_special_tokens=False):
            yield encoding.ids


def pieces(text: str) -> list[str]:
    """A long text in parts of whole lines, whose tokens stand for the text's."""
    parts: list[str] = []
    for line in text.splitlines(keepends=True):
        if parts and len(parts[-1]) + len(line) <= PIECE:
            parts[-1] += line
        else:
            parts.append(line)
    return parts


def byte_level_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    train_bpe(tokenizer, texts, vocab_size, SPECIAL_TOKENS, alphabet)
    return tokenizer


def plain_bytes(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wordpiece(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    # what continues a word is numbered in the order of the letters: left alone the trainer takes them as they come
    letters = sorted({letter for text in texts for letter in text if not letter.isspace()})
    trained = Tokenizer(models.BPE(continuing_subword_prefix="##"))
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first = [*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)]
    train_bpe(trained, texts, vocab_size, first, letters, continuing_subword_prefix="##")
    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def words(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    counts = Counter(word for text in texts for word in text.split() if word not in SPECIAL_TOKENS)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - len(SPECIAL_TOKENS)]
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *by_frequency))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def characters(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    counts = Counter(character for text in texts for character in text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted(frequent[: vocab_size - len(SPECIAL_TOKENS)])
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def unigram(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    # not the package's own trainer, which gives another vocabulary each time, and takes ten times as long
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    candidates = Tokenizer(models.BPE())
    candidates.pre_tokenizer = cut
    letters = sorted(set("".join(SPECIAL_TOKENS)))  # so that the name of a special token can be spelt
    train_bpe(candidates, texts, SEED_FACTOR * vocab_size, SPECIAL_TOKENS, letters)
    num_words = Counter(word for text in texts for word in re.findall(r"\n| [^ \n]*|[^ \n]+", text))
    words, tokenizer = sorted(num_words), candidates
    kept = sorted(token for token in candidates.get_vocab() if token not in SPECIAL_TOKENS)
    for round_number in range(1, NUM_ROUNDS + 1):
        counts: Counter[str] = Counter()
        for word, encoding in zip(words, tokenizer.encode_batch(words, add_special_tokens=False), strict=True):
            for token in encoding.tokens:
                counts[token] += num_words[word]
        share = SEED_FACTOR ** (1 - round_number / NUM_ROUNDS)
        kept.sort(key=lambda token: (len(token) > 1, -counts[token], token))  # no letter is given up
        kept = kept[: max(round(share * vocab_size) - len(SPECIAL_TOKENS), 1)]
        total = sum(counts[token] + 1 for token in kept)
        # six digits, which a file gives back exactly
        scores = [(token, round(math.log((counts[token] + 1) / total), 6)) for token in kept]
        tokenizer = Tokenizer(models.Unigram([*((token, NEVER) for token in SPECIAL_TOKENS), *scores], unk_id=UNK))
        tokenizer.pre_tokenizer = cut
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def train_bpe(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    vocab_size: int,
    first: Sequence[str],
    alphabet: Sequence[str],
    continuing_subword_prefix: str | None = None,
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(first),
        initial_alphabet=list(alphabet),
        continuing_subword_prefix=continuing_subword_prefix or "",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)


TRAINERS: dict[str, Callable[[Sequence[str], int], Tokenizer]] = {
    "bpe": byte_level_bpe,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "words": words,
    "bytes": plain_bytes,
    "characters": characters,
}
