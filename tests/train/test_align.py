"""Times of words: the likeliest way through the frames, against all ways; the pauses beside words; the picture."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.models.ctc import collapse
from tests.refusals import refuses
from tests.train.tones import tone_clips
from train import align as module
from train.align import Span, Word, align, beside_pauses, cut_at_silence, draw_alignment, loudness, to_words
from train.data.tokenize import train_tokenizer
from train.report import INK, WRONG
from train.restore import restore

SURE = 0.9
TEXTS = ["café noir über alles", "it's a banana", "noir noir  über", "a b"]


def said(path: Sequence[int], vocab_size: int = 8, sure: float = SURE) -> Tensor:
    """Log probabilities (N, V) of a model that is `sure` of one label a frame."""
    probabilities = torch.full((len(path), vocab_size), (1 - sure) / (vocab_size - 1))
    probabilities[torch.arange(len(path)), torch.tensor(path)] = sure
    return probabilities.log()


def frame_time(index: float) -> float:
    return 0.005 + 0.04 * index


def times(words: Sequence[Word]) -> list[tuple[float, float]]:
    return [(round(word.start, 6), round(word.end, 6)) for word in words]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_spans_are_the_frames_of_the_tokens(dtype: torch.dtype) -> None:
    spans = align(said([0, 6, 6, 0, 0, 7, 7, 7, 0, 7, 6]).to(dtype), [6, 7, 7, 6])
    assert [(span.token, span.start, span.end) for span in spans] == [(6, 1, 3), (7, 5, 8), (7, 9, 10), (6, 10, 11)]
    assert [span.confidence for span in spans] == pytest.approx([SURE] * 4, rel=1e-2)
    later = align(said([0, 6]).to(dtype), [6], first_frame=300)
    assert [(span.start, span.end) for span in later] == [(301, 302)]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 1], [1, 1, 2], [2, 2, 2], [3, 1, 2, 3]])
def test_it_is_the_likeliest_of_all_ways(tokens: list[int]) -> None:
    log_probs = torch.randn(6, 4, generator=torch.Generator().manual_seed(len(tokens))).mul(2).log_softmax(dim=1)
    ways = [way for way in itertools.product(range(4), repeat=6) if collapse(way) == tokens]
    best = max(ways, key=lambda way: sum(float(row[label]) for row, label in zip(log_probs, way, strict=True)))
    way = [0] * 6
    for span in align(log_probs, tokens):
        way[span.start : span.end] = [span.token] * (span.end - span.start)
        expected = log_probs[span.start : span.end, span.token].exp().mean()
        assert span.confidence == pytest.approx(float(expected), rel=1e-5)
    assert tuple(way) == best


def test_what_the_model_is_not_sure_of_is_found_all_the_same() -> None:
    log_probs = said([0, 6, 0, 0, 7, 0])
    (first, second) = align(log_probs, [6, 5])  # 5 is nowhere likely
    assert (first.start, first.end) == (1, 2)
    assert second.confidence == pytest.approx(0.1 / 7, rel=1e-4)


def test_nothing_is_said() -> None:
    assert align(said([0, 6, 0]), []) == []
    assert to_words([], train_tokenizer(TEXTS, "characters", 50), frame_time, 1.0) == []
    assert beside_pauses([], torch.zeros(5), 0.01) == []


def test_what_cannot_be_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses("align: 4 frames are too few for the text, its 3 tokens need 5"):
        align(said([0, 6, 0, 6]), [6, 6, 6])
    assert len(align(said([0, 6, 0, 6, 0]), [6, 6, 6])) == 3
    for token in (0, 8, -1):
        with refuses("allowed: 1 to 7"):
            align(said([0, 6, 0, 6]), [6, token])
    with refuses("align: log_probs hold NaN"):
        align(said([0, 6, 0, 6]) * math.nan, [6])
    monkeypatch.setattr(module, "MAX_CELLS", 11)
    with refuses(
        "align: 4 frames with 1 tokens take .* GiB, the limit is .* cut the recording and its text into parts"
    ):
        align(said([0, 6, 0, 6]), [6])


@pytest.mark.parametrize("kind", ["characters", "bpe", "unigram"])
@pytest.mark.parametrize("text", TEXTS)
def test_words_of_all_tokenizers(kind: Any, text: str) -> None:
    tokenizer = train_tokenizer(TEXTS, kind, 280 if kind == "bpe" else 40)
    tokens = tokenizer.encode(f"{text} ", add_special_tokens=False).ids
    words = to_words([Span(token, i, i + 1, 0.5) for i, token in enumerate(tokens)], tokenizer, frame_time, 100.0)
    assert [word.word for word in words] == text.split()
    used = [span.start for word in words for span in word.spans]
    assert used == sorted(set(used))
    for place in set(range(len(tokens))) - set(used):  # what is in no word is a blank
        assert tokenizer.decode([tokens[place]]).isspace()


def test_words_take_the_time_of_their_frames() -> None:
    tokenizer = train_tokenizer(["ab "], "characters", 50)
    space, a, b = (tokenizer.token_to_id(token) for token in " ab")
    spans = [
        Span(space, 0, 1, 0.1),
        Span(a, 1, 2, 0.8),
        Span(b, 3, 6, 0.4),
        Span(space, 6, 7, 0.1),
        Span(a, 9, 10, 1.0),
    ]
    words = to_words(spans, tokenizer, frame_time, 0.37)
    assert [(word.word, word.spans) for word in words] == [("ab", tuple(spans[1:3])), ("a", (spans[4],))]
    assert times(words) == [(0.025, 0.225), (0.345, 0.37)]  # to the end of the recording at most
    assert [word.confidence for word in words] == pytest.approx([0.5, 1.0])  # of four frames, one of which is at 0.8
    assert to_words([Span(a, 0, 1, 1.0)], tokenizer, frame_time, 1.0)[0].start == 0


def level(*parts: tuple[int, float]) -> Tensor:
    """Decibels of hundredths of a second."""
    return torch.cat([torch.full((count,), float(loud)) for count, loud in parts])


@pytest.mark.parametrize(
    ("decibels", "expected"),
    [
        (level((30, -70), (50, -20), (40, -70)), (0.3, 0.8)),  # both tokens inside of the sound
        (level((43, -70), (30, -20), (40, -70)), (0.43, 0.73)),  # the first before it, the last behind it
        (level((9, -70), (97, -20), (20, -70)), (0.4, 0.75)),  # too far away
        (level((30, -70), (5, -20), (9, -70), (40, -20), (99, -70)), (0.3, 0.84)),  # a stop consonant is no pause
        (level((30, -45), (50, -20), (40, -45)), (0.4, 0.75)),  # noise
        (level((30, -51), (50, -20), (40, -51)), (0.3, 0.8)),  # some noise
        (
            level((30, -75), (15, -55), (50, -20), (40, -75)),
            (0.3, 0.95),
        ),  # an s, which is hardly louder than some noise
        (level((30, -51), (50, -20), (30, -51), (30, -100)), (0.3, 0.8)),  # noise, and a gap without any
        (level((35, -20), (40, -70), (40, -20)), (0.4, 0.75)),  # a word in the middle of a pause: nobody knows
        (level((120, -20)), (0.4, 0.75)),
        (level((120, -100)), (0.4, 0.75)),
    ],
)
def test_words_start_and_end_at_pauses(decibels: Tensor, expected: tuple[float, float]) -> None:
    assert times(beside_pauses([Word("a", 0.4, 0.75, 1.0, ())], decibels, 0.01)) == [expected]


def test_words_at_the_ends_of_a_recording() -> None:
    (word,) = beside_pauses([Word("a", 0.2, 0.3, 1.0, ())], level((45, -20)), 0.01)
    assert times([word]) == [(0.0, 0.45)]


def test_words_are_not_moved_beyond_their_neighbours() -> None:
    words = [Word("a", 0.05, 0.36, 1.0, ()), Word("b", 0.4, 0.6, 1.0, ())]
    decibels = level((20, -20), (13, -70), (47, -20))
    assert times(beside_pauses(words, decibels, 0.01)) == [(0.0, 0.36), (0.4, 0.8)]
    words = [Word("a", 0.05, 0.3, 1.0, ()), Word("b", 0.35, 0.6, 1.0, ())]
    decibels = level((40, -20), (12, -70), (28, -20))
    assert times(beside_pauses(words, decibels, 0.01)) == [(0.0, 0.3), (0.35, 0.8)]


def test_loudness() -> None:
    samples = torch.cat((torch.full((8,), 0.1), torch.zeros(4), torch.full((2,), -1.0)))
    assert loudness(samples, 4).tolist() == pytest.approx([-20, -20, -100, 10 * math.log10(0.5)], abs=1e-3)
    assert loudness(samples[:1], 4).shape == (1,)


def test_cuts_are_in_the_longest_silence() -> None:
    path = [5, 0, 6, 6, 0, 7, 0, 0, 0, 6, 6, 0, 5]
    assert cut_at_silence(said(path), 13) == [(0, 13)]
    assert cut_at_silence(said(path), 12) == [(0, 7), (7, 13)]
    assert cut_at_silence(said(path), 7) == [(0, 4), (4, 8), (8, 13)]  # those of 7 that come late enough
    doubtful = said([5, 6, 5, 6, 5, 6])
    doubtful[4, 0] = math.log(0.05)  # the likeliest blank
    assert cut_at_silence(doubtful, 5) == [(0, 4), (4, 6)]
    assert cut_at_silence(said([6]), 5) == [(0, 1)]


@pytest.mark.parametrize("num_frames", [1, 2, 57, 400])
@pytest.mark.parametrize("longest", [2, 3, 10, 56, 57])
def test_stretches_are_all_frames_and_short(num_frames: int, longest: int) -> None:
    log_probs = torch.randn(num_frames, 5, generator=torch.Generator().manual_seed(num_frames)).log_softmax(dim=1)
    stretches = cut_at_silence(log_probs, longest)
    assert [frame for start, end in stretches for frame in range(start, end)] == list(range(num_frames))
    lengths = [end - start for start, end in stretches]
    assert max(lengths) <= longest
    assert min(lengths[:-1], default=longest) >= longest // 2


@pytest.fixture
def model() -> ConformerCTC:
    return ConformerCTC(40, 8000, embed_dim=16, depth=1, num_heads=2, num_mels=20, subsampling_channels=4).eval()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All that are saved."""
    saved: list[Figure] = []
    save = module.save
    monkeypatch.setattr(module, "save", lambda figure, path: (saved.append(figure), save(figure, path))[1])
    return saved


