"""What the tools for trained models share: their arguments, errors of one line, results that are complete or not there."""

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.checkpoint import flush
from train.data.fetch import FetchError

CHECKPOINT_HELP = "a run's folder, its checkpoints/ (both: the latest complete checkpoint), or a step_N in there"


def create_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser that knows CHECKPOINT and --weights."""
    parser = argparse.ArgumentParser(prog=f"python -m train.{name}", description=description)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_argument(
        "--weights",
        choices=("auto", "model", "ema"),
        default="auto",
        help="the weights themselves, their moving average, or (auto) the average where there is one",
    )
    return parser


def run_command(main: Callable[[], int]) -> None:
    """Ends the process with the exit code of a tool's main; warnings are one line without the place in the code."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # type: ignore[assignment]
    sys.exit(main())


def run_tool(tool: Callable[[argparse.Namespace], int], given: argparse.Namespace) -> int:
    """The tool's exit code; 1 and a line on stderr for what cannot be done."""
    try:
        return tool(given)
    except (ValueError, OSError, FetchError) as error:
        if os.environ.get("RELPOS2D_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def parse_size(text: str) -> tuple[int, int]:
    """`224` or `192x256` as (height, width).

    Raises:
        ValueError: it is written otherwise.
    """
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ValueError(f"image size {text!r}: must be N or HEIGHTxWIDTH, for example 224 or 192x256")
    return int(sides[0]), int(sides[-1])


def check_free(path: Path, hint: str = "") -> None:
    """Refuses a place that holds something.

    Raises:
        ValueError: it does; `hint` says what to do.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path}: is there already" + (f"; {hint}" if hint else ""))


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or a folder at, which replaces what stands there when all has gone well.

    Raises:
        ValueError: a folder stands there that holds more than the new one, so it is none that we wrote.
    """
    path = path.absolute()  # `.` has no name to write beside
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    try:
        yield aside
        if foreign := names_in(path) - names_in(aside):
            raise ValueError(f"{path}: holds {min(foreign)}, so it is not replaced")
        for part in (*aside.rglob("*"), aside):
            flush(part)
        if path.is_dir() or (path.exists() and aside.is_dir()):
            os.replace(path, old)  # a folder cannot be renamed over another
        try:
            os.replace(aside, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        for rest in (aside, old):
            if rest.is_dir():
                shutil.rmtree(rest)
            rest.unlink(missing_ok=True)


def names_in(path: Path) -> set[str]:
    """What a folder holds; nothing for a file."""
    return {entry.name for entry in path.iterdir()} if path.is_dir() else set()


def file_names(paths: Sequence[Path]) -> list[str]:
    """What the results of each file are called: its own name, with a number where that is taken."""
    names: dict[str, None] = {}
    for path in paths:
        name, number = path.stem, 2
        while name in names:
            name, number = f"{path.stem}_{number}", number + 1
        names[name] = None
    return list(names)
