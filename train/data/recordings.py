"""What every speech data set is made of: recordings of any rate and number of channels, and what is said in them."""

import importlib
import os.path
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from train.data.images import Data
from train.data.texts import Damage, DamagedText, TokenTable
from train.data.tokenize import PAD, SMALLEST, UNK, encode_texts, train_tokenizer

SpokenTokenizer = Literal["characters", "bpe", "unigram"]
Punctuation = Literal["keep", "remove"]
Channel = Literal["mean"] | NonNegativeInt
Speed = Annotated[float, Field(ge=0.5, le=2)]
Utterance = tuple[Tensor, Tensor]  # samples (t,) float32 at the data's rate; tokens (L,) int64

MANY_CHARACTERS, FEW_PIECES = 8192, 512  # vocab_size where it is left open
UNUSABLE = "damaged, or with a text that cannot be used"  # the reason why a recording is left out
SLACK = 0.05  # seconds that a time in a manifest may lie behind the end of its file: such times are rounded
LOUDEST = 2.0  # what a float file may hold; beyond it the numbers were meant in another unit
LARGEST_FILTER, FINEST = (
    300_000,
    500,
)  # of a resampling: rates such as 11127 Hz would take gigabytes, and are met to 1e-5
HIGHEST_RATE = 1_000_000  # hertz, more than any microphone is for
PLACEHOLDER = 0x7FFFF000  # sizes from here on are what programs write that do not know the size yet

TYPOGRAPHIC = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u02bc": "'", "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u00ab": '"', "\u00bb": '"'}
    | {"\u2026": "...", "\u2010": "-", "\u2011": "-", "\u00ad": "", "\ufeff": "", "\u200b": ""}
)  # fmt: skip


class DamagedRecording(DamagedText):
    """A recording that cannot be read, or whose text cannot be used."""


class UnclearText(ValueError):
    """A text of which nobody can tell how it is said."""


class Source(Protocol):
    """Where the samples of a recording are. It can be sent to a data worker: no file is open between two reads."""

    def seconds(self) -> float:
        """How long all of it is, from its header where it has one.

        Raises:
            DamagedRecording: it cannot be told.
        """

    def read(self, start: float, duration: float | None) -> tuple[np.ndarray, int]:
        """Samples (t, channels) float32 in [-1, 1] as they were recorded, and how many of them are a second.

        Raises:
            DamagedRecording: they are not there.
        """


@dataclass(frozen=True)
class Clip:
    """A recording, or a part of one, and its text. `name`: how a person finds it; times are in seconds, None is to the end."""

    name: str
    text: str
    source: Source
    start: float = 0.0
    duration: float | None = None
    language: str | None = None


@dataclass(frozen=True)
class Recordings:
    """What a recogniser is trained and tested on. `left_out`: how many recordings are in neither split, by the reason."""

    train: "Utterances"
    test: "Utterances"
    tokenizer: Tokenizer
    sample_rate: int
    max_duration: float
    max_damaged: int = 0
    left_out: dict[str, int] = field(default_factory=dict)


