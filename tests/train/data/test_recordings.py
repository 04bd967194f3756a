"""Recordings of every kind, what is said in them, and what is no recording."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torchaudio import functional

from tests.refusals import refuses
from train.data.recordings import (
    UNUSABLE,
    Clip,
    DamagedRecording,
    HeldSamples,
    Recordings,
    SoundFile,
    UnclearText,
    Utterances,
    checked_samples,
    mix,
    resample,
    spoken_form,
)
from train.data.speech_jsonl import SpeechJsonl
from train.data.stream import CountedDraws, TooManyDamaged, TrainingBatches
from train.data.texts import Damage
from train.data.tokenize import train_tokenizer
from train.schema import validate

LETTERS = train_tokenizer(["the quick brown fox jumps over the lazy dog's"], "characters", 100)


def tone(seconds: float = 1.0, rate: int = 8000, pitch: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def held(seconds: float, name: str = "a", text: str = "fox", seed: int = 0, rate: int = 8000) -> Clip:
    noise = np.random.default_rng(seed).integers(-9000, 9000, round(seconds * rate))
    return Clip(name, text, HeldSamples(noise.astype(np.int16), rate), duration=seconds)


def read(path: Path, rate: int = 16000, **options: Any) -> torch.Tensor:
    return Utterances([Clip(str(path), "fox", SoundFile(str(path)))], LETTERS, rate, **options)[0][0]


def pitch_of(wave: torch.Tensor, rate: int) -> float:
    spectrum = torch.fft.rfft(wave * torch.hann_window(len(wave))).abs()
    return float(spectrum.argmax()) * rate / len(wave)


def settings(**options: object) -> SpeechJsonl:
    node, problems = validate(SpeechJsonl, {"name": "speech_jsonl", **options})
    assert node is not None, problems
    return node


def gathered(train: Sequence[Clip], test: Sequence[Clip], **options: Any) -> Recordings:
    data = settings(**options)
    return data.recordings(train, test, Damage(data.max_damaged))


# samples


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000])
def test_l11_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(1.0, rate), rate)
    wave = read(tmp_path / "a.wav")
    assert wave.shape == (16000,)
    assert wave.dtype == torch.float32
    assert abs(pitch_of(wave, 16000) - 440) < 1.5
    if rate != 16000:
        samples = torch.from_numpy(soundfile.read(tmp_path / "a.wav", dtype="float32")[0])
        torch.testing.assert_close(wave, functional.resample(samples, rate, 16000)[:16000], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rate", "new_rate", "count"), [(11127, 16000, 11127), (15999, 16000, 30001), (48000, 8000, 4)]
)
def test_lengths_are_those_of_the_rates(rate: int, new_rate: int, count: int) -> None:
    wave = resample(tone(count / rate, rate), rate, new_rate)
    assert len(wave) == max(1, round(count * new_rate / rate))
    assert torch.isfinite(wave).all()
    if count > 9000:
        assert abs(pitch_of(wave, new_rate) - 440) < 1.5


def test_l10_channels_are_mixed_or_chosen(tmp_path: Path) -> None:
    left, right, third = tone(pitch=300), tone(pitch=500) / 2, tone(pitch=700) / 4
    soundfile.write(tmp_path / "three.flac", np.stack([left, right, third], axis=1), 8000)
    soundfile.write(tmp_path / "two.wav", np.stack([left, right], axis=1), 8000)
    two = read(tmp_path / "two.wav", 8000)
    assert two.shape == (8000,)
    np.testing.assert_allclose(two, (left + right) / 2, atol=1e-4)
    np.testing.assert_allclose(read(tmp_path / "three.flac", 8000), (left + right + third) / 3, atol=1e-4)
    np.testing.assert_allclose(read(tmp_path / "three.flac", 8000, channel=2), third, atol=1e-4)
    with pytest.raises(DamagedRecording, match=r"two.wav: has 2 channels, none of them is data.channel = 2"):
        read(tmp_path / "two.wav", 8000, channel=2)
    soundfile.write(tmp_path / "opposite.wav", np.stack([left, -left], axis=1), 8000, subtype="FLOAT")
    with pytest.raises(DamagedRecording, match="silent"):
        read(tmp_path / "opposite.wav", 8000)


@pytest.mark.parametrize(
    ("file", "subtype", "close"),
    [
        ("a.wav", "PCM_U8", 1e-2),
        ("a.wav", "PCM_24", 1e-6),
        ("a.wav", "PCM_32", 1e-6),
        ("a.wav", "FLOAT", 0),
        ("a.wav", "DOUBLE", 0),
        ("a.wav", "ULAW", 3e-2),
        ("a.aiff", "PCM_16", 1e-4),
        ("a.flac", "PCM_24", 1e-6),
        ("a.ogg", "VORBIS", 0.1),
        ("a.mp3", "MPEG_LAYER_III", 0.1),
    ],
)
def test_files_of_all_kinds_sound_the_same(file: str, subtype: str, close: float, tmp_path: Path) -> None:
    soundfile.write(tmp_path / file, tone(), 8000, subtype=subtype)
    wave = read(tmp_path / file, 8000)
    assert wave.shape == (8000,)
    np.testing.assert_allclose(wave[500:-500], tone()[500:-500], atol=close + 1e-7)


def test_only_the_part_that_is_meant_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ramp = np.arange(40000, dtype=np.int16) - 20000
    soundfile.write(tmp_path / "long.wav", ramp, 8000)
    asked: list[int] = []
    whole_read = soundfile.SoundFile.read

    def counted(self: Any, frames: int = -1, **options: Any) -> np.ndarray:
        asked.append(frames)
        return whole_read(self, frames, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    source = SoundFile(str(tmp_path / "long.wav"))
    part = Utterances([Clip("x", "fox", source, 1.5, 0.25), Clip("x", "fox", source, 4.75, 0.27)], LETTERS, 8000)
    torch.testing.assert_close(part[0][0], torch.from_numpy(ramp[12000:14000] / 2**15).float())
    assert len(part[1][0]) == 2000  # times in manifests are rounded
    assert asked == [2000, 2000]
    same = Utterances([Clip("x", "fox", HeldSamples(ramp, 8000), 1.5, 0.25)], LETTERS, 8000)
    torch.testing.assert_close(same[0][0], part[0][0])


# what is no recording


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "no samples"),
        ([0.1, np.nan, 0.2], "no finite numbers"),
        ([0.1, -np.inf], "no finite numbers"),
        ([0.25] * 100, "silent: all samples are equal"),
        ([0.0] * 2, "silent"),
        ([-30000.0, 200.0], "samples up to 30000, a file of floats holds -1 to 1"),
    ],
)
def test_samples_in_which_nothing_is_heard(samples: list[float], reason: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedRecording, match=f"a.wav: has .*{reason}"):
        checked_samples("a.wav", np.array(samples, dtype=np.float32))
    soundfile.write(tmp_path / "a.wav", np.array(samples, dtype=np.float32), 8000, subtype="FLOAT")
    with pytest.raises(DamagedRecording, match=f"a.wav: has .*{reason}"):
        read(tmp_path / "a.wav", 8000)


def test_a_single_sample_is_a_short_recording_and_loud_ones_are_clipped(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([0.5], dtype=np.float32), 8000)
    assert read(tmp_path / "a.wav", 8000).tolist() == [0.5]
    assert read(tmp_path / "a.wav", 1000).shape == (1,)
    soundfile.write(tmp_path / "b.wav", 2.4 * tone(), 8000, subtype="FLOAT")
    assert read(tmp_path / "b.wav", 8000).abs().max() == 1


@pytest.mark.parametrize("suffix", ["wav", "flac", "aiff", "au", "mp3", "ogg"])
def test_files_that_were_cut_off(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.5, 0.5, 80000), 8000)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 5])
    with pytest.raises(DamagedRecording, match=rf"a.{suffix}: (is cut off|no readable recording)"):
        read(path)
    if suffix in ("wav", "aiff", "au"):
        with pytest.raises(
            DamagedRecording, match=r"is cut off: its header says 1600\d\d bytes of sound, there are \d+"
        ):
            SoundFile(str(path)).seconds()


def test_a_length_that_was_never_filled_in_is_no_damage(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "piped.wav", tone(), 8000)
    content = (tmp_path / "piped.wav").read_bytes()
    (tmp_path / "piped.wav").write_bytes(content[:40] + b"\xff\xff\xff\xff" + content[44:])
    assert read(tmp_path / "piped.wav", 8000).shape == (8000,)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.flac").write_text("this is no sound")
    for name, reason in (
        ("empty.wav", r"no readable recording \(Format not recognised\)"),
        ("text.flac", r"no readable recording \(.+\)"),
        ("gone.wav", "no such file"),
    ):
        with pytest.raises(DamagedRecording, match=f"{name}: {reason}"):
            read(tmp_path / name)
        with pytest.raises(DamagedRecording, match=f"{name}: {reason}"):
            SoundFile(str(tmp_path / name)).seconds()


def test_a_rate_that_no_recording_has(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(), 2**31 - 1)
    with pytest.raises(DamagedRecording, match=r"a\.wav: its header says 2147483647 Hz, at most 1000000 are allowed"):
        read(tmp_path / "a.wav")


def test_parts_outside_of_their_file(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(1), 8000)
    source = SoundFile(str(tmp_path / "a.wav"))
    for start, duration, reason in (
        (1.5, 0.5, "a.wav: should start at 1.5 s, it has 1 s"),
        (0.5, 0.75, "a.wav: should go on to 1.25 s, it has 1 s"),
    ):
        with pytest.raises(DamagedRecording, match=reason):
            Utterances([Clip("x", "fox", source, start, duration)], LETTERS, 8000)[0]
    with pytest.raises(TooManyDamaged, match=r"a.wav from 2 s .*is at an end there, its file is shorter"):
        gathered([held(1), Clip("a.wav from 2 s", "fox", source, 2.0)], [held(1)])


def test_damage_comes_back_whole_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(DamagedRecording("a.wav", "is cut off")))
    assert (type(error), str(error), error.name) == (DamagedRecording, "a.wav: is cut off", "a.wav")


# batches and draws


def test_a_batch_is_padded_with_zeros() -> None:
    utterances = Utterances([held(0.5, text="fox"), held(0.25, text="a dog's".replace("a ", ""))], LETTERS, 8000)
    samples, num_samples, tokens, num_tokens = utterances.collate([utterances[0], utterances[1]])
    assert (samples.shape, samples.dtype) == ((2, 4000), torch.float32)
    assert (num_samples.tolist(), num_tokens.tolist()) == ([4000, 2000], [3, 5])
    assert not samples[1, 2000:].any()
    assert (tokens.shape, tokens.dtype) == ((2, 5), torch.int64)
    assert tokens[0].tolist() == [*utterances.tokens(0).tolist(), 0, 0]
    assert LETTERS.decode(tokens[1].tolist()) == "dog's"
    assert utterances.durations == [0.5, 0.25]


@pytest.mark.parametrize(("speed", "count"), [(0.9, 8889), (1.1, 7273), (1.25, 6400)])
def test_faster_is_shorter_and_higher(speed: float, count: int) -> None:
    wave = resample(tone(), 8000, 8000, speed)
    assert len(wave) == count
    assert abs(pitch_of(wave, 8000) - 440 * speed) < 1.5
    assert len(resample(tone(1, 44100), 44100, 16000, speed)) == round(16000 / speed)


@dataclass
class Read:
    """A run of two epochs over four recordings: what came out."""

    lengths: list[int]
    peaks: list[float]


def two_epochs(seed: int, num_workers: int) -> Read:
    clips = [held(0.2, str(number), seed=number) for number in range(4)]
    utterances = Utterances(clips, LETTERS, 8000, speed=(0.5, 0.8, 1.0, 1.25, 2.0), volume=6)
    found = Read([], [])
    with TrainingBatches(
        utterances, CountedDraws(4, 2, num_steps=8, seed=seed), num_workers, pin_memory=False
    ) as batches:
        for _ in range(8):
            samples, num_samples, _, _ = next(batches)
            found.lengths += num_samples.tolist()
            found.peaks += samples.abs().amax(1).tolist()
    return found


def test_j6_draws_differ_and_do_not_depend_on_the_workers() -> None:
    alone = two_epochs(seed=3, num_workers=0)
    assert two_epochs(seed=3, num_workers=2) == alone
    assert len(set(alone.lengths)) >= 4
    assert alone.lengths[:4] != alone.lengths[4:8]
    assert len(set(alone.peaks)) == 16
    assert two_epochs(seed=4, num_workers=0) != alone


def test_testing_draws_nothing() -> None:
    recordings = gathered([held(1)], [held(1)], sample_rate=8000, speed=[0.5], volume=20.0)
    before = torch.get_rng_state()
    torch.testing.assert_close(recordings.test[0][0], recordings.test[0][0])
    assert len(recordings.test[0][0]) == 8000
    assert torch.equal(torch.get_rng_state(), before)
    assert len(recordings.train[0][0]) == 16000
    assert recordings.train[0][0].abs().max() != recordings.train[0][0].abs().max()


# texts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Please, leave\tyour  message.", "please leave your message"),
        ("l\u2019appel, d'une \u201cvoix\u201d\u2026", "l'appel d'une voix"),
        ("'quoted' words of the dogs'", "quoted words of the dogs"),
        ("re-enter \u2014 non\u2010stop", "re enter non stop"),
        ("cafe\u0301 \ufb01n", "café \ufb01n"),
        ("zero\u200bwidth soft\u00adhyphen", "zerowidth softhyphen"),
        ("हिन्दी, 日本語。", "हिन्दी 日本語"),
        ("under_score 50%", "under score 50"),
        ("?!... -", ""),
    ],
)
def test_how_texts_are_said(text: str, said: str) -> None:
    assert spoken_form(text) == said
    assert spoken_form(said) == said


def test_case_and_punctuation_can_be_kept() -> None:
    assert spoken_form(" Don\u2019t,  go\u2026 ", lowercase=False, punctuation="keep") == "Don't, go..."
    assert spoken_form("Stra\u00dfe \u0130", lowercase=False) == "Stra\u00dfe \u0130"


@pytest.mark.parametrize(
    ("text", "language", "said"),
    [
        ("Press 1, or 12.", "en", "press one or twelve"),
        ("dial 500 (or 1234)", "en", "dial five hundred or one two three four"),
        ("code 007", "en", "code zero zero seven"),
        ("a 28.8 modem", "en", "a twenty eight point eight modem"),
        ("appuyez sur 1. Puis 21", "fr", "appuyez sur un puis vingt et un"),
        ("marque 16", "es", "marque dieciséis"),
        ("premere 8", "it", "premere otto"),
        ("нажмите 7", "ru", "нажмите семь"),
        ("0", "en", "zero"),
    ],
)
def test_numbers_are_written_out(text: str, language: str, said: str) -> None:
    assert spoken_form(text, spell_numbers=True, language=language) == said


@pytest.mark.parametrize(
    "text", ["3D audio", "H.323", "at 12:30", "2nd", "1,000 dogs", "5%", "$5", "1-2", "1.2.3", "№5"]
)
def test_numbers_that_may_be_said_in_several_ways(text: str) -> None:
    with refuses("nobody can tell how .* is said; write it out"):
        spoken_form(text, spell_numbers=True, language="en")
    assert any(letter.isdigit() for letter in spoken_form(text))


def test_numbers_need_a_language() -> None:
    with pytest.raises(
        UnclearText, match=r"'12' is to be written out, and no language is given for it: data.language=en"
    ):
        spoken_form("12 dogs", spell_numbers=True)
    with pytest.raises(UnclearText, match="num2words writes no numbers in the language 'xx'"):
        spoken_form("12 dogs", spell_numbers=True, language="xx")
    assert spoken_form("dogs", spell_numbers=True) == "dogs"
    recordings = gathered(
        [held(1, text="12"), Clip("b", "12", held(1).source, language="fr")], [held(1, text="well")],
        spell_numbers=True, language="en",
    )  # fmt: skip
    assert recordings.train.texts == ["twelve", "douze"]


# what all kinds of data share


def test_what_is_gathered() -> None:
    train = [held(1, "a", "The FOX!"), held(3, "long", "the fox"), held(2, "c", "a dog's")]
    recordings = gathered(train, [held(9, "d", "A fox's, god!")], max_duration=2.5, sample_rate=8000)
    assert recordings.train.names == ["a", "c"]
    assert recordings.train.texts == ["the fox", "a dog's"]
    assert recordings.test.texts == ["a fox's god"]
    assert recordings.test.durations == [9.0]  # a test is not made easier
    assert recordings.left_out == {"longer than 2.5 s (train)": 1}
    assert recordings.tokenizer.get_vocab_size() == 6 + len(set("the foxa dog's"))
    assert (recordings.sample_rate, recordings.max_duration, recordings.max_damaged) == (8000, 2.5, 0)
    for utterances in (recordings.train, recordings.test):
        for index, text in enumerate(utterances.texts):
            assert recordings.tokenizer.decode(utterances.tokens(index).tolist()) == text
    short = gathered(train, [held(1, "d"), held(9, "e")], max_test_duration=5.0)
    assert short.test.names == ["d"]
    assert short.left_out == {"longer than 5 s (test)": 1}


@pytest.mark.parametrize("tokenizer", ["characters", "bpe", "unigram"])
def test_every_tokenizer_gives_the_texts_back(tokenizer: str) -> None:
    texts = ["l'appel est fini", "l'été à la mer", "a dog's  life", "нажмите семь", "हिन्दी"]
    clips = [held(1, text=text) for text in texts]
    recordings = gathered(clips, clips[:2], tokenizer=tokenizer)
    for index, text in enumerate(recordings.train.texts):
        assert (
            recordings.tokenizer.decode(recordings.train.tokens(index).tolist())
            == text
            == " ".join(texts[index].split())
        )


def test_characters_outside_the_alphabet_are_named() -> None:
    test = [held(1, "b.wav", "fox"), held(1, "c.wav", "foж")]
    with pytest.warns(
        UserWarning, match=r"c.wav: its text has the character 'ж' \(U\+0436\), which no training text has"
    ):
        recordings = gathered([held(1)], test, max_damaged=1)
    assert recordings.test.names == ["b.wav"]
    assert recordings.max_damaged == 1
    with pytest.raises(TooManyDamaged, match=r"c\.wav"):
        gathered([held(1)], test)


@pytest.mark.parametrize(
    ("text", "reason"), [("?!", "its text '.!' holds nothing that is said"), ("3D", "how '3D' is said; write it out")]
)
def test_texts_that_cannot_be_used(text: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"bad.wav: .*{reason}; passed over, 1 of 1 allowed"):
        recordings = gathered(
            [held(1), held(1, "bad.wav", text)], [held(1)], max_damaged=1, spell_numbers=True, language="en"
        )
    assert recordings.train.names == ["a"]
    with pytest.raises(TooManyDamaged, match=r"bad\.wav"):
        gathered([held(1)], [held(1, "bad.wav", text)], spell_numbers=True, language="en")


def test_nothing_is_left() -> None:
    with refuses("data.name = 'speech_jsonl': there is no training recording; left out: 1 longer than 2 s \\(train\\)"):
        gathered([held(3)], [held(1)], max_duration=2.0)
    with refuses("there is no test recording"):
        gathered([held(1)], [])


def test_what_cannot_be_used_is_counted() -> None:
    node = settings(max_damaged=2)
    with pytest.warns(UserWarning, match="passed over"):
        data = node.recordings([held(1), held(1, "b", "?")], [held(1), held(1, "c", "zoo")], Damage(2))
    assert data.left_out == {UNUSABLE: 2}


def test_a_vocabulary_without_room() -> None:
    with refuses(
        r"data.vocab_size = 8: has no room for all characters of the training texts, such as those of a; leave"
    ):
        gathered([held(1)], [held(1)], vocab_size=8)
    assert gathered([held(1)], [held(1)], vocab_size=9).tokenizer.get_vocab_size() == 9
    for options, message in (
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size = 100: must be at least 262"),
        ({"tokenizer": "words"}, "must be 'characters', 'bpe' or 'unigram'"),
        ({"speed": []}, "speed"),
        ({"speed": [0.1]}, "speed.0 = 0.1"),
        ({"channel": "left"}, "channel = 'left'"),
        ({"channel": -1}, "channel = -1"),
        ({"max_duration": 0}, "max_duration"),
    ):
        node, problems = validate(SpeechJsonl, {"name": "speech_jsonl", **options})
        assert node is None
        assert message in problems[0]


def test_a_worker_can_be_sent_the_data(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(), 8000)
    clip = Clip("a", "fox", SoundFile(str(tmp_path / "a.wav")))
    recordings = gathered([clip], [clip], sample_rate=8000, speed=[1.0])
    again = pickle.loads(pickle.dumps(recordings.train))
    torch.testing.assert_close(again[0], recordings.train[0])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with refuses(r"recordings need the package `soundfile`: pip install 'relpos2d\[speech\]'"):
        gathered([held(1)], [held(1)])


def test_a_mean_of_channels_is_that_of_one_where_there_is_one() -> None:
    samples = tone()[:, None]
    np.testing.assert_array_equal(mix("a", samples, "mean"), mix("a", samples, 0))
