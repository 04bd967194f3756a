"""Digits for the tests of the trainer: drawn by us, so that only tests that say so need pip."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from tests.train.pictures import leave_undrawn
from train.data.fetch import fetch_digits

SEGMENTS = {  # which of the seven bars of a digital clock a digit lights
    0: "abcdef", 1: "bc", 2: "abdeg", 3: "abcdg", 4: "bcfg", 5: "acdfg", 6: "acdefg", 7: "abc", 8: "abcdefg", 9: "abcdfg"
}  # fmt: skip
BARS = {
    "a": (8, 4, 20, 4), "b": (20, 4, 20, 14), "c": (20, 14, 20, 24), "d": (8, 24, 20, 24),
    "e": (8, 14, 8, 24), "f": (8, 4, 8, 14), "g": (8, 14, 20, 14),
}  # fmt: skip


def drawn_digit(digit: int, rng: np.random.Generator) -> np.ndarray:
    image = Image.new("L", (28, 28))
    pen = ImageDraw.Draw(image)
    shift = rng.integers(-2, 3, size=2).tolist() * 2
    for bar in SEGMENTS[digit]:
        pen.line(
            [edge + move for edge, move in zip(BARS[bar], shift, strict=True)],
            fill=int(rng.integers(160, 256)),
            width=3,
        )
    return np.asarray(image)


@pytest.fixture(autouse=True)
def forget_the_accelerator() -> None:
    """accelerate keeps the precision and the device of the first run in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """The pictures of runs are empty files from here to the end of the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", leave_undrawn)
        yield


@pytest.fixture(scope="session")
def digits_csv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A csv of 200 drawn digits in the format of the real ones."""
    rng = np.random.default_rng(0)
    rows = [[*drawn_digit(digit, rng).ravel().tolist(), digit] for digit in list(range(10)) * 20]
    path = tmp_path_factory.mktemp("digits") / "digits.csv"
    np.savetxt(path, rows, fmt="%d", delimiter=",")
    return str(path)


@pytest.fixture(scope="session")
def real_digits() -> Path:
    """The real 5,000, through pip."""
    return fetch_digits()


@pytest.fixture
def image_folders(tmp_path: Path) -> Path:
    """train/ with classes a, b, c and val/ with a and c only; each class has a colour of its own."""
    colours = {"a": (200, 30, 30), "b": (30, 200, 30), "c": (30, 30, 200)}
    for split, classes in (("train", "abc"), ("val", "ac")):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 30), colours[name]).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


@pytest.fixture(scope="session")
def tone_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of a tiny recogniser that knows eight clips of tones by heart; they lie beside it, in `tones`."""
    from tests.train import tones
    from train.__main__ import main

    def train(folder: Path) -> None:
        options = tones.speech_run(folder, tones.tone_clips(8, seed=3))
        AcceleratorState._reset_state(reset_partial_state=True)
        assert main([*options, f"output={folder / 'run'}"]) == 0

    return made_once(tmp_path_factory, "speech", train) / "run"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that the first of pytest-xdist's workers makes who needs it; tests must leave it as it is."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = factory.mktemp(name)
        make(folder)
        return folder
    import fcntl

    shared = factory.getbasetemp().parent
    folder, made = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
