"""`python -m train.scales RUN...`: what detectors find at the size that they were trained at, and at others without retraining."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure

from relpos2d.backbones.resize import by
from train.compare import COLOURS, group_runs, table
from train.data.digit_boxes import DigitBoxes
from train.evaluate import adapt, changed_config
from train.report import FAINT, readable, save
from train.restore import Restored, find_checkpoint, restore, without_pretrained
from train.run_folder import CONFIG
from train.tasks import create_task
from train.tool import run_command, run_tool

SCORES = ("AP50", "AP")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.scales",
        description="AP50 and AP of detectors on test images as they were trained on, and on larger ones. digit_boxes come on "
        "larger canvases, fewer of them, with more digits of the same size; other images are enlarged (model.min_size). Runs "
        "that differ in nothing but the seed are one row: mean and standard deviation.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of detect")
    parser.add_argument(
        "--factor", type=positive_number, action="append", metavar="F", help="sides so many times as long (default: 2)"
    )
    parser.add_argument("--json", metavar="FILE", help="write a line for each run there, too")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the AP50 of each run there")
    return run_tool(measure_runs, parser.parse_args(arguments))


def positive_number(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def measure_runs(given: argparse.Namespace) -> int:
    groups = group_runs([Path(run) for run in given.runs])
    factors = [1.0, *dict.fromkeys(given.factor or [2.0])]
    rows: dict[str, list[dict[str, float]]] = {}
    lines = []
    for name, folders in groups.items():
        for folder in folders:
            numbers = measure(folder, factors)
            rows.setdefault(name, []).append(numbers)
            lines.append(json.dumps({"run": str(folder), "label": name, **numbers}))
    if given.json:
        Path(given.json).write_text("".join(f"{line}\n" for line in lines))
    print(table(rows))
    if given.picture:
        print(f"picture {readable(draw(rows, Path(given.picture)))}")
    return 0


def measure(folder: Path, factors: Sequence[float]) -> dict[str, float]:
    """The scores of one run at each factor.

    Raises:
        ValueError: it is no run of detect, or its images have no size that could be another.
    """
    run, found = find_checkpoint(folder)
    trained = restore(found)
    if trained.config.task != "detect":
        raise ValueError(f"{folder}: is a run of {trained.config.task}, not of detect")
    torch.set_num_threads(trained.config.trainer.num_threads or torch.get_num_threads())
    numbers: dict[str, float] = {}
    for factor in factors:
        size, overrides = scaled(trained, factor)
        config = changed_config(run / CONFIG, overrides, {})
        restored = restore(found, config=config)
        task: Any = create_task(without_pretrained(config))
        adapt(task, restored, {})
        metrics, _ = task.evaluate(restored.model, Accelerator(cpu=True))
        numbers |= {f"{score} {size}": metrics[score] for score in SCORES}
    return numbers


def scaled(trained: Restored, factor: float) -> tuple[str, list[str]]:
    """What a size is called, and what a config says to have it."""
    data, model = trained.config.data, trained.config.model.given()
    if isinstance(data, DigitBoxes):
        canvas = [round(side * factor) for side in data.canvas]
        if factor == 1:
            return by(canvas), []
        # about as many digits in all, and none drawn to train on
        num_test = max(1, round(data.num_test / factor**2))
        return by(canvas), [f"data.canvas={canvas}", f"data.num_test={num_test}", "data.num_train=1"]
    if factor == 1:
        return "x1", []
    shorter = model.get("min_size", 800)
    if shorter is None:
        raise ValueError(
            f"{trained.folder}: its images keep their size (model.min_size = null), so they cannot be enlarged"
        )
    sides = [round(side * factor) for side in (shorter if isinstance(shorter, tuple) else (shorter,))]
    longer = model.get("max_size")
    return f"x{factor:g}", [
        f"model.min_size={sides}",
        *([] if longer is None else [f"model.max_size={round(longer * factor)}"]),
    ]


def draw(rows: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> Path:
    """A panel a size: a dot for each run, a bar for their mean."""
    columns = [key for key in next(iter(rows.values()))[0] if key.startswith(f"{SCORES[0]} ")]
    figure = Figure(figsize=(1.2 + 2.9 * len(columns), 0.7 + 0.42 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, sharex=True, squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        for place, (runs, colour) in enumerate(zip(rows.values(), COLOURS * len(rows), strict=False)):
            values = [run[column] for run in runs]
            panel.barh(place, sum(values) / len(values), height=0.62, color=FAINT)
            panel.scatter(values, [place] * len(values), color=colour, s=22, zorder=2)
        panel.set(title=column, xlim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), list(rows))
    panels[0].invert_yaxis()
    return save(figure, path)


if __name__ == "__main__":
    run_command(main)
