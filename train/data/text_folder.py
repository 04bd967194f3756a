"""Your own texts as files in folders."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from train.data.text_jsonl import refuse_half_characters
from train.data.texts import (
    Damage,
    DamagedText,
    Labelled,
    OwnTexts,
    Rows,
    Running,
    read_text,
    refuse_unused,
    unknown_label,
)


class TextFolder(OwnTexts):
    """`use: labels`: PATH/train/CLASS/*.txt and PATH/val/CLASS/*.txt. Classes are the training folders in the order of their names;
    the validation folder is read with that map. `use: running`: PATH/train/**/*.txt and PATH/val/**/*.txt, a document a file.
    """

    name: Literal["text_folder"]
    path: str = Field(min_length=1)
    use: Literal["labels", "running"] = "labels"
    train: str = "train"
    val: str = "val"
    encoding: str = "utf-8"

    @model_validator(mode="after")
    def options_have_a_use(self) -> "TextFolder":
        refuse_unused(self.use, [("too_long", "refuse" if self.too_long == "refuse" else None, "labels")])
        try:
            "".encode(self.encoding)
        except LookupError:
            raise ValueError(
                f"encoding = {self.encoding!r}: Python knows no such encoding; utf-8 is the default"
            ) from None
        return self

    def load(self, seed: int) -> Labelled | Running:
        folders = [Path(self.path) / self.train, Path(self.path) / self.val]
        damage = Damage(self.max_damaged)
        if self.use == "running":
            documents = [[text for _, text in self.read(text_files(folder), damage)] for folder in folders]
            return self.running(documents[0], documents[1], self.path)
        classes = tuple(class_folders(folders[0]))
        rows = [self.labelled_rows(folder, classes, damage) for folder in folders]
        return self.labelled(rows[0], rows[1], classes, self.too_long)

    def labelled_rows(self, folder: Path, classes: tuple[str, ...], damage: Damage) -> Rows:
        rows = Rows([], [], [])
        for name in class_folders(folder):
            if name not in classes:
                raise unknown_label(str(folder / name), name, classes)
            for file, text in self.read(text_files(folder / name), damage):
                rows.names.append(file)
                rows.texts.append(text)
                rows.labels.append(classes.index(name))
        return rows

    def read(self, files: list[Path], damage: Damage) -> list[tuple[str, str]]:
        """The names and texts of files that hold one."""
        found = []
        for file in files:
            try:
                text = read_text(file, self.encoding)
                refuse_half_characters(str(file), text)
                if not text.strip():
                    raise DamagedText(str(file), "the text is empty")
            except DamagedText as error:
                damage.add(error)
                continue
            found.append((str(file), text))
        return found


def class_folders(folder: Path) -> list[str]:
    """The names of the folders that hold texts, in their order.

    Raises:
        ValueError: there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; texts are read from {folder}/CLASS/*.txt")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = [name for name in names if next((folder / name).rglob("*.txt"), None)]
    if not names:
        raise ValueError(
            f"{folder}: no class folder with texts (*.txt); running text without classes is data.use=running"
        )
    return names


def text_files(folder: Path) -> list[Path]:
    """The *.txt files below a folder, in the order of their names; nothing hidden.

    Raises:
        ValueError: there is none.
    """
    found = sorted(
        path
        for path in folder.rglob("*.txt")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise ValueError(f"{folder}: no text (*.txt) in this folder")
    return found
