"""A training step of several runs: one row each, their memory exactly, their times side by side."""

from pathlib import Path

import pytest

from tests.train.tones import speech_run, tone_clips
from train.config import load_config, resolved_yaml
from train.costs import main


def write_config(folder: Path, arguments: list[str], *overrides: str) -> str:
    folder.mkdir()
    name, *given = arguments
    (folder / "config.yaml").write_text(resolved_yaml(load_config(name, [*given, *overrides])))
    return str(folder)


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = speech_run(tmp_path, tone_clips(6))
    small = write_config(tmp_path / "small", arguments, "trainer.batch_size=2", "encoding=none")
    again = write_config(tmp_path / "again", arguments, "trainer.batch_size=2", "encoding=none", "seed=1")
    other = write_config(tmp_path / "other", arguments, "trainer.batch_size=2", "encoding=shaw")
    large = write_config(tmp_path / "large", arguments, "trainer.batch_size=6", "encoding=none")
    assert main([small, again, other, large, "--rounds", "2"]) == 0
    header, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert header == ["", "parameters", "ms a step", "ratio to none trainer.batch_size=2", "peak MiB"]
    assert [line[0] for line in lines] == ["none trainer.batch_size=2", "shaw", "none trainer.batch_size=6"]
    assert lines[0][3].startswith("1.00")
    assert lines[0][1] == lines[2][1] != lines[1][1]  # shaw has parameters of its own
    assert int(lines[2][4]) > 2 * int(lines[0][4]) > 0


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "is no run, it has no config.yaml" in capsys.readouterr().err
