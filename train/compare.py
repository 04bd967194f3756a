"""`python -m train.compare RUN...`: the runs of several configs and seeds as one table and one picture of their curves."""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from train.config import Config, load_config
from train.report import read_history, readable, save
from train.run_folder import CONFIG, FREE, HISTORY, METRICS, flat_config
from train.tasks import task_class
from train.tool import run_command, run_tool

COLOURS = ("#1f5fbf", "#c03028", "#2e8b57", "#8a4fbf", "#d98e04", "#0e8f9e", "#7a5c3e", "#c2408f", "#555555", "#9aa51c")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.compare",
        description="Runs that differ in nothing but the seed are one row: mean and standard deviation over the seeds.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    parser.add_argument(
        "--score",
        action="append",
        metavar="KEY",
        help="a key of metrics.json (default: what the task shows first: accuracy, perplexity, rougeL, cer); may be given again, "
        "the picture shows the first",
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw the curves of training and test there")
    return run_tool(compare, parser.parse_args(arguments))


def compare(given: argparse.Namespace) -> int:
    paths = [Path(run) for run in given.runs]
    groups = group_runs(paths)
    wanted = given.score or [score_of(paths)]
    rows: dict[str, list[dict[str, float]]] = {}
    for label, folders in groups.items():
        rows[label] = [scores(folder, wanted) for folder in folders]
    print(table(rows))
    if given.picture:
        print(f"picture {readable(draw(groups, Path(given.picture), wanted[0]))}")
    return 0


def score_of(folders: Iterable[Path]) -> str:
    """What the task of the runs shows first.

    Raises:
        ValueError: they are of several tasks, which have no score in common.
    """
    found = {task_class(load_config(str(folder / CONFIG)).task).score for folder in folders}
    if len(found) > 1:
        raise ValueError(
            f"the runs are of several tasks, with the scores {', '.join(sorted(found))}; name one: --score"
        )
    return found.pop()


def scores(folder: Path, wanted: Sequence[str]) -> dict[str, float]:
    """The final numbers of a run, and what it cost: milliseconds a step of training, memory of the process, seconds in all.

    Raises:
        ValueError: it is not finished, or has no such number.
    """
    try:
        metrics = json.loads((folder / METRICS).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: holds no {METRICS} that can be read, which a finished run has ({error})"
        ) from error
    numbers = sorted(key for key, value in metrics.items() if isinstance(value, float))
    for score in wanted:
        if score not in numbers:
            raise ValueError(f"score = {score!r}: not among the numbers in {folder / METRICS}: {', '.join(numbers)}")
    seconds = metrics["seconds"]
    costs = {}
    if "steps" in metrics:
        training = seconds["total"] - sum(seconds.get(part, 0.0) for part in ("evaluation", "saving"))
        costs["ms a step"] = 1000 * training / metrics["steps"]
    if metrics.get("peak_memory_mib") is not None:
        costs["peak MiB"] = metrics["peak_memory_mib"]
    return {**{score: metrics[score] for score in wanted}, **costs, "seconds": seconds["total"]}


def group_runs(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """The folders by what their configs have in common, all but the seed and how it was computed; named after their encodings,
    and where that is not enough, after what else differs.

    Raises:
        ValueError: a folder is no run.
    """
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Path]] = {}
    for folder in folders:
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder}: is no run, it has no {CONFIG}")
        config = load_config(str(folder / CONFIG))
        rest = tuple((key, value) for key, value in flat_config(config).items() if key not in FREE and key != "seed")
        groups.setdefault((label(config), rest), []).append(folder)
    named: dict[str, list[Path]] = {}
    for (name, own), members in groups.items():
        others = [dict(other) for other_name, other in groups if other_name == name and other != own]
        differs = [f"{key}={value}" for key, value in own if any(other.get(key) != value for other in others)]
        named[" ".join([name, *differs])] = members
    return named


def label(config: Config) -> str:
    """`table`, `table + rope_axial`, `learned to table` where positions are handed over."""
    if config.handover is None:
        return " + ".join(encoding.name for encoding in config.encodings)
    moving = config.moving()
    stays = [encoding.name for encoding in config.encodings if encoding not in moving]
    return f"{' + '.join(stays) or 'absolute'} to {' + '.join(encoding.name for encoding in moving)}"


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Markdown: a row a label, a column a number, each as mean and standard deviation over the runs."""
    columns = list(dict.fromkeys(key for runs in rows.values() for run in runs for key in run))
    lines = [["", "runs", *columns], ["---"] * (len(columns) + 2)]
    for name, runs in rows.items():
        cells = []
        for column in columns:
            values = [run[column] for run in runs if column in run]
            cells.append(
                mean_and_deviation(values, digits=0 if column in ("seconds", "ms a step", "peak MiB") else None)
            )
        lines.append([name, str(len(runs)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_and_deviation(values: Sequence[float], digits: int | None = None) -> str:
    """`0.912 ± 0.004`; shares with three digits behind the point, two up to a hundred, larger numbers whole."""
    if not values:
        return ""
    if digits is None:
        digits = 3 if max(values) <= 10 else 2 if max(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def draw(groups: Mapping[str, Sequence[Path]], path: Path, score: str) -> Path:
    """Mean over the seeds as a line, from the lowest to the highest as a band; below, where there is one, the handover."""
    keys = [("loss", "training loss"), ("test_loss", "test loss"), (f"test_{score}", f"test {score}")]
    histories = {name: [read_history(folder / HISTORY) for folder in folders] for name, folders in groups.items()}
    keys = [
        (key, title) for key, title in keys if any(key in history for runs in histories.values() for history in runs)
    ]
    if any("strength" in history for runs in histories.values() for history in runs):
        keys.append(("strength", "strength of relative positions"))
    figure = Figure(figsize=(4.2 * len(keys), 3.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for (name, runs), colour in zip(histories.items(), COLOURS * len(groups), strict=False):
            found = [history[key] for history in runs if key in history]
            if not found:
                continue
            steps = sorted(set.intersection(*(set(steps) for steps, _ in found)))
            values = np.array([[dict(zip(*column, strict=True))[step] for step in steps] for column in found])
            axes.plot(steps, values.mean(axis=0), color=colour, label=name, linewidth=1.4)
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[min(2, len(keys) - 1)].legend(frameon=False, fontsize=8)
    return save(figure, path)


if __name__ == "__main__":
    run_command(main)