class SpeechData(Data):
    """What all kinds of recordings share: how they sound, and how their texts are written.

    Recordings of any rate are resampled to `sample_rate`; of several channels the mean is taken, or the one whose number `channel`
    is. In training the speed is drawn from `speed` (the pitch goes with it), and the volume changes by up to `volume` decibels.
    Training recordings longer than `max_duration` seconds are left out, test recordings only with a `max_test_duration`.

    Texts are scored as they are learnt: in lower case unless `lowercase` is false, and without punctuation unless it is kept
    (apostrophes inside of words stay, hyphens become blanks). `spell_numbers` writes 12 as twelve, in the language of the
    recording, or in `language` where that is not known; numbers of four digits and more are said digit by digit. The tokenizer
    "characters" has the characters of the training texts; `vocab_size` is an upper limit, 512 where it is left open for "bpe"
    and "unigram".

    Up to `max_damaged` recordings may be unreadable, or have a text that cannot be used; each is named.
    """

    sample_rate: PositiveInt = 16000
    channel: Channel = "mean"
    max_duration: PositiveFloat = 20.0
    max_test_duration: PositiveFloat | None = None
    speed: Annotated[tuple[Speed, ...], Field(min_length=1)] = (0.9, 1.0, 1.1)
    volume: NonNegativeFloat = 0.0
    tokenizer: SpokenTokenizer = "characters"
    vocab_size: int | None = Field(None, ge=8)
    lowercase: bool = True
    punctuation: Punctuation = "remove"
    spell_numbers: bool = False
    language: str | None = Field(None, min_length=2)
    max_damaged: NonNegativeInt = 0

    @model_validator(mode="after")
    def tokenizer_has_room(self) -> "SpeechData":
        if self.tokenizer == "bpe" and self.vocab_size is not None and self.vocab_size < SMALLEST:
            raise ValueError(
                f"vocab_size = {self.vocab_size}: must be at least {SMALLEST}, all bytes and special tokens"
            )
        return self

    @abstractmethod
    def load(self, seed: int) -> Recordings:
        raise NotImplementedError(type(self).__name__)

    def spoken(self, text: str, language: str | None = None) -> str:
        """A text as it is learnt and scored.

        Raises:
            UnclearText: it holds numbers, and nobody can tell how they are said.
        """
        return spoken_form(text, self.lowercase, self.punctuation, self.spell_numbers, language or self.language)

    def recordings(self, train: Iterable[Clip], test: Iterable[Clip], damage: Damage, **left_out: int) -> Recordings:
        """What a kind of data has found, with what all kinds have.

        Raises:
            ValueError: one of the two is empty.
            TooManyDamaged: more than `max_damaged` cannot be used.
        """
        import_package("soundfile")
        if self.spell_numbers:
            import_package("num2words")
        counts = Counter(left_out)
        train = self.usable(train, self.max_duration, "train", damage, counts)
        test = self.usable(test, self.max_test_duration, "test", damage, counts)
        self.refuse_empty("training", train, counts)
        size = self.vocab_size or (MANY_CHARACTERS if self.tokenizer == "characters" else FEW_PIECES)
        tokenizer = train_tokenizer([clip.text for clip in train], self.tokenizer, size)
        refuse_small(tokenizer, train, size)
        test = within_alphabet(tokenizer, test, damage)
        self.refuse_empty("test", test, counts)
        if damage.errors:
            counts[UNUSABLE] = len(damage.errors)
        return Recordings(
            Utterances(train, tokenizer, self.sample_rate, self.channel, self.speed, self.volume),
            Utterances(test, tokenizer, self.sample_rate, self.channel),
            tokenizer,
            self.sample_rate,
            self.max_duration,
            self.max_damaged,
            dict(counts),
        )

    def usable(
        self, clips: Iterable[Clip], longest: float | None, split: str, damage: Damage, counts: Counter[str]
    ) -> list[Clip]:
        """The clips whose text can be used and whose length is known, with both."""
        found = []
        for clip in clips:
            try:
                text = spoken_text(self, clip)
                duration = clip.duration if clip.duration is not None else clip.source.seconds() - clip.start
                if duration <= 0:
                    raise DamagedRecording(
                        clip.name, "is at an end there, its file is shorter" if clip.start else "has no samples"
                    )
            except DamagedRecording as error:
                damage.add(error)
                continue
            if longest is not None and duration > longest:
                counts[f"longer than {longest:g} s ({split})"] += 1
                continue
            found.append(replace(clip, text=text, duration=duration))
        return found

    def refuse_empty(self, split: str, clips: Sequence[Clip], left_out: Counter[str]) -> None:
        if not clips:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise ValueError(
                f"data.name = {self.name!r}: there is no {split} recording"
                + (f"; left out: {reasons}" if reasons else "")
            )


