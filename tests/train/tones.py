"""Synthetic speech for the tests: every letter is a tone of its own, a blank is silence, and all times are known."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_RATE = 8000
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
LOWEST, HIGHEST = 300.0, 3500.0  # hertz
GAP, SILENCE = 0.04, 0.16  # seconds: behind a letter; between words, before the first and behind the last
WORDS = ("anna", "bell", "carl", "dot", "egg", "fig", "hill", "it's", "moon", "otto", "sees", "up")


@dataclass(frozen=True)
class Clip:
    """What was said, and when. `words`: each with its start and end in seconds."""

    samples: np.ndarray  # (t,) float32
    sample_rate: int
    text: str
    words: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


def spoken(text: str, seed: int = 0, sample_rate: int = SAMPLE_RATE) -> Clip:
    """The text in tones of 80 to 120 ms, with a trace of noise; the empty text is silence."""
    rng = np.random.default_rng(seed)
    parts = [silence(SILENCE, sample_rate)]
    length = len(parts[0])  # of all parts so far, in samples
    words = []
    for word in text.split():
        start = end = length
        for letter in word:
            sounding = tone(LETTERS.index(letter), rng.uniform(0.08, 0.12), sample_rate)
            parts += [sounding, silence(GAP, sample_rate)]
            end = length + len(sounding)
            length = end + len(parts[-1])
        words.append((word, start / sample_rate, end / sample_rate))
        parts.append(silence(SILENCE, sample_rate))
        length += len(parts[-1])
    samples = np.concatenate(parts)
    samples += 0.003 * rng.standard_normal(len(samples))
    return Clip(samples.astype(np.float32), sample_rate, " ".join(text.split()), tuple(words))


def tone(number: int, seconds: float, sample_rate: int) -> np.ndarray:
    """A tone that fades in and out in 10 ms, so that it does not click."""
    frequency = LOWEST * (HIGHEST / LOWEST) ** (number / (len(LETTERS) - 1))
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    loudness = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
    return 0.3 * loudness * np.sin(2 * np.pi * frequency * time)


def silence(seconds: float, sample_rate: int) -> np.ndarray:
    return np.zeros(round(seconds * sample_rate))


def tone_texts(count: int, seed: int = 0, num_words: int = 3) -> list[str]:
    """Different texts of one to `num_words` words."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(rng.choice(WORDS, size=rng.integers(1, num_words + 1)).tolist())] = None
    return list(found)


def tone_clips(count: int, seed: int = 0, sample_rate: int = SAMPLE_RATE, num_words: int = 3) -> list[Clip]:
    return [
        spoken(text, seed=seed + number, sample_rate=sample_rate)
        for number, text in enumerate(tone_texts(count, seed, num_words))
    ]


def write_wav(path: Path, clip: Clip) -> Path:
    import soundfile

    soundfile.write(path, clip.samples, clip.sample_rate, subtype="FLOAT")
    return path


def write_manifest(path: Path, clips: Sequence[Clip], **more: object) -> Path:
    """Writes a jsonl with a line a clip, `more` in each, and beside it the clips as wav: NAME_0.wav, NAME_1.wav, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, clip in enumerate(clips):
        file = write_wav(path.parent / f"{path.stem}_{number}.wav", clip)
        lines.append({"path": file.name, "text": clip.text, "duration": clip.seconds, **more})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


TINY = "embed_dim: 32, depth: 2, num_heads: 2, dropout: 0.0, num_mels: 40, kernel_size: 7, subsampling_channels: 16"
CONFIG = f"""
task: speech_recognition
model: {{name: conformer_ctc, {TINY}}}
encoding: rope_axial
loss: ctc
optimizer: adamw
optimizer.lr: 5e-3
schedule: cosine
schedule.warmup_steps: 20
trainer: {{max_steps: 130, batch_size: 8, log_every: 10, eval_every: 130, save_every: 130, device: cpu}}
"""


def speech_run(folder: Path, train: Sequence[Clip], test: Sequence[Clip] | None = None) -> list[str]:
    """Writes clips and a config in which a tiny recogniser learns them by heart; returns what one gives to the trainer.

    Every other training clip is said to be German, the rest English; tested are the same clips, unless others are given.
    """
    for split, clips in (("train", train), ("val", train if test is None else test)):
        for language, start in (("en", 0), ("de", 1)):
            write_manifest(folder / "tones" / f"{split}-{language}.jsonl", clips[start::2], language=language)
    config = folder / "tones.yaml"
    config.write_text(CONFIG)
    options = f"sample_rate: {SAMPLE_RATE}, max_duration: 4.0, speed: [1.0]"
    files = "train: train-*.jsonl, val: val-*.jsonl"
    return [str(config), f"data={{name: speech_jsonl, path: {folder / 'tones'}, {files}, {options}}}"]
