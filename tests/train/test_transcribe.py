"""python -m train.transcribe: what is said in recordings of any rate and length, and when."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from tokenizers import Tokenizer
from torch import Tensor

from relpos2d.models import ConformerCTC
from relpos2d.tools.memory import peak_bytes
from tests.backbones.builders import draw
from tests.tolerances import assert_close
from tests.train.runs import VIT, make_run
from tests.train.tones import SAMPLE_RATE, Clip, speech_run, tone_clips, write_wav
from train import transcribe as module
from train.align import align
from train.checkpoint import Checkpoint, save_checkpoint
from train.data.recordings import resample
from train.data.tokenize import train_tokenizer
from train.decode import Decoder
from train.transcribe import Listener, Samples, emissions, hear, main

KNOWN = tone_clips(8, seed=3)  # by tone_run


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> list[dict[str, Any]]:
    assert main([*map(str, arguments), "--json", "--device", "cpu"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def joined(clips: Sequence[Clip], gap: float) -> Clip:
    """Recordings put together with silence of our own between them, and when each word of them is said."""
    parts: list[np.ndarray] = []
    words: list[tuple[str, float, float]] = []
    seconds = 0.0
    for clip in clips:
        words += [(word, start + seconds, end + seconds) for word, start, end in clip.words]
        parts += [clip.samples, np.zeros(round(gap * clip.sample_rate), np.float32)]
        seconds = sum(map(len, parts)) / clip.sample_rate
    return Clip(np.concatenate(parts[:-1]), clips[0].sample_rate, " ".join(c.text for c in clips), tuple(words))


def assert_times(words: list[dict[str, Any]], clip: Clip, least: float = 0.3) -> None:
    """All words, each of them rather sure and within 80 ms of when it begins."""
    assert [word["word"] for word in words] == [word for word, _, _ in clip.words]
    for word, (_, start, end) in zip(words, clip.words, strict=True):
        assert abs(word["start"] - start) < 0.08
        assert word["start"] < word["end"] < end + 0.08
        assert least < word["confidence"] <= 1


def test_known_recordings(tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_wav(tmp_path / f"{number}.wav", clip) for number, clip in enumerate(KNOWN)]
    lines = said(capsys, tone_run, tmp_path)
    assert [line["path"] for line in lines] == list(map(str, paths))
    for line, clip in zip(lines, KNOWN, strict=True):
        assert line["text"] == clip.text
        assert line["seconds"] == pytest.approx(clip.seconds, abs=1e-3)
        assert_times(line["words"], clip)
    assert main([str(tone_run), str(paths[0])]) == 0
    head, text, *rest = capsys.readouterr().out.splitlines()
    assert (head, text) == (str(paths[0]), f"  {KNOWN[0].text}")
    words = [f"{w['start']:.2f} {w['end']:.2f} {w['confidence']:.0%} {w['word']}" for w in lines[0]["words"]]
    assert [" ".join(row.split()) for row in rest] == words


def test_a_join_is_in_the_gap_and_words_are_where_they_were(
    tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = KNOWN[0], KNOWN[4]
    clip = joined([first, second], gap=0.5)
    path = write_wav(tmp_path / "joined.wav", clip)
    (line,) = said(capsys, tone_run, path, "--text", clip.text)
    assert_times(line["words"], clip, least=0)  # the model knows clips by heart, but not this one
    join = len(first.words)
    assert line["words"][join - 1]["end"] < first.seconds + 0.08
    assert line["words"][join]["start"] > first.seconds + 0.5


@pytest.mark.parametrize(
    ("rate", "channels", "name"), [(44100, 2, "a.flac"), (16000, 1, "a.wav"), (11025, 3, "a.aiff")]
)
def test_l10_l11_other_rates_and_channels(
    rate: int, channels: int, name: str, tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = KNOWN[0]
    samples = resample(clip.samples, SAMPLE_RATE, rate).numpy()
    loud = np.linspace(1.2, 0.8, channels)[None] if channels > 1 else np.ones((1, 1))  # the mean is 1
    soundfile.write(tmp_path / name, samples[:, None] * loud, rate)
    (line,) = said(capsys, tone_run, tmp_path / name)
    assert line["text"] == clip.text
    assert line["seconds"] == pytest.approx(clip.seconds, abs=1e-3)
    assert_times(line["words"], clip)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 11025, 6000, 8001, 11127])
def test_pieces_are_resampled_as_the_whole(rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 0.03)
    samples = (0.2 * np.random.default_rng(rate).standard_normal((rate // 2 + 7, 2))).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    expected = resample(samples.mean(axis=1), rate, 8000).clamp(-1, 1)
    for counts in ([10**6], [1, 800, 799, 10**6]):
        found = Samples(tmp_path / "a.wav", 8000, "mean")
        parts = [found.take(count) for count in counts]
        assert [len(part) for part in parts[:-1]] == counts[:-1]
        if rate != 8001:  # which is resampled by a simpler ratio, and is as long as that makes it
            assert_close(torch.cat(parts), expected)
        assert not len(found.take(1))
        assert found.seconds == len(samples) / rate
    assert_close(Samples(tmp_path / "a.wav", rate, 1).take(10**6), torch.from_numpy(samples[:, 1]).clamp(-1, 1))


LETTERS = train_tokenizer(["abcdefghijklmnopqrstuvwxyz '"], "characters", 100)


def listener(window: float, tokenizer: Tokenizer = LETTERS, **options: Any) -> Listener:
    """A drawn model that sees 5 frames and a chunk at most, so that windows can hear what it hears of the whole."""
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "num_mels": 20, "subsampling_channels": 4}
    context = {"left_context": 3, "right_context": 3, "kernel_size": 3} if "chunk_size" not in options else {}
    model = ConformerCTC(tokenizer.get_vocab_size(), 8000, normalize="fixed", **sizes, **context, **options)
    draw(model, seed=5)
    with torch.no_grad():  # so that it writes letters of all kinds
        model.head.weight.mul_(4)
        model.head.bias.zero_()[1:6] = -100
    return Listener(model.eval(), tokenizer, Path("run"), Decoder(tokenizer), torch.device("cpu"), "mean", window)


def sound(path: Path, num_samples: int) -> tuple[Path, Tensor]:
    samples = torch.randn(num_samples, generator=torch.Generator().manual_seed(num_samples)) / 20
    soundfile.write(path, samples.numpy(), 8000, subtype="FLOAT")
    return path, samples


@pytest.mark.parametrize("options", [{}, {"chunk_size": 7, "left_context": 7, "kernel_size": 4}])
@pytest.mark.parametrize("num_samples", [1, 319, 320, 8000, 8001, 31999, 32000, 32001, 50000])
def test_windows_hear_what_the_whole_is(options: dict[str, Any], num_samples: int, tmp_path: Path) -> None:
    path, samples = sound(tmp_path / "a.wav", num_samples)
    by_windows = listener(4.0 if options else 1.0, **options)
    found, decibels = (torch.cat(parts) for parts in zip(*emissions(by_windows, by_windows.samples(path)), strict=True))
    model = by_windows.model
    assert len(decibels) == math.ceil(num_samples / 80)
    assert len(found) == model.num_output_frames(torch.tensor(num_samples)) == math.ceil(num_samples / 320)
    if num_samples > 1:  # one sample is silence
        with torch.no_grad():
            assert_close(found, model(samples[None], torch.tensor([num_samples])).log_probs[0])


def test_a_recording_that_fits_into_a_window_is_heard_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    run = module.run
    monkeypatch.setattr(
        module, "run", lambda listener, samples: (lengths.append(len(samples)), run(listener, samples))[1]
    )
    for num_samples, expected in ((8000, [8000]), (8001, [8000, 8000 - 319]), (16000, [8000] * 3)):
        by_windows = listener(1.0)
        lengths.clear()
        list(emissions(by_windows, by_windows.samples(sound(tmp_path / "a.wav", num_samples)[0])))
        assert lengths == expected, num_samples


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    """Beside what is kept of each frame: no part of the 4 bytes that each of 8,000 samples a second takes."""
    by_windows = listener(20.0)
    peaks, kept = [], []
    for minutes in (2, 10):
        path, _ = sound(tmp_path / f"{minutes}.wav", minutes * 60 * 8000)
        peaks.append(peak_bytes(lambda path=path: hear(by_windows, path)))  # type: ignore[misc]
        frames = minutes * 60 * 25
        kept.append(frames * by_windows.model.vocab_size * 4 + frames * 4 * 4)
    assert peaks[1] - peaks[0] < 3 * (kept[1] - kept[0]) < 8 * 60 * 8000 * 4
    assert peaks[1] < 10 * 60 * 8000 * 4


def test_l12_long_recordings_are_decoded_and_aligned_in_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_windows = listener(4.0)
    path, _ = sound(tmp_path / "a.wav", 30 * 8000)
    whole = hear(by_windows, path)
    lengths: list[int] = []

    def counted(log_probs: Tensor, tokens: Sequence[int], first_frame: int = 0) -> Any:
        lengths.append(len(log_probs))
        return align(log_probs, tokens, first_frame)

    monkeypatch.setattr(module, "STRETCH", 2.0)
    monkeypatch.setattr(module, "align", counted)
    found = hear(by_windows, path)
    assert len(lengths) >= 15
    assert max(lengths) <= 50
    assert sum(lengths) == 750
    assert len(whole.words) > 5
    assert (found.text, found.words) == (whole.text, whole.words)


def test_silence_and_one_sample(tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, samples in (("a", np.zeros(24000)), ("b", np.full(100_000, 0.25)), ("c", np.zeros(1))):
        soundfile.write(tmp_path / f"{name}.wav", samples, SAMPLE_RATE)
    for line in said(capsys, tone_run, tmp_path):
        assert (line["text"], line["words"]) == ("", [])
    (line,) = said(capsys, tone_run, tmp_path / "a.wav", "--text", "fig")
    assert [(word["word"], word["confidence"]) for word in line["words"]] == [("fig", 0)]


def test_what_cannot_be_read_is_named_and_the_others_are_heard(
    tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_wav(tmp_path / "good.wav", KNOWN[1])
    spoilt = KNOWN[1].samples.copy()
    spoilt[5000] = math.nan
    soundfile.write(tmp_path / "nan.wav", spoilt, SAMPLE_RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "loud.wav", KNOWN[1].samples * 32768, SAMPLE_RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), SAMPLE_RATE)
    (tmp_path / "cut.wav").write_bytes(good.read_bytes()[:-4000])
    (tmp_path / "text.wav").write_text("This is no sound.")
    (tmp_path / "empty").mkdir()
    names = ("absent.wav", "nan.wav", "loud.wav", "none.wav", "cut.wav", "text.wav", "good.wav", "empty")
    assert main([str(tone_run), *(str(tmp_path / name) for name in names), "--json"]) == 1
    printed = capsys.readouterr()
    assert [json.loads(line)["text"] for line in printed.out.splitlines()] == [KNOWN[1].text]
    told = [
        ("empty", "no recording"),  # folders are looked into first
        ("absent.wav", "no such file"),
        ("nan.wav", "has the sample nan at 0.625 s"),
        ("loud.wav", "a file of floats holds -1 to 1"),
        ("none.wav", "has no samples"),
        ("cut.wav", "is cut off"),
        ("text.wav", "no readable recording"),
    ]
    for line, (name, reason) in zip(printed.err.splitlines(), told, strict=True):
        assert line.startswith(f"{tmp_path / name}: ")
        assert reason in line


def test_a_given_text_is_written_as_in_training(
    tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = KNOWN[0]
    path = write_wav(tmp_path / "a.wav", clip)
    (tmp_path / "a.txt").write_text(f"\u00bb{clip.text.upper()}\u00ab!\n")
    (line,) = said(capsys, tone_run, path, "--text-file", tmp_path / "a.txt")
    assert line["text"] == clip.text
    assert_times(line["words"], clip)
    (other,) = said(capsys, tone_run, path, "--text", "moon")
    assert other["words"][0]["confidence"] < 0.5
    said(capsys, tone_run, path, "--text", "fig " * 40, code=1)
    for text, more, message in (
        ("fig " * 40, [], f"{path}: align: 57 frames are too few for the text, its 159 tokens need 159"),
        ("f\u00efg", [], "error: --text has the character '\u00ef' (U+00EF), which no training text has"),
        ("fig", [tmp_path], "error: --text is said in one recording; there are 2"),
        ("?!", [], "error: --text = '?!': holds nothing that is said"),
    ):
        assert main([str(tone_run), str(path), *map(str, more), "--text", text]) == 1
        assert message in capsys.readouterr().err


def test_what_is_written(tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for folder, clip in zip("ab", KNOWN, strict=False):
        (tmp_path / folder).mkdir()
        paths.append(write_wav(tmp_path / folder / "same.wav", clip))
    output = tmp_path / "new" / "out"
    lines = said(capsys, tone_run, *paths, "--output", output, "--pictures")
    assert sorted(path.name for path in output.iterdir()) == ["same.json", "same.png", "same_2.json", "same_2.png"]
    assert [json.loads((output / name).read_text()) for name in ("same.json", "same_2.json")] == lines
    said(capsys, tone_run, paths[0], "--output", paths[1], code=1)
    assert main([str(tone_run), str(paths[0]), "--output", str(paths[1])]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.split(": is")[1]) == ("", " a file; wanted: a folder, or a name that is free\n")


def test_decoding(
    tone_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = KNOWN[0]
    path = write_wav(tmp_path / "a.wav", clip)
    for size, stretch in ((1, 60.0), (5, 60.0), (5, 1.2)):
        monkeypatch.setattr(module, "STRETCH", stretch)
        (line,) = said(capsys, tone_run, path, "--beam", size)
        assert line["text"] == clip.text
        assert_times(line["words"], clip)


def test_models_that_are_no_use(digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "digits", "classify/digits", [f"data.path={digits_csv}", VIT])
    path = write_wav(tmp_path / "a.wav", KNOWN[0])
    assert main([str(tmp_path / "digits"), str(path)]) == 1
    error = "error: .*digits is a run of classify, which hears nothing; use python -m train.predict"
    assert capsys.readouterr().err == error.replace(".*", f"{tmp_path}/") + "\n"
    options = speech_run(tmp_path, KNOWN[:2])
    model = make_run(
        tmp_path / "run", options[0], [*options[1:], "decoding={name: beam, lexicon: train, beam_size: 3}"]
    )
    assert main([str(tmp_path / "run"), str(path)]) == 1
    assert (
        "decoding.lexicon = 'train' needs the training texts; --beam 3 searches without them" in capsys.readouterr().err
    )
    assert main([str(tmp_path / "run"), str(path), "--beam", "3"]) == 0
    with torch.no_grad():
        model.head.bias[3] = math.nan
    save_checkpoint(tmp_path / "run" / "checkpoints", Checkpoint(4, {"model": model.state_dict()}, {}, {}))
    capsys.readouterr()
    assert main([str(tmp_path / "run"), str(path), "--beam", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step_4: the model's outputs are not finite; its weights are spoilt" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["a.wav", "--pictures"], "--pictures needs --output FOLDER"),
        (["a.wav", "--language", "en"], "--language needs --text or --text-file"),
        (["a.wav", "--text", "a", "--beam", "3"], "--beam is for finding the text; it is given"),
        (["a.wav", "--window", "0.5"], "'0.5' must be a number of seconds, at least 1"),
        (["a.wav", "--window", "long"], "'long' must be a number of seconds, at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
