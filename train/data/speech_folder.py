"""Your own recordings as files in folders, the text of each beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from train.data.recordings import Clip, DamagedRecording, Recordings, SoundFile, SpeechData
from train.data.text_jsonl import refuse_half_characters
from train.data.texts import Damage, DamagedText, read_text

SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".w64", ".caf")


class SpeechFolder(SpeechData):
    """PATH/train/**/NAME.wav (or flac, ogg, opus, mp3, ...) with NAME.txt beside each, or, as LibriSpeech has them, with a file
    *.trans.txt in its folder whose lines are `NAME TEXT`; so with PATH/val or PATH/test. Hidden files are passed over.
    """

    name: Literal["speech_folder"]
    path: str = Field(min_length=1)
    train: str = Field("train", min_length=1)
    val: str | None = Field(None, min_length=1)

    def load(self, seed: int) -> Recordings:
        root, damage = Path(self.path), Damage(self.max_damaged)
        val = self.val or ("val" if (root / "val").is_dir() or not (root / "test").is_dir() else "test")
        return self.recordings(self.read(root / self.train, damage), self.read(root / val, damage), damage)

    def read(self, folder: Path, damage: Damage) -> Iterator[Clip]:
        sounds, files = find_sounds(folder)
        texts = dict[Path, str]()
        for file in files:
            try:
                texts |= lines_of(file, damage) if file.name.endswith(".trans.txt") else {stem(file): read_text(file)}
            except DamagedText as error:
                damage.add(error)
        heard = set[Path]()
        for sound in sounds:
            try:
                yield self.clip(sound, texts, heard)
            except DamagedText as error:
                damage.add(error)
        for key in texts:
            if key not in heard:
                damage.add(DamagedRecording(str(key), "there is a text of this name, and no recording"))

    def clip(self, sound: Path, texts: dict[Path, str], heard: set[Path]) -> Clip:
        key = stem(sound)
        if key in heard:
            raise DamagedRecording(
                str(sound), "there is another recording of this name, so the text may not be its own"
            )
        heard.add(key)
        if key not in texts:
            wanted = f"neither {sound.stem}.txt beside it nor a line of a *.trans.txt"
            raise DamagedRecording(str(sound), f"there is no readable text for it, {wanted}")
        refuse_half_characters(str(sound), texts[key], "its text ")
        return Clip(str(sound), texts[key], SoundFile(str(sound)))


def find_sounds(folder: Path) -> tuple[list[Path], list[Path]]:
    """The recordings below a folder, and its texts, in the order of their names; nothing hidden.

    Raises:
        ValueError: there is no recording.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; recordings are read from {folder}/**/NAME.wav with NAME.txt beside each"
        )
    files = sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()
    )
    sounds = [path for path in files if path.suffix.lower() in SOUND_SUFFIXES]
    if not sounds:
        raise ValueError(
            f"{folder}: no recording ({', '.join('*' + suffix for suffix in SOUND_SUFFIXES)}) in this folder"
        )
    return sounds, [path for path in files if path.suffix.lower() == ".txt"]


def stem(file: Path) -> Path:
    return file.with_suffix("")


def lines_of(file: Path, damage: Damage) -> dict[Path, str]:
    """What each recording beside a *.trans.txt says."""
    found = dict[Path, str]()
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        name, *text = line.split(maxsplit=1)
        if not text:
            damage.add(DamagedRecording(f"{file}:{number}", f"no text follows the name {name!r}"))
        elif file.parent / name in found:
            damage.add(DamagedRecording(f"{file}:{number}", f"the name {name!r} is there again"))
        else:
            found[file.parent / name] = text[0]
    return found
