"""Your own recordings by a manifest: a line of json for each, in one file or many, plain or packed by gzip."""

import os.path
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from train.data.recordings import Clip, DamagedRecording, Recordings, SoundFile, SpeechData
from train.data.text_jsonl import find_files, read_lines, refuse_half_characters, row_of
from train.data.texts import Damage, DamagedText

AUDIO_KEYS, START_KEYS, LANGUAGE_KEYS = ("path", "audio_filepath"), ("start", "offset"), ("language", "lang")
LONGEST_TIME = 10_000_000  # seconds, some four months: beyond it a time was meant in another unit


class SpeechJsonl(SpeechData):
    """Manifests such as `train: train.jsonl` and `val: val-*.jsonl.gz`, in the folder `path` where one is given.

    A line has the file, relative to the manifest's folder or else to `path`, under `audio_key` (path, or audio_filepath as in
    NeMo's manifests), and what is said under `text_key` (text). It may have start (or offset) and duration in seconds, so that many
    lines may be parts of one long file of which only the part is read, and language (or lang). The cuts of lhotse are not read.
    """

    name: Literal["speech_jsonl"]
    path: str | None = None
    train: str = Field("train*.json*", min_length=1)
    val: str = Field("val*.json*", min_length=1)
    audio_key: str | None = Field(None, min_length=1)
    text_key: str = Field("text", min_length=1)

    def load(self, seed: int) -> Recordings:
        damage = Damage(self.max_damaged)
        return self.recordings(self.read(self.train, damage), self.read(self.val, damage), damage)

    def read(self, pattern: str, damage: Damage) -> Iterator[Clip]:
        for manifest in find_files(pattern, self.path):
            for name, line in read_lines(manifest, "utf-8", damage):
                try:
                    yield self.clip(manifest, name, line)
                except DamagedText as error:
                    damage.add(error)

    def clip(self, manifest: Path, name: str, line: str) -> Clip:
        """The recording of a line, whose FILE:LINE is `name`.

        Raises:
            DamagedText: it has none, or none that is there.
        """
        row = row_of(name, line, self.audio_key or AUDIO_KEYS[0])
        audio = written(name, row, (self.audio_key,) if self.audio_key else AUDIO_KEYS)
        text = written(name, row, (self.text_key,))
        start = seconds(name, row, START_KEYS, least=0.0)
        duration = seconds(name, row, ("duration",))
        language = written(name, row, LANGUAGE_KEYS) if any(row.get(key) is not None for key in LANGUAGE_KEYS) else None
        file = manifest.parent / audio
        if self.path and not os.path.isfile(file):  # which is no error for a name that no file can have
            file = next((other for other in [Path(self.path) / audio] if os.path.isfile(other)), file)
        if not os.path.isfile(file):
            raise DamagedRecording(name, f"there is no file {file}")
        shown = f"{file} from {start:g} s" if start else str(file)
        return Clip(shown, text, SoundFile(str(file)), start or 0.0, duration, language)


def written(name: str, row: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The text under the first of the keys that is there.

    Raises:
        DamagedText: there is none, or it is no text.
    """
    key = next((key for key in keys if key in row), None)
    if key is None:
        there = ", ".join(row).encode(errors="backslashreplace").decode()
        raise DamagedText(name, f"has no key {' or '.join(map(repr, keys))}; there are {there or 'none'}")
    if not isinstance(row[key], str):
        raise DamagedText(name, f"{key} must be text, is {reprlib.repr(row[key])}")
    refuse_half_characters(name, row[key], f"{key} ")
    if not row[key].strip():
        raise DamagedText(name, f"{key} is empty")
    return row[key]


def seconds(name: str, row: dict[str, Any], keys: tuple[str, ...], least: float | None = None) -> float | None:
    """The time under the first of the keys that is there, `least` or more, or more than 0; None where there is none.

    Raises:
        DamagedText: it is no such number.
    """
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None:
        return None
    value = row[key]
    is_time = type(value) in (int, float) and 0 <= value < LONGEST_TIME and (value > 0 or least == 0)
    if not is_time:
        allowed = "0 or more" if least == 0 else "more than 0"
        shown = f"{reprlib.repr(value)} (less than {LONGEST_TIME:,} are allowed)"
        raise DamagedText(name, f"{key} must be {allowed} seconds, is {shown}")
    return float(value)
