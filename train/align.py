"""When each word of a text is said: the likeliest way through a recogniser's frames that spells it, and its picture."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.models.ctc import BLANK, frames_needed
from train.compare import COLOURS
from train.report import ACCENT, FAINT, INK, WRONG, printable, save

MAX_CELLS = 2**30  # frames x states of one alignment, a byte each
PAUSE, REACH = 0.1, 0.3  # seconds: a stop consonant is silent for less; words are moved by no more
LOUD = 0.9  # quantile of the loudness in words
QUIET, QUIETEST = (
    30.0,
    40.0,
)  # decibels below it that are silent: fewer where there is noise, an s is hardly louder than the more
NOISE, ABOVE_NOISE, NOTHING = (
    0.05,
    6.0,
    -95.0,
)  # its quantile, decibels above it, decibels of full scale that no microphone gives
ROW_SECONDS, LONGEST_PICTURE = 6.0, 96.0  # seconds
DARKEST_BRIGHTEST = 0.02, 0.995  # quantiles of the spectrogram


@dataclass(frozen=True)
class Span:
    """The frames in which a token is emitted: `start` to `end`, without `end`. `confidence`: its mean probability in them."""

    token: int
    start: int
    end: int
    confidence: float


@dataclass(frozen=True)
class Word:
    """A word and when it is said, in seconds. `confidence`: the mean probability of its tokens in their frames, 0 to 1."""

    word: str
    start: float
    end: float
    confidence: float
    spans: tuple[Span, ...]


def align(log_probs: Tensor, tokens: Sequence[int], first_frame: int = 0) -> list[Span]:
    """The frames of each token on the likeliest path of frames that collapses to all of them.

    Args:
        log_probs: (N, V), any device and floating dtype.
        tokens: none of them the blank.
        first_frame: the number of the first of these frames in the recording; spans count from the recording's start.

    Returns:
        A span for each token, in order and without overlap.

    Raises:
        ValueError: too few frames for the tokens, more than 2**30 frames * tokens * 2 (bytes of memory, some 20 minutes of
            speech in characters), tokens that the model does not know, or log_probs that hold NaN.
    """
    if not tokens:
        return []
    from torchaudio.functional import forced_align, merge_tokens

    num_frames, vocab_size = log_probs.shape
    targets = torch.tensor([list(tokens)], dtype=torch.int64)
    if not BLANK < int(targets.min()) <= int(targets.max()) < vocab_size:
        raise ValueError(
            f"align: tokens from {int(targets.min())} to {int(targets.max())}; allowed: 1 to {vocab_size - 1}"
        )
    needed = int(frames_needed(targets, torch.tensor([len(tokens)])))
    if num_frames < needed:
        raise ValueError(f"align: {num_frames} frames are too few for the text, its {len(tokens)} tokens need {needed}")
    cells = num_frames * (2 * len(tokens) + 1)
    if cells > MAX_CELLS:
        raise ValueError(
            f"align: {num_frames} frames with {len(tokens)} tokens take {cells / 2**30:.1f} GiB, the limit is "
            f"{MAX_CELLS / 2**30:.0f} GiB; cut the recording and its text into parts"
        )
    if log_probs.isnan().any():
        raise ValueError("align: log_probs hold NaN")
    emissions = log_probs.detach().to("cpu", torch.float32)[None]
    path, scores = forced_align(emissions, targets, blank=BLANK)
    merged = merge_tokens(path[0], scores[0].exp(), blank=BLANK)
    assert [span.token for span in merged] == list(tokens)
    return [Span(span.token, span.start + first_frame, span.end + first_frame, span.score) for span in merged]


def to_words(
    spans: Sequence[Span], tokenizer: Tokenizer, frame_time: Callable[[float], float], seconds: float
) -> list[Word]:
    """The words between blanks that tokens spell, with their times.

    A word starts where the first frame of its first token starts, and ends where the last frame of its last token ends: half a
    frame before and behind their middles. Tokens of a blank alone are in no word.

    Args:
        spans: all tokens of a recording, in order.
        tokenizer: whose tokens have blanks at their ends only, as those of train.data.
        frame_time: the second at which a frame is centred.
        seconds: of the recording.
    """
    texts = {span.token: tokenizer.decode([span.token]) for span in spans}
    groups: list[list[Span]] = [[]]
    for span in spans:
        text = texts[span.token]
        if text[:1].isspace():
            groups.append([])
        if text.strip():
            groups[-1].append(span)
        if text[-1:].isspace():
            groups.append([])
    words: list[Word] = []
    for group in filter(None, groups):
        written = tokenizer.decode([span.token for span in group]).strip()
        num_frames = sum(span.end - span.start for span in group)
        confidence = sum(span.confidence * (span.end - span.start) for span in group) / num_frames
        start, end = max(0.0, frame_time(group[0].start - 0.5)), min(seconds, frame_time(group[-1].end - 0.5))
        words.append(Word(written, start, end, confidence, tuple(group)))
    return words


def beside_pauses(words: Sequence[Word], decibels: Tensor, hop: float) -> list[Word]:
    """The words with starts and ends moved to the pauses next to them, where there are such.

    A recogniser may emit a token anywhere near its sound. So a word that follows a pause starts where the sound starts again, and
    one that a pause follows ends where the sound ends, up to 0.3 s from their tokens. A pause is a tenth of a second 40 dB below
    the loud parts of words, or 30 dB where there is noise; in more noise there is none, and nothing is moved. Before and behind
    the recording it is silent.

    Args:
        words: in order.
        decibels: (F,), how loud each `hop` seconds of the recording are.
    """
    if not words:
        return []
    inside = torch.cat([decibels[int(word.start / hop) : math.ceil(word.end / hop)] for word in words])
    pauses = find_pauses(decibels, silence_level(decibels, float(inside.quantile(LOUD))), hop)
    starts, ends = ([pause[edge] for pause in pauses] for edge in (0, 1))
    moved: list[Word] = []
    for number, word in enumerate(words):
        start, end = word.start, word.end
        before = ends[bisect_right(starts, start) - 1]
        earliest = words[number - 1].end if number else 0.0
        if max(earliest, start - REACH) <= before <= start + REACH and before < end:
            start = before
        behind = starts[bisect_left(ends, end)]
        latest = words[number + 1].start if number + 1 < len(words) else math.inf
        if end - REACH <= behind <= min(end + REACH, latest) and behind > start:
            end = behind
        moved.append(replace(word, start=start, end=end))
    return moved


def loudness(samples: Tensor, hop: int) -> Tensor:
    """Decibels of full scale (F,) of each `hop` samples of (t,), with silence behind the last."""
    power = torch.nn.functional.pad(samples, (0, -len(samples) % hop)).view(-1, hop).square().mean(dim=1)
    return 10 * (power + 1e-10).log10()


def silence_level(decibels: Tensor, loud: float) -> float:
    """How loud (F,) decibels may be where nothing is said, in a recording whose words are `loud`."""
    heard = decibels[decibels > NOTHING]  # a gap without any noise says nothing of the noise elsewhere
    noise = float(heard.quantile(NOISE)) if len(heard) else NOTHING
    return min(max(loud - QUIETEST, noise + ABOVE_NOISE), loud - QUIET)


def find_pauses(decibels: Tensor, silence: float, hop: float) -> list[tuple[float, float]]:
    """From when to when it is no louder than `silence`, the time before and behind the recording among it."""
    edge = torch.zeros(1, dtype=torch.bool)
    # [. . x x . x] -> x starts at 2 and 5, ends at 4 and 6
    sounds = torch.cat((edge, decibels > silence, edge)).int()
    turns = (torch.nonzero(sounds.diff())[:, 0].double() * hop).tolist()
    silent = zip([-math.inf, *turns[1::2]], [*turns[::2], math.inf], strict=True)
    return [(start, end) for start, end in silent if end - start >= PAUSE - hop / 2]


def cut_at_silence(log_probs: Tensor, max_frames: int) -> list[tuple[int, int]]:
    """Frames in stretches of at most `max_frames`, cut where nothing is said for longest.

    Stretches are as long as that allows, at least half of `max_frames`. Where there is no blank frame, the cut is at the likeliest.

    Args:
        log_probs: (N, V).

    Returns:
        Start and end (not included) of each; one after the other they are all frames.
    """
    num_frames = len(log_probs)
    cuts = [0]
    while num_frames - cuts[-1] > max_frames:
        first = cuts[-1] + (max_frames + 1) // 2
        searched = log_probs[first : cuts[-1] + max_frames]
        blank = searched.argmax(dim=1) == BLANK
        middle, length, start = int(searched[:, BLANK].argmax()), 0, 0
        for frame, is_blank in enumerate([*blank.tolist(), False]):
            if is_blank:
                continue
            if frame - start > length:
                middle, length = (start + frame) // 2, frame - start
            start = frame + 1
        cuts.append(first + middle)
    cuts.append(num_frames)
    return list(pairwise(cuts))


def draw_alignment(
    path: Path,
    samples: Tensor,
    log_probs: Tensor,
    words: Sequence[Word],
    model: ConformerCTC,
    tokenizer: Tokenizer,
    title: str = "",
) -> Path:
    """The log-mel spectrogram with each word over its time (red: less than half sure), and below it the tokens' probabilities.

    Six seconds a row; of a recording of more than 16 rows the beginning, as the title says.

    Args:
        samples: (t,) of the recording, or of its beginning.
        log_probs: (N, V) of it.
        words: from `to_words`, of the same frames.
        model: which the log_probs are of.
    """
    longest = round(LONGEST_PICTURE * model.sample_rate)
    samples = samples[:longest].cpu()
    seconds = len(samples) / model.sample_rate
    probabilities = log_probs[: math.ceil(seconds / model.seconds_per_frame)].exp().cpu().numpy()
    if len(probabilities) < len(log_probs):
        title += f"  (the first {seconds:.0f} s)"
    num_rows = max(math.ceil(seconds / ROW_SECONDS - 1e-6), 1)
    width = min(seconds, ROW_SECONDS)
    with torch.no_grad():
        device = model.log_mel.filters.device
        features, _ = model.log_mel(samples[None].to(device), torch.tensor([len(samples)], device=device))
    figure = Figure(figsize=(12, 0.4 + 3 * num_rows), layout="constrained")
    panels = figure.subplots(2 * num_rows, 1, squeeze=False, height_ratios=[1.7, 1] * num_rows)[:, 0]
    times = np.array([model.frame_time(frame) for frame in range(len(probabilities))])
    for row in range(num_rows):
        start, end = row * ROW_SECONDS, row * ROW_SECONDS + width
        draw_spectrogram(
            panels[2 * row], features[0].cpu().numpy(), len(features[0]) * model.log_mel.hop, words, start, end
        )
        draw_probabilities(panels[2 * row + 1], probabilities, times, words, tokenizer, start, end)
    panels[-1].set_xlabel("seconds")
    if title:
        figure.suptitle(title, fontsize=10, color=INK, parse_math=False)
    return save(figure, path)


def draw_spectrogram(
    panel: Axes, features: np.ndarray, seconds: float, words: Sequence[Word], start: float, end: float
) -> None:
    """One row: `features` (F, num_mels) of the whole recording, and the words between two times above them."""
    low, high = np.quantile(features, DARKEST_BRIGHTEST).tolist()
    panel.imshow(
        features.T,
        aspect="auto",
        origin="lower",
        cmap="magma",
        vmin=low,
        vmax=max(high, low + 1e-3),
        extent=(0, seconds, 0, features.shape[1]),
        interpolation="nearest",
    )
    panel.set(xlim=(start, end), xticks=[], yticks=[], ylabel="log-mel")
    panel.spines[:].set_visible(False)
    above = blended_transform_factory(panel.transData, panel.transAxes)
    seconds_per_letter = 0.085 * (end - start) / 11.4  # inches of a letter, of the panel
    taken = [-math.inf] * 3  # where the last label of each line above the panel ends
    for word in words:
        middle = (word.start + word.end) / 2
        colour = ACCENT if word.confidence >= 0.5 else WRONG
        for edge, style in ((word.start, "-"), (word.end, ":")):
            panel.axvline(edge, color="white", linewidth=0.9, linestyle=style)
        bar = max(word.start, start), min(word.end, end)
        if bar[0] < bar[1]:
            panel.plot(
                bar, (1.03, 1.03), color=colour, linewidth=3, solid_capstyle="butt", transform=above, clip_on=False
            )
        if start <= middle < end:
            half = seconds_per_letter * len(word.word) / 2
            line = next((n for n, last in enumerate(taken) if middle - half > last), taken.index(min(taken)))
            taken[line] = middle + half + seconds_per_letter
            place: dict[str, Any] = {
                "ha": "center",
                "va": "bottom",
                "fontsize": 8.5,
                "color": INK if colour is ACCENT else WRONG,
            }
            panel.text(middle, 1.07 + 0.13 * line, printable(word.word), transform=above, parse_math=False, **place)


def draw_probabilities(
    panel: Axes,
    probabilities: np.ndarray,
    times: np.ndarray,
    words: Sequence[Word],
    tokenizer: Tokenizer,
    start: float,
    end: float,
) -> None:
    """One row: (N, V) `probabilities` of the tokens that the words are spelt with, each named where it is likeliest."""
    shown = np.flatnonzero((times >= start - 1) & (times < end + 1))
    panel.fill_between(times[shown], probabilities[shown, BLANK], color=FAINT, alpha=0.35, linewidth=0)
    spans = [
        span for word in words for span in word.spans if span.start < len(times) and start <= times[span.start] < end
    ]
    for token in sorted({span.token for span in spans}):
        panel.plot(times[shown], probabilities[shown, token], color=COLOURS[token % len(COLOURS)], linewidth=1.2)
    for span in spans:
        peak = span.start + int(probabilities[span.start : span.end, span.token].argmax())
        name = printable(tokenizer.decode([span.token]).strip())
        place: dict[str, Any] = {
            "ha": "center",
            "va": "bottom",
            "fontsize": 7.5,
            "color": COLOURS[span.token % len(COLOURS)],
        }
        panel.text(float(times[peak]), 1.04, name, parse_math=False, **place)
    panel.set(xlim=(start, end), ylim=(0, 1.02), yticks=[0, 1], ylabel="probability\n(grey: none)")
    panel.spines[["top", "right"]].set_visible(False)
