"""The source of Python's standard library as running text."""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path
from typing import Literal

from train.data.texts import Running, TextData, normalised, read_text

NUM_PARTS = 10  # one of them is for testing
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Code(TextData):
    """The *.py files of the standard library of the Python that runs this, without tests; a tenth of the files, chosen by their
    names, is for testing. How much that is depends on Python's version, which `origin` of the loaded data records.

    `path` is another folder of *.py files.
    """

    name: Literal["code"]
    path: str | None = None

    def load(self, seed: int) -> Running:
        folder = Path(self.path or sysconfig.get_path("stdlib"))
        files = source_files(folder)
        texts = {file: read_text(folder / file, errors="replace") for file in files}
        train = [text for file, text in texts.items() if text.strip() and not is_for_testing(file)]
        known = {normalised(text) for text in train}
        test = [
            text
            for file, text in texts.items()
            if text.strip() and is_for_testing(file) and normalised(text) not in known
        ]
        origin = f"{self.path}" if self.path else f"Python {platform.python_version()}"
        return self.running(train, test, f"{origin}: {len(train)} and {len(test)} files")


def source_files(folder: Path) -> list[str]:
    """The names of the *.py files below a folder, in their order, without those of tests.

    Raises:
        ValueError: there is none.
    """
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(parent, name).relative_to(folder).as_posix() for name in names if name.endswith(".py")]
    files.sort()
    if not files:
        raise ValueError(f"data.path = {str(folder)!r}: no *.py file in this folder")
    return files


def is_for_testing(file: str) -> bool:
    return int(hashlib.sha256(file.encode()).hexdigest(), 16) % NUM_PARTS == 0
