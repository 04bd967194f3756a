"""Recordings of the Hugging Face hub, or of a local folder that its `datasets` package can read."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from pydantic import Field

from train.data.hub import Hub, import_datasets, one_column
from train.data.recordings import Clip, DamagedRecording, Recordings, SoundSource, SpeechData
from train.data.text_hub import column
from train.data.texts import Damage


class SpeechHub(SpeechData):
    """A data set by its name on the hub, or a folder: one made by `save_to_disk`, or of parquet or audio files.

    `subset` and `revision` as the hub has them; `train` and `val` are splits. The column of recordings is found where only one can
    be meant; `text_key` names what is said, and `language_key`, if given, the language of each row. libsndfile decodes the
    recordings, as it does all others, so torchcodec is needed only where `datasets` first makes a table of audio files; their
    lengths are read from their headers.
    """

    name: Literal["speech_hub"]
    path: str = Field(min_length=1)
    subset: str | None = None
    revision: str | None = None
    train: str = "train"
    val: str = "validation"
    audio_key: str | None = None
    text_key: str = "text"
    language_key: str | None = None

    def load(self, seed: int) -> Recordings:
        damage = Damage(self.max_damaged)
        return self.recordings(self.read(self.train), self.read(self.val), damage)

    def read(self, split: str) -> Iterator[Clip]:
        table = self.table(split)
        where = f"{self.path}[{split}]"
        key = audio_column(table, self.audio_key)
        texts = column(table, where, "text_key", self.text_key)
        languages = (
            column(table, where, "language_key", self.language_key) if self.language_key else [None] * len(table)
        )
        undecoded = table.select_columns([key]).cast_column(key, import_datasets().Audio(decode=False))
        for index, (text, language) in enumerate(zip(texts, languages, strict=True)):
            name = f"{where}[{index}]"
            yield Clip(name, text or "", HubSound(name, undecoded, key, index), language=language or None)

    def table(self, split: str) -> Any:
        """The split as `datasets.Dataset`.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            return Hub(name="hub", path=self.path, subset=self.subset, revision=self.revision).read(split)
        except ValueError as error:
            if "torchcodec" not in str(root_of(error)):
                raise
            raise ValueError(
                f"data.path = {self.path!r}: `datasets` makes a table of audio files with the package torchcodec alone; a folder "
                f"of them and their texts is data=speech_folder, and tables (parquet, save_to_disk) need no torchcodec"
            ) from error


@dataclass(frozen=True)
class HubSound(SoundSource):
    """A recording in a row of a table, as the bytes or the path of a file."""

    name: str
    table: Any
    key: str
    index: int

    def open(self) -> str | BinaryIO:
        audio = self.table[self.index][self.key]
        if audio is None or (audio["bytes"] is None and not audio["path"]):
            raise DamagedRecording(self.name, "there is no recording")
        return io.BytesIO(audio["bytes"]) if audio["bytes"] is not None else audio["path"]


def audio_column(table: Any, key: str | None) -> str:
    """The column of recordings.

    Raises:
        ValueError: it is missing, or several may be meant.
    """
    datasets = import_datasets()
    found = [name for name, feature in table.features.items() if isinstance(feature, datasets.Audio)]
    return one_column("audio_key", key, found, table)


def root_of(error: BaseException) -> BaseException:
    """The error that was first."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