class Utterances(Dataset[Utterance]):
    """Recordings with the tokens of their texts. With `speed` and `volume`, the change is drawn by torch's random numbers.

    Args:
        clips: of which text and duration are final.

    Raises:
        DamagedRecording: in reading one, if its samples are none that its text can be heard in.
    """

    def __init__(
        self,
        clips: Sequence[Clip],
        tokenizer: Tokenizer,
        sample_rate: int,
        channel: Channel = "mean",
        speed: tuple[float, ...] = (1.0,),
        volume: float = 0.0,
    ):
        self.clips, self.sample_rate, self.channel, self.speed, self.volume = clips, sample_rate, channel, speed, volume
        self.names = [clip.name for clip in clips]
        self.texts = [clip.text for clip in clips]
        self.languages = [clip.language for clip in clips]
        self.durations = [float(clip.duration or 0) for clip in clips]  # seconds, before the speed is changed
        self.table = TokenTable(encode_texts(tokenizer, self.texts))

    def __len__(self) -> int:
        return len(self.clips)

    def with_tokenizer(self, tokenizer: Tokenizer, max_damaged: int = 0) -> "Utterances":
        """The same recordings in other tokens, but for those with a character that the tokenizer does not know.

        Raises:
            TooManyDamaged: there are more of these than `max_damaged`.
        """
        clips = within_alphabet(tokenizer, self.clips, Damage(max_damaged))
        return Utterances(clips, tokenizer, self.sample_rate, self.channel, self.speed, self.volume)

    def tokens(self, index: int) -> Tensor:
        return self.table[index].long()

    def __getitem__(self, index: int) -> Utterance:
        clip = self.clips[index]
        samples, rate = clip.source.read(clip.start, clip.duration)
        mono = mix(clip.name, samples, self.channel)
        wave = resample(checked_samples(clip.name, mono), rate, self.sample_rate, self.draw_speed())
        if self.volume:
            wave = wave * 10 ** (self.volume * (2 * torch.rand(()).item() - 1) / 20)
        return wave.clamp(-1, 1), self.tokens(index)

    def draw_speed(self) -> float:
        return self.speed[int(torch.randint(len(self.speed), ()))] if len(self.speed) > 1 else self.speed[0]

    def collate(self, examples: Sequence[Utterance]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """samples (B, T), how many are no padding (B,), tokens (B, L), how many are no padding (B,); padding is 0."""
        samples, num_samples = pad_together([samples for samples, _ in examples])
        tokens, num_tokens = pad_together([tokens for _, tokens in examples])
        return samples, num_samples, tokens, num_tokens


def pad_together(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PAD)
    return padded, torch.tensor([len(row) for row in rows])


@dataclass(frozen=True)
class HeldSamples:
    """Samples (t,) int16 in memory."""

    samples: np.ndarray
    rate: int

    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def read(self, start: float, duration: float | None) -> tuple[np.ndarray, int]:
        first = round(start * self.rate)
        last = len(self.samples) if duration is None else first + round(duration * self.rate)
        return self.samples[first:last, None].astype(np.float32) / 2**15, self.rate


class SoundSource:
    """A file that libsndfile reads: wav, flac, ogg, opus, mp3 and more."""

    name: str

    @abstractmethod
    def open(self) -> str | BinaryIO:
        """A path, or the bytes of a file."""

    def seconds(self) -> float:
        with opened(self.name, self.open()) as sound:
            return sound.frames / sound.samplerate

    def read(self, start: float, duration: float | None) -> tuple[np.ndarray, int]:
        return read_part(self.name, self.open(), start, duration)


@dataclass(frozen=True)
class SoundFile(SoundSource):
    """One in a folder, of which its path is the name."""

    name: str

    def open(self) -> str:
        return self.name


def opened(name: str, file: str | BinaryIO) -> Any:
    """A file as `soundfile.SoundFile`.

    Raises:
        DamagedRecording: it cannot be read, is shorter than its header says, or has a rate that no recording has.
    """
    if isinstance(file, str) and not os.path.isfile(file):  # which is no error for a name that no file can have
        raise DamagedRecording(name, "no such file")
    soundfile = import_package("soundfile")
    try:
        sound = soundfile.SoundFile(file)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        reason = str(getattr(error, "error_string", error)).strip().rstrip(".")
        raise DamagedRecording(name, f"no readable recording ({reason})") from error
    if sound.samplerate > HIGHEST_RATE:
        sound.close()
        raise DamagedRecording(name, f"its header says {sound.samplerate} Hz, at most {HIGHEST_RATE} are allowed")
    if reason := how_cut_off(sound.extra_info):
        sound.close()
        raise DamagedRecording(name, f"is cut off: {reason}")
    return sound


def how_cut_off(log: str) -> str:
    """What libsndfile notes of a file that is shorter than its header says, and reads all the same; nothing if it is whole."""
    for told, found in re.findall(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", log, re.MULTILINE):
        if int(found) < int(told) < PLACEHOLDER:
            return f"its header says {told} bytes of sound, there are {found}"
    half_a_page = "lacks an end-of-stream bit" in log and "Junk after the last page" in log
    return "its last page is not whole" if half_a_page else ""


def read_part(name: str, file: str | BinaryIO, start: float, duration: float | None) -> tuple[np.ndarray, int]:
    """Samples (t, channels) float32 of a part of a file, of which nothing else is read, and the rate.

    Raises:
        DamagedRecording: the file cannot be read, or the part does not lie in it.
    """
    soundfile = import_package("soundfile")
    with opened(name, file) as sound:
        rate, whole = sound.samplerate, sound.frames / sound.samplerate
        first = round(start * rate)
        if not sound.frames:
            raise DamagedRecording(name, "has no samples")
        if first >= sound.frames:
            raise DamagedRecording(name, f"should start at {start:g} s, it has {whole:g} s")
        if duration is not None and start + duration > whole + SLACK:
            raise DamagedRecording(name, f"should go on to {start + duration:g} s, it has {whole:g} s")
        wanted = sound.frames - first if duration is None else min(round(duration * rate), sound.frames - first)
        try:
            sound.seek(first)
            samples = sound.read(wanted, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError, ValueError) as error:
            reason = str(getattr(error, "error_string", error)).strip().rstrip(".")
            raise DamagedRecording(name, f"no readable recording ({reason})") from error
    if len(samples) < wanted - SLACK * rate:
        raise DamagedRecording(name, f"is cut off: {len(samples) / rate:g} s of {wanted / rate:g} s are there")
    return samples, rate


def mix(name: str, samples: np.ndarray, channel: Channel) -> np.ndarray:
    """(t, channels) -> (t,).

    Raises:
        DamagedRecording: there is no such channel.
    """
    if channel == "mean":
        return samples.mean(axis=1)
    if channel >= samples.shape[1]:
        raise DamagedRecording(name, f"has {samples.shape[1]} channels, none of them is data.channel = {channel}")
    return samples[:, channel]


def checked_samples(name: str, samples: np.ndarray) -> np.ndarray:
    """Samples (t,) in which something may be heard.

    Raises:
        DamagedRecording: there are none, they are no numbers or too large, or they are silence.
    """
    if not len(samples):
        raise DamagedRecording(name, "has no samples")
    lowest, highest = float(samples.min()), float(samples.max())
    if not np.isfinite(lowest + highest):
        raise DamagedRecording(name, "has samples that are no finite numbers")
    if max(-lowest, highest) > LOUDEST:
        raise DamagedRecording(name, f"has samples up to {max(-lowest, highest):g}, a file of floats holds -1 to 1")
    if lowest == highest and len(samples) > 1:
        raise DamagedRecording(name, "has a text but is silent: all samples are equal")
    return samples


def resample(samples: np.ndarray, rate: int, new_rate: int, speed: float = 1.0) -> Tensor:
    """Samples (t,) at another rate, (round(t * new_rate / rate / speed),) float32; `speed` 1.1 is faster, and higher."""
    wave = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))
    ratio = Fraction(new_rate, rate) / Fraction(speed).limit_denominator(100)
    length = max(1, round(len(samples) * ratio))
    if ratio.numerator * ratio.denominator > LARGEST_FILTER:
        ratio = ratio.limit_denominator(FINEST)
    if ratio != 1:
        wave = resampler(ratio.denominator, ratio.numerator)(wave)
    return torch.nn.functional.pad(wave, (0, max(0, length - len(wave))))[:length]


