"""Detectors at other sizes than they were trained at."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.train.boxes import MODEL, coco_folder, command
from tests.train.runs import VIT, make_run
from train.evaluate import main as evaluate
from train.scales import main


def test_the_table_the_lines_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of evaluate with the sizes that are told."""
    data = coco_folder(tmp_path / "data", num_train=4, num_test=3)
    options = ["model.min_size=48", "model.max_size=96", "model.score_threshold=0.0"]
    runs = [tmp_path / f"run-{seed}" for seed in (0, 1)]
    for seed, run in enumerate(runs):
        make_run(run, "detect/digits", [*command(data, run)[1:], *options, f"seed={seed}"])
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "scales.png"
    extra = ["--factor", "1.5", "--json", str(lines), "--picture", str(picture)]
    assert main([*map(str, runs), *extra]) == 0
    printed = capsys.readouterr().out
    assert "| table | 2 |" in printed
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["run"] for line in found] == list(map(str, runs))
    assert evaluate([str(runs[1]), "model.min_size=72", "model.max_size=144", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["AP"] == found[1]["AP x1.5"]
    assert evaluate([str(runs[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["AP50"] == found[1]["AP50 x1"]
    with Image.open(picture) as image:
        assert min(image.size) > 100


def test_digits_come_on_larger_canvases(
    digits_csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELPOS2D_DATA", str(tmp_path / "cache"))
    options = [MODEL, f"data.path={digits_csv}", "data.num_train=4", "data.num_test=2", "trainer.device=cpu"]
    options += ["trainer.batch_size=2", "data.canvas=[96,64]", "data.num_digits=[1,2]"]
    make_run(tmp_path / "run", "detect/digits", options)
    assert main([str(tmp_path / "run")]) == 0
    assert "AP50 96x64 | AP 96x64 | AP50 192x128 | AP 192x128" in capsys.readouterr().out


def test_runs_of_which_there_is_no_other_size(
    digits_csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = coco_folder(tmp_path / "data", num_train=4, num_test=2)
    make_run(tmp_path / "run", "detect/digits", command(data, tmp_path)[1:])
    assert main([str(tmp_path / "run")]) == 1
    assert "its images keep their size (model.min_size = null)" in capsys.readouterr().err
    make_run(tmp_path / "classifier", "classify/digits_vit", [VIT, f"data.path={digits_csv}", "trainer.device=cpu"])
    assert main([str(tmp_path / "classifier")]) == 1
    assert "is a run of classify, not of detect" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--factor", "0"])
    assert "must be a number above 0" in capsys.readouterr().err
