"""What the tools share: sizes, places to write at, errors of one line."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from train.tool import check_free, create_parser, parse_size, positive, run_command, run_tool, written_aside


def test_sizes() -> None:
    assert parse_size("224") == (224, 224)
    assert parse_size("192x256") == (192, 256)
    for text in ("", "x", "12x", "0", "12x0", "-3", "1x2x3", "1.5", "a"):
        with pytest.raises(ValueError, match=rf"image size '{text}': must be N or HEIGHTxWIDTH, for example 224"):
            parse_size(text)


def test_counts() -> None:
    assert positive("7") == 7
    for text in ("0", "-1", "1.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' must be a whole number of at least 1"):
            positive(text)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(_: argparse.Namespace) -> int:
        raise ValueError("window_size=0 must be at least 1")

    given = create_parser("predict", "").parse_args(["runs/a"])
    assert (given.checkpoint, given.weights) == ("runs/a", "auto")
    assert run_tool(tool, given) == 1
    assert capsys.readouterr().err == "error: window_size=0 must be at least 1\n"
    monkeypatch.setenv("RELPOS2D_TRACEBACK", "1")
    with pytest.raises(ValueError, match="window_size=0"):
        run_tool(tool, given)


def test_the_exit_code_and_warnings_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def main() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = shown
            warnings.warn("step_8: is damaged")
        return 3

    def shown(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 3
    assert capsys.readouterr().err == "warning: step_8: is damaged\n"


def test_a_place_that_is_free(tmp_path: Path) -> None:
    check_free(tmp_path / "absent")
    check_free(tmp_path)
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{path}: is there already; move it"):
            check_free(path, "move it")


def test_a_file_and_a_folder_take_their_place_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text in ("first", "second"):
        with written_aside(path) as aside:
            aside.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    with written_aside(path) as aside:  # a folder in place of a file, and of a folder with the same names
        aside.mkdir()
        (aside / "a").write_text("1")
    with written_aside(path) as aside:
        aside.mkdir()
        (aside / "a").write_text("2")
        (aside / "b").write_text("2")
    assert {entry.name: entry.read_text() for entry in path.iterdir()} == {"a": "2", "b": "2"}
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_what_goes_wrong_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyError), written_aside(path) as aside:  # noqa: PT012
        aside.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "a").write_text("old")

    def replace(source: Path, target: Path, rename: Callable[[Path, Path], None] = os.replace) -> None:
        if source.name.endswith(".new"):
            raise OSError("full")
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="full"), written_aside(path) as aside:  # noqa: PT012
        aside.mkdir()
        (aside / "a").write_text("new")
    assert (path / "a").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_holds_other_things_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "home"
    path.mkdir()
    (path / "letters").write_text("dear")
    with pytest.raises(ValueError, match="home: holds letters, so it is not replaced"), written_aside(path) as aside:
        aside.mkdir()
    with pytest.raises(ValueError, match="home: holds letters, so it is not replaced"), written_aside(path) as aside:
        aside.write_text("")
    assert [entry.name for entry in tmp_path.iterdir()] == ["home"]
    assert (path / "letters").read_text() == "dear"