@lru_cache(maxsize=64)
def resampler(rate: int, new_rate: int) -> Any:
    """What torchaudio.functional.resample does, with a filter that is made once."""
    return import_package("torchaudio.transforms").Resample(rate, new_rate)


def spoken_form(
    text: str,
    lowercase: bool = True,
    punctuation: Punctuation = "remove",
    spell_numbers: bool = False,
    language: str | None = None,
) -> str:
    """A text as it is said: composed characters, plain quotes, single blanks.

    Args:
        punctuation: "remove" keeps apostrophes between letters, and makes a blank of a hyphen.
        spell_numbers: write numbers out, in `language` (a code such as "en").

    Raises:
        UnclearText: it holds a number that is not a plain one, such as 3D or 12:30, or no language is known.
    """
    text = unicodedata.normalize("NFC", text).translate(TYPOGRAPHIC)
    if spell_numbers:
        text = " ".join(spelled(word, language) if re.search("[0-9]", word) else word for word in text.split())
    if punctuation == "remove":
        text = "".join(
            character if is_spoken(text, place) else " " if unicodedata.category(character) != "Cf" else ""
            for place, character in enumerate(text)
        )
    return " ".join(unicodedata.normalize("NFC", text.lower() if lowercase else text).split())


def is_spoken(text: str, place: int) -> bool:
    """Whether a character is a letter, a mark on one, a digit, or an apostrophe between letters."""
    if text[place] == "'":
        return 0 < place < len(text) - 1 and text[place - 1].isalpha() and text[place + 1].isalpha()
    return unicodedata.category(text[place])[0] in "LMN"


