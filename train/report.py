"""What one sees of a run: progress in the terminal, tables and pictures in its folder."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import nn

from relpos2d import Encoding
from relpos2d.tools.plot import plot_maps

#: numbers of an evaluation that are in the history, and not in its line in the terminal
UNSAID = ("_loss", "_standard_error", "_low", "_high", "_small", "_medium", "_large")

INK, ACCENT, FAINT, WRONG = "#222222", "#1f5fbf", "#b8c4d6", "#c03028"


class Progress:
    """A bar with the time left on a terminal; a line for each evaluation (and a few between) elsewhere."""

    def __init__(self, num_steps: int, start: int = 0, enabled: bool = True, console: Console | None = None):
        self.console = console or Console()
        self.num_steps, self.start, self.enabled = num_steps, start, enabled
        self.live = enabled and self.console.is_terminal
        self.bar = Bar(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
            transient=True,
        )

    def __enter__(self) -> "Progress":
        self.started = self.said = time.perf_counter()
        self.bar.start()
        self.task = self.bar.add_task("training", total=self.num_steps, completed=self.start, loss=float("nan"))
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, step: int, loss: float) -> None:
        self.bar.update(self.task, completed=step, loss=loss)

    def say(self, step: int, line: dict[str, float]) -> None:
        """Prints a logged line if it holds an evaluation, or if nothing was said for ten seconds and there is no bar."""
        now = time.perf_counter()
        evaluated = any(key.startswith("test_") for key in line)
        if not self.enabled or not (evaluated or (not self.live and now - self.said > 10)):
            return
        self.said = now
        left = (now - self.started) / max(step - self.start, 1) * (self.num_steps - step)
        names = (
            "loss",
            "test_loss",
            *(key for key in line if key.startswith("test_") and not key.endswith(UNSAID) and "_AR_" not in key),
        )
        numbers = "  ".join(f"{name.replace('_', ' ')} {line[name]:.4f}" for name in names if name in line)
        self.console.print(
            f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  {numbers}  {clock(left)} left",
            highlight=False,
            soft_wrap=True,
        )


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def surroundings() -> dict[str, Any]:
    """Commit, versions and machine: what one needs to know to run it again."""
    return {
        "commit": commit(),
        "command": ["python", "-m", "train", *sys.argv[1:]],
        "versions": {"python": platform.python_version()}
        | {n: installed(n) for n in ("relpos2d", "torch", "timm", "accelerate")},
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": memory_gib(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
    }


def peak_memory_mib() -> float | None:
    """The largest memory that this process has held so far, data and evaluation included; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes, or KiB
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def commit() -> str | None:
    """The commit of this code, with `+changes` if files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def read_history(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """history.jsonl by key: the steps at which it was logged, and its values."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        for key, value in line.items():
            if key != "step":
                steps, values = columns.setdefault(key, ([], []))
                steps.append(line["step"])
                values.append(value)
    return columns


def draw_curves(history: Path, path: Path, score: str = "accuracy") -> Path:
    """Loss, score, learning rate and, where positions are handed over, the strength of the relative ones, by step."""
    columns = read_history(history)
    panels: list[tuple[str, tuple[tuple[str, str, str], ...]]] = [
        ("loss", (("loss", "training", FAINT), ("test_loss", "test", ACCENT))),
        (score, ((f"train_{score}", "training", FAINT), (f"test_{score}", "test", ACCENT))),
        ("learning rate", (("lr", "", INK),)),
    ]
    if "strength" in columns:
        panels.append(("strength of relative positions", (("strength", "", INK),)))
    figure = Figure(figsize=(3.7 * len(panels), 3.2), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for key, label, colour in curves:
            if key in columns:
                steps, values = columns[key]
                axes.plot(
                    steps,
                    values,
                    color=colour,
                    label=label,
                    marker="o" if key.startswith("test_") else None,
                    markersize=3,
                )
        axes.set(title=title, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False)
    return save(figure, path)


def draw_predictions(
    path: Path, images: Sequence[np.ndarray], titles: Sequence[tuple[str, str]], columns: int = 8
) -> Path:
    """Images with what was predicted above, and beside it the label where that is another (in red)."""
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.3 * columns, 1.55 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, image, (prediction, label) in zip(grid, images, titles, strict=False):
        right = prediction.rsplit(" (", 1)[0] == label
        axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        axes.set_title(prediction if right else f"{prediction}\nis {label}", fontsize=8, color=INK if right else WRONG)
    return save(figure, path)


def to_pixels(image: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """A normalised (channels, height, width) image as uint8 pixels, (height, width) if it is grey."""
    mean_c11, std_c11 = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    pixels = ((image.cpu() * std_c11 + mean_c11) * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def draw_maps(path: Path, model: nn.Module) -> list[Path]:
    """What each head makes of every key, seen from the middle of the grid; nothing for a model without relative positions."""
    families = {module.family for module in model.modules() if isinstance(module, Encoding)}
    if not families - {"absolute", "none"}:
        return []
    plot_maps(model, path, title="learned positions, seen from the query in the middle")
    return [path]


def readable(path: Path | None) -> str:
    """A path as short as it can be told: relative to the working folder where it lies inside."""
    if path is None:
        return "none"
    return str(path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path)


def printable(text: str) -> str:
    """The text with a sign for each control character, which no font has: tokens of bytes spell them."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