def letters() -> Tokenizer:
    return train_tokenizer(["$abcdefghi "], "characters", 40)


def test_the_picture_shows_words_over_the_spectrogram(
    model: ConformerCTC, figures: list[Figure], tmp_path: Path
) -> None:
    tokenizer = letters()
    tokens = tokenizer.encode("$bad a$", add_special_tokens=False).ids
    path = [0, 0]
    for token in tokens:
        path += [token, token, 0, 0]
    log_probs = said(path, 40)
    log_probs[-4:-2, tokens[-1]] = math.log(0.01)
    words = to_words(align(log_probs, tokens), tokenizer, model.frame_time, 1.2)
    picture = draw_alignment(tmp_path / "a.png", torch.randn(9600) / 9, log_probs, words, model, tokenizer, "$50 $60")
    with Image.open(picture) as image:
        assert image.width > 1000
    (figure,) = figures
    assert figure.get_suptitle() == "$50 $60"
    above, below = figure.axes
    assert [text.get_text() for text in above.texts] == ["$bad", "a$"]
    assert [same_color(text.get_color(), colour) for text, colour in zip(above.texts, (INK, WRONG), strict=True)]
    assert [text.get_text() for text in below.texts] == list("$bada$")
    for text, span in zip(below.texts, [span for word in words for span in word.spans], strict=True):
        assert model.frame_time(span.start) <= text.get_position()[0] <= model.frame_time(span.end - 1)
    assert above.get_xlim() == below.get_xlim() == (0, 1.2)