def spelled(word: str, language: str | None) -> str:
    """What stands between two blanks and holds digits, with its number written out.

    Raises:
        UnclearText: it is more than a number with punctuation around it, or no language is known.
    """
    parts = re.fullmatch(r"([\"'(\[-]*)(?:([0-9]+)|([0-9]+)[.,]([0-9]{1,2}))([.,;:!?\"')\]-]*)", word)
    if parts is None:
        raise UnclearText(f"nobody can tell how {word!r} is said; write it out")
    before, whole, units, decimals, after = parts.groups()
    if language is None:
        raise UnclearText(f"{word!r} is to be written out, and no language is given for it: data.language=en")
    num2words = import_package("num2words").num2words
    numbers: list[int | Decimal] = [Decimal(f"{units}.{decimals}") if whole is None else int(whole)]
    if whole and (len(whole) > 3 or whole[0] == "0"):
        numbers = [int(digit) for digit in whole]
    try:
        said = " ".join(num2words(number, lang=language) for number in numbers)
    except NotImplementedError as error:
        raise UnclearText(f"num2words writes no numbers in the language {language!r}") from error
    return f"{before}{said}{after}"


def spoken_text(data: SpeechData, clip: Clip) -> str:
    try:
        text = data.spoken(clip.text, clip.language)
    except UnclearText as error:
        raise DamagedRecording(clip.name, error) from error
    if not text:
        raise DamagedRecording(clip.name, f"its text {clip.text[:40]!r} holds nothing that is said")
    return text


def refuse_small(tokenizer: Tokenizer, clips: Sequence[Clip], vocab_size: int) -> None:
    """Refuse a vocabulary without room for all characters of the training texts.

    Raises:
        ValueError: there is a text that it cannot write.
    """
    for clip, tokens in zip(clips, encode_texts(tokenizer, [clip.text for clip in clips]), strict=True):
        if UNK in tokens:
            raise ValueError(
                f"data.vocab_size = {vocab_size}: has no room for all characters of the training texts, such as those of "
                f"{clip.name}; leave it out"
            )


def within_alphabet(tokenizer: Tokenizer, clips: Sequence[Clip], damage: Damage) -> list[Clip]:
    """The clips whose text can be written with the characters of the training texts; the others are damaged."""
    found = []
    for clip, tokens in zip(clips, encode_texts(tokenizer, [clip.text for clip in clips]), strict=True):
        if UNK not in tokens:
            found.append(clip)
            continue
        strange = next(c for c in clip.text if UNK in tokenizer.encode(c, add_special_tokens=False).ids)
        where = f"{strange!r} (U+{ord(strange):04X})"
        damage.add(DamagedRecording(clip.name, f"its text has the character {where}, which no training text has"))
    return found


def import_package(name: str) -> Any:
    """A package of the extra `speech`.

    Raises:
        ValueError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(f"recordings need the package `{package}`: pip install 'relpos2d[speech]'") from error
