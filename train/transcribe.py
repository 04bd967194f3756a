"""`python -m train.transcribe CHECKPOINT FILE...`: what is said in recordings of any length, and when each word is said."""

import argparse
import json
import math
import os.path
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.models.ctc import BLANK, IMPOSSIBLE
from train.align import (
    LONGEST_PICTURE,
    Span,
    Word,
    align,
    beside_pauses,
    cut_at_silence,
    draw_alignment,
    loudness,
    to_words,
)
from train.data.recordings import FINEST, LOUDEST, SLACK, Channel, DamagedRecording, import_package, mix, opened
from train.data.speech_folder import find_sounds
from train.data.texts import read_text
from train.data.tokenize import UNK
from train.decode import Decoder, create_decoder
from train.restore import Restored, restore, to_device
from train.tool import create_parser, file_names, positive, run_command, run_tool

LONGEST_WINDOW = 20.0  # seconds, unless --window says otherwise
CONTEXT = 3.0  # seconds on both sides of a window, a quarter of it at most
STRETCH = 60.0  # seconds that are decoded and aligned at once, cut at silences
BLOCK = 10.0  # seconds that are read at once


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "transcribe",
        "Writes what is said in recordings, and for each word when (from, to, in seconds) and how sure the model is. Files of any "
        "rate and length; those that cannot be read are named on stderr, the others are transcribed all the same, and the exit "
        "code is 1.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recording, or a folder of them")
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--text", metavar="TEXT", help="what is said in the one FILE: find the times of these words")
    told.add_argument("--text-file", type=Path, metavar="FILE.txt", help="the same from a file")
    parser.add_argument("--language", metavar="CODE", help="in which numbers of the text are said: en, fr, ...")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a recording")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write NAME.json of each recording there")
    parser.add_argument("--pictures", action="store_true", help="and draw NAME.png there: words over the spectrogram")
    parser.add_argument(
        "--beam", type=positive, metavar="N", help="keep N texts in a beam search; 1: greedy (default: as in training)"
    )
    parser.add_argument(
        "--window",
        type=seconds_at_least_1,
        metavar="SECONDS",
        help="hear longer recordings in overlapping windows of this length (default: the longest of training, at most 20)",
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    given = parser.parse_intermixed_args(arguments)
    has_text = given.text is not None or given.text_file is not None
    for option, value, needed, there in (
        ("--pictures", given.pictures, "--output FOLDER", given.output),
        ("--language", given.language, "--text or --text-file", has_text),
    ):
        if value and not there:
            parser.error(f"{option} needs {needed}")
    if has_text and given.beam is not None:
        parser.error("--beam is for finding the text; it is given")
    return run_tool(transcribe, given)


def seconds_at_least_1(text: str) -> float:
    """A number of seconds, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 1")
    return seconds


@dataclass(frozen=True)
class Listener:
    """All that turns a recording into words."""

    model: ConformerCTC
    tokenizer: Tokenizer
    checkpoint: Path
    decoder: Decoder
    device: torch.device
    channel: Channel
    window: float

    def samples(self, path: Path) -> "Samples":
        return Samples(path, self.model.sample_rate, self.channel)


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording. `log_probs`: (N, V), what the model heard; times are in seconds."""

    text: str
    words: list[Word]
    log_probs: Tensor
    seconds: float

    def as_dict(self, path: Path) -> dict[str, Any]:
        words = [
            {"word": w.word, "start": round(w.start, 3), "end": round(w.end, 3), "confidence": round(w.confidence, 4)}
            for w in self.words
        ]
        return {"path": str(path), "text": self.text, "words": words, "seconds": round(self.seconds, 3)}

    def as_lines(self, path: Path) -> str:
        lines = [f"  {w.start:8.2f} {w.end:8.2f}  {w.confidence:4.0%}  {w.word}" for w in self.words]
        return "\n".join([str(path), f"  {self.text}", *lines])


def transcribe(given: argparse.Namespace) -> int:
    restored = restore(given.checkpoint, given.weights)
    if restored.config.task != "speech_recognition":
        raise ValueError(
            f"{restored.folder} is a run of {restored.config.task}, which hears nothing; use python -m train.predict"
        )
    if given.output and given.output.exists() and not given.output.is_dir():
        raise ValueError(f"--output = {str(given.output)!r}: is a file; wanted: a folder, or a name that is free")
    listener = create_listener(given, restored)
    paths, num_failed = find_recordings(given.files)
    tokens = None
    if given.text is not None or given.text_file is not None:
        if len(paths) + num_failed != 1:
            raise ValueError(f"--text is said in one recording; there are {len(paths) + num_failed}")
        text = given.text if given.text is not None else read_text(given.text_file)
        tokens = tokens_of(text, restored, given.language)
    names = file_names(paths)
    for path, name in zip(paths, names, strict=True):
        try:
            found = hear(listener, path, tokens)
        except DamagedRecording as error:
            print(error, file=sys.stderr)
            num_failed += 1
            continue
        print(json.dumps(found.as_dict(path), ensure_ascii=False) if given.json else found.as_lines(path), flush=True)
        if given.output:
            write(given.output, name, path, found, listener if given.pictures else None)
    return 1 if num_failed else 0


def create_listener(given: argparse.Namespace, restored: Restored) -> Listener:
    """The model as it was tested, but for what is asked otherwise.

    Raises:
        ValueError: its decoder needs what is not there.
    """
    device = to_device(given.device)
    model, tokenizer = restored.model, restored.tokenizer
    assert isinstance(model, ConformerCTC)
    assert tokenizer is not None
    decoding, options = restored.config.decoding, dict[str, Any]()
    if given.beam is not None:
        options = {"name": "beam", "beam_size": given.beam} if given.beam > 1 else {}
    elif decoding is not None:
        options = {"name": decoding.name, **decoding.given()}
        if options.get("lexicon") == "train":
            raise ValueError(
                f"{restored.folder}: decoding.lexicon = 'train' needs the training texts; --beam {decoding.beam_size} searches "
                "without them"
            )
    data: Any = restored.config.data
    window = given.window or min(restored.description.max_duration, LONGEST_WINDOW)
    decoder = create_decoder(tokenizer, options, [])
    return Listener(model.to(device), tokenizer, restored.checkpoint, decoder, device, data.channel, window)


def find_recordings(given: Sequence[str]) -> tuple[list[Path], int]:
    """The files, those of folders in the order of their names, and how many folders have none; these are named on stderr."""
    paths: list[Path] = []
    num_failed = 0
    for path in map(Path, given):
        try:
            paths += find_sounds(path)[0] if os.path.isdir(path) else [path]
        except ValueError as error:
            print(error, file=sys.stderr)
            num_failed += 1
    return paths, num_failed


def tokens_of(text: str, restored: Restored, language: str | None) -> list[int]:
    """A text as the model was taught to write it.

    Raises:
        ValueError: nothing of it is said, it has a number of which nobody can tell how it is said, or a character that no training
            text has.
    """
    data: Any = restored.config.data
    tokenizer = restored.tokenizer
    assert tokenizer is not None
    languages: Sequence[str] = getattr(data, "languages", ())
    if language is None and len(languages) == 1:
        language = languages[0]
    spoken = data.spoken(text, language)
    if not spoken:
        raise ValueError(f"--text = {text[:40]!r}: holds nothing that is said")
    for character in spoken:
        if UNK in tokenizer.encode(character, add_special_tokens=False).ids:
            where = f"{character!r} (U+{ord(character):04X})"
            raise ValueError(f"--text has the character {where}, which no training text has")
    return tokenizer.encode(spoken, add_special_tokens=False).ids


def write(folder: Path, name: str, path: Path, found: Transcript, drawn_by: Listener | None) -> None:
    """NAME.json and, if somebody draws it, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found.as_dict(path), ensure_ascii=False, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if drawn_by is not None:
        model = drawn_by.model
        samples = drawn_by.samples(path).take(round(LONGEST_PICTURE * model.sample_rate))
        picture = folder / f"{name}.png"
        draw_alignment(picture, samples, found.log_probs, found.words, model, drawn_by.tokenizer, path.name)


def hear(listener: Listener, path: Path, tokens: Sequence[int] | None = None) -> Transcript:
    """The words of a recording: those of `tokens` where they are given, else what the model hears.

    Memory does not grow with the length of the recording, but for the probabilities of its frames and the words.

    Raises:
        DamagedRecording: it cannot be read, has samples that are no sound, or is too short for the text.
    """
    model, tokenizer = listener.model, listener.tokenizer
    samples = listener.samples(path)
    log_probs, decibels = (torch.cat(parts) for parts in zip(*emissions(listener, samples), strict=True))
    try:
        spans = align(log_probs, tokens) if tokens is not None else recognise(listener, log_probs)
    except ValueError as error:
        raise DamagedRecording(str(path), error) from error
    text = " ".join(tokenizer.decode([span.token for span in spans]).split())
    words = to_words(spans, tokenizer, model.frame_time, samples.seconds)
    words = beside_pauses(words, decibels, model.log_mel.hop)
    return Transcript(text, words, log_probs, samples.seconds)


def recognise(listener: Listener, log_probs: Tensor) -> list[Span]:
    """The tokens of the text that the decoder finds, with their frames; a long recording in stretches."""
    spans: list[Span] = []
    decoder = listener.decoder
    for start, end in cut_at_silence(log_probs, round(STRETCH / listener.model.seconds_per_frame)):
        stretch = log_probs[start:end]
        num_frames = torch.tensor([len(stretch)])
        (tokens,) = decoder.tokens(stretch[None], num_frames)
        if decoder.separator is not None and decoder.has_lexicon and tokens and spans:
            tokens = [decoder.separator, *tokens]  # behind a cut, as between any two words
        spans += align(stretch, tokens, start)
    return spans


def emissions(listener: Listener, samples: "Samples") -> Iterator[tuple[Tensor, Tensor]]:
    """The log probabilities (n, V) of a recording's frames, part after part, and in parts of their own how loud it is.

    What fits into a window is heard at once. Of more, each window moves on by what is not context on its sides, by whole frames
    (and whole chunks), so that its frames are those of the whole recording; the last window is a full one too.
    """
    model = listener.model
    unit = model.context.chunk_size or 1  # frames
    per_unit = round(unit * model.seconds_per_frame * model.sample_rate)
    window = max(round(listener.window * model.sample_rate / per_unit), 3)  # all in units from here on
    context = max(1, min(round(CONTEXT * model.sample_rate / per_unit), window // 4))
    held = samples.take(window * per_unit)
    if not len(held):
        raise DamagedRecording(str(samples.path), "has no samples")
    decibels = loudness(held, model.log_mel.hop_samples)
    first = done = 0  # frame that the window starts with, frame to go on with
    while True:
        new = samples.take((window - 2 * context) * per_unit)
        heard = run(listener, held)
        end = first + (len(heard) if not len(new) else (window - context) * unit)
        yield heard[done - first : end - first].clone(), decibels
        if not len(new):
            return
        decibels, done = loudness(new, model.log_mel.hop_samples), end
        moved = math.ceil(len(new) / per_unit)
        held, first = torch.cat((held[moved * per_unit :], new)), first + moved * unit


def run(listener: Listener, samples: Tensor) -> Tensor:
    """What the model hears in a window of samples (t,): log probabilities (N, V). Where all samples are equal nothing is said.

    Raises:
        ValueError: the outputs are not finite.
    """
    num_samples = torch.tensor([len(samples)], device=listener.device)
    if samples.min() == samples.max():
        num_frames = int(listener.model.num_output_frames(num_samples))
        silence = torch.full((num_frames, listener.model.vocab_size), IMPOSSIBLE)
        silence[:, BLANK] = 0
        return silence
    with torch.no_grad():
        log_probs = listener.model(samples[None].to(listener.device), num_samples).log_probs[0].float().cpu()
    if not log_probs.isfinite().all():
        raise ValueError(f"{listener.checkpoint}: the model's outputs are not finite; its weights are spoilt")
    return log_probs


class Samples:
    """The samples of a recording, mixed and resampled as in training, of which no more than are asked for are in memory.

    Raises:
        DamagedRecording: in reading, where it cannot be read on, is cut off, or holds what is no sound.
    """

    def __init__(self, path: Path, sample_rate: int, channel: Channel):
        self.path, self.sample_rate, self.channel = path, sample_rate, channel
        self.seconds = 0.0  # that were read of it
        self._num_read = 0  # samples as they were recorded
        self._held = torch.empty(0)
        self._pieces = self._resampled()

    def take(self, count: int) -> Tensor:
        """The next `count` samples, fewer where the recording ends."""
        parts, num_held = [self._held], len(self._held)
        while num_held < count and (piece := next(self._pieces, None)) is not None:
            parts.append(piece)
            num_held += len(piece)
        joined = torch.cat(parts)
        self._held = joined[count:].clone()
        return joined[:count]

    def _resampled(self) -> Iterator[Tensor]:
        """Pieces that, put together, are what resampling the whole recording gives."""
        with opened(str(self.path), str(self.path)) as sound:
            exact = Fraction(self.sample_rate, sound.samplerate)
            ratio = exact if max(exact.numerator, exact.denominator) <= FINEST else exact.limit_denominator(FINEST)
            new, old = ratio.numerator, ratio.denominator  # samples that stand for one another
            size = math.ceil(BLOCK * sound.samplerate / old) * old
            resample = import_package("torchaudio.functional").resample
            # the filter sees 6 zero crossings of the lower rate, at 99 % of it, on both sides
            margin = math.ceil((7 * max(1, old / new) + 2) / old) * old
            held, end, num_given = torch.zeros(margin), torch.zeros(margin + old), 0
            for block in chain(self._blocks(sound, size), [end]):
                held = torch.cat((held, block))
                usable = max(0, len(held) - 2 * margin) // old * old
                piece = resample(held[: usable + 2 * margin], old, new)[margin // old * new :][: usable // old * new]
                if block is end:
                    piece = piece[: max(min(1, self._num_read), round(self._num_read * ratio)) - num_given]
                yield piece.clamp(-1, 1)
                held, num_given = held[usable:], num_given + len(piece)

    def _blocks(self, sound: Any, size: int) -> Iterator[Tensor]:
        """(t,) float32, as they were recorded."""
        name = str(self.path)
        while True:
            try:
                block = sound.read(size, dtype="float32", always_2d=True)
            except (import_package("soundfile").SoundFileError, OSError, ValueError) as error:
                reason = str(getattr(error, "error_string", error)).strip().rstrip(".")
                raise DamagedRecording(name, f"no readable recording ({reason})") from error
            if not len(block):
                break
            mono = torch.from_numpy(np.ascontiguousarray(mix(name, block, self.channel)))
            for place in torch.nonzero(~(mono.abs() <= LOUDEST))[:1, 0].tolist():
                wrong, second = float(mono[place]), (self._num_read + place) / sound.samplerate
                raise DamagedRecording(
                    name, f"has the sample {wrong:g} at {second:.3f} s; a file of floats holds -1 to 1"
                )
            self._num_read += len(block)
            self.seconds = self._num_read / sound.samplerate
            yield mono
        if self._num_read < sound.frames - SLACK * sound.samplerate:
            whole = sound.frames / sound.samplerate
            raise DamagedRecording(name, f"is cut off: {self.seconds:g} s of {whole:g} s are there")


if __name__ == "__main__":
    run_command(main)