def test_the_picture_of_a_long_recording_is_of_its_beginning(
    model: ConformerCTC, figures: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROW_SECONDS", 0.5)
    monkeypatch.setattr(module, "LONGEST_PICTURE", 1.0)
    tokenizer = letters()
    tokens = tokenizer.encode("abba cad", add_special_tokens=False).ids
    log_probs = said([0] * 5 + [label for token in tokens for label in (token, 0, 0, 0)] + [0] * 4, 40)
    words = to_words(align(log_probs, tokens), tokenizer, model.frame_time, len(log_probs) * 0.04)
    draw_alignment(tmp_path / "a.png", torch.zeros(len(log_probs) * 320), log_probs, words, model, tokenizer, "long")
    (figure,) = figures
    assert figure.get_suptitle() == "long  (the first 1 s)"
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 0.5)] * 2 + [(0.5, 1.0)] * 2
    assert [text.get_text() for axes in figure.axes[::2] for text in axes.texts] == ["abba"]  # the other one is later
    assert "".join(text.get_text() for axes in figure.axes[1::2] for text in axes.texts) == "abba"


def test_known_words_start_where_they_are(tone_run: Path) -> None:
    """Within 80 ms, though tokens of this model come up to 0.14 s before their sound, or behind its beginning."""
    restored = restore(tone_run)
    model: Any = restored.model
    assert restored.tokenizer is not None
    for clip in tone_clips(8, seed=3):
        samples = torch.from_numpy(clip.samples)
        with torch.no_grad():
            log_probs = model(samples[None], torch.tensor([len(samples)])).log_probs[0]
        tokens = restored.tokenizer.encode(clip.text, add_special_tokens=False).ids
        words = to_words(align(log_probs, tokens), restored.tokenizer, model.frame_time, clip.seconds)
        moved = beside_pauses(words, loudness(samples, 80), 0.01)
        for word, (text, start, end) in zip(moved, clip.words, strict=True):
            assert word.word == text
            assert abs(word.start - start) < 0.08
            assert word.start < word.end < end + 0.08
