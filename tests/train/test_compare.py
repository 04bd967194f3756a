"""Runs side by side: what counts as the same config, the numbers of the table, the curves."""

import json
from pathlib import Path

import pytest
from PIL import Image

from train.compare import group_runs, label, main, mean_and_deviation, table
from train.config import load_config, resolved_yaml


def write_run(folder: Path, *overrides: str, accuracy: float = 0.5, finished: bool = True) -> str:
    folder.mkdir()
    config = load_config("classify/digits", list(overrides))
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "checkpoints").mkdir()
    lines = [
        {"step": step, "loss": 2.0 / step, "test_loss": 2.5 / step, "test_accuracy": accuracy * step / 3}
        | ({"strength": step / 3} if config.handover else {})
        for step in (1, 2, 3)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        metrics = {"accuracy": accuracy, "num_examples": 40, "seconds": {"total": 30.0}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return str(folder)


HANDOVER = ("encoding=[learned, table]", "handover=linear")


def test_seeds_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_run(tmp_path / "a", "seed=0", accuracy=0.5),
        write_run(tmp_path / "b", "encoding=none", accuracy=0.1),
        write_run(tmp_path / "c", "seed=1", accuracy=0.6),
        write_run(tmp_path / "d", *HANDOVER, accuracy=0.75),
    ]
    assert main([*runs, "--picture", str(tmp_path / "curves.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "|  | runs | accuracy | seconds |",
        "| --- | --- | --- | --- |",
        "| table | 2 | 0.550 ± 0.071 | 30 ± 0 |",
        "| none | 1 | 0.100 | 30 |",
        "| learned to table | 1 | 0.750 | 30 |",
    ]
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 3 * image.height  # four panels: one for the handover


def test_configs_that_differ_are_rows_of_their_own(tmp_path: Path) -> None:
    paths = [
        Path(write_run(tmp_path / name, *options))
        for name, options in {
            "a": ["seed=0"],
            "b": ["seed=1", "trainer.num_workers=0"],
            "c": ["optimizer.lr=0.5"],
            "d": ["encoding=none", "optimizer.lr=0.5"],
        }.items()
    ]
    a, b, c, d = paths
    assert group_runs(paths) == {"table optimizer.lr=0.002": [a, b], "table optimizer.lr=0.5": [c], "none": [d]}


def test_labels() -> None:
    assert label(load_config("classify/digits", ["encoding=[table, rope_axial]"])) == "table + rope_axial"
    assert label(load_config("classify/digits", [*HANDOVER])) == "learned to table"
    assert (
        label(load_config("classify/digits_vit", ["model.absolute=fade", "handover=linear"]))
        == "absolute to rope_mixed"
    )


def test_numbers() -> None:
    assert mean_and_deviation([0.5]) == "0.500"
    assert mean_and_deviation([0.5, 0.7, 0.6]) == "0.600 ± 0.100"
    assert mean_and_deviation([100.0, 300.0]) == "200 ± 141"
    assert mean_and_deviation([12.34, 14.34]) == "13.34 ± 1.41"
    assert mean_and_deviation([12.345], digits=0) == "12"
    assert mean_and_deviation([]) == ""
    assert table({"a": [{"x": 1.0}], "b": [{"y": 0.5}]}).splitlines()[2:] == [
        "| a | 1 | 1.000 |  |",
        "| b | 1 |  | 0.500 |",
    ]


def test_the_score_is_the_task_s_unless_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = write_run(tmp_path / "image")
    text = write_run(tmp_path / "text")
    config = load_config("text/verses", ["data={name: verses}"])
    (tmp_path / "text" / "config.yaml").write_text(resolved_yaml(config))
    metrics = {"perplexity": 34.5678, "accuracy": 0.5, "seconds": {"total": 30.0}}
    (tmp_path / "text" / "metrics.json").write_text(json.dumps(metrics))
    assert main([text]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | runs | perplexity | seconds |"
    assert lines[2] == "| alibi | 1 | 34.57 | 30 |"
    assert main([image, text]) == 1
    assert "of several tasks, with the scores accuracy, perplexity; name one: --score" in capsys.readouterr().err
    assert main([image, text, "--score", "accuracy"]) == 0


def test_several_scores_and_what_a_run_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(write_run(tmp_path / "a"))
    seconds = {"total": 30.0, "evaluation": 8.0, "saving": 2.0, "data": 1.0}
    metrics = {"accuracy": 0.5, "loss": 1.25, "steps": 40, "seconds": seconds, "peak_memory_mib": 345.6}
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert main([str(run), "--score", "loss", "--score", "accuracy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | runs | loss | accuracy | ms a step | peak MiB | seconds |"
    assert lines[2] == "| table | 1 | 1.250 | 0.500 | 500 | 346 | 30 |"


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "is no run, it has no config.yaml" in capsys.readouterr().err
    run = write_run(tmp_path / "a")
    assert main([run, "--score", "acuracy"]) == 1
    assert "score = 'acuracy': not among the numbers in " in capsys.readouterr().err
    assert main([write_run(tmp_path / "b", finished=False)]) == 1
    assert "holds no metrics.json that can be read, which a finished run has" in capsys.readouterr().err


def test_grouping_reads_only_configs(tmp_path: Path) -> None:
    paths = [Path(write_run(tmp_path / name, f"seed={name}", finished=False)) for name in "12"]
    assert group_runs(paths) == {"table": paths}
