"""`python -m train.costs RUN...`: what a training step of each run's model takes, in time and memory, measured side by side."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from relpos2d.tools.bench import median_ratio
from relpos2d.tools.memory import peak_bytes
from train.compare import group_runs
from train.config import load_config
from train.data.stream import TrainingBatches
from train.loop import create_accelerator, create_draws
from train.restore import without_pretrained
from train.run_folder import CONFIG
from train.tasks import create_task
from train.tool import positive, run_command, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.costs",
        description="Time and memory of a training step, forward and backward without the optimizer, on the first batch of each "
        "run. The runs take turns, and times are compared within a round, so that what else the machine does hits all alike. "
        "Runs that differ in nothing but the seed are one row.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, finished or not")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="steps of each run (default: 7)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of torch on the CPU (default: 1)")
    return run_tool(costs, parser.parse_args(arguments))


@dataclass
class Contestant:
    """A model and what its steps have taken. `peak`: bytes beside the model and its batch."""

    num_parameters: int
    step: Callable[[], None]
    peak: int
    seconds: list[float] = field(default_factory=list)


def costs(given: argparse.Namespace) -> int:
    torch.set_num_threads(given.threads)
    contestants = {
        label: contestant(folders[0]) for label, folders in group_runs([Path(run) for run in given.runs]).items()
    }
    for _ in range(given.rounds):
        for one in contestants.values():
            started = time.perf_counter()
            one.step()
            one.seconds.append(time.perf_counter() - started)
    print(table(contestants))
    return 0


def contestant(folder: Path) -> Contestant:
    """The model of a run, untrained, with its first batch.

    Raises:
        ValueError: the run's data or its model cannot be had.
    """
    config = without_pretrained(load_config(str(folder / CONFIG)))
    accelerator = create_accelerator(config)
    task = create_task(config)
    draws = create_draws(config, task, accelerator)
    with TrainingBatches(task.train_data, draws, 0, pin_memory=False, max_damaged=task.max_damaged) as batches:
        batch: Any = send_to_device(next(batches), accelerator.device)
    model = task.model.to(accelerator.device).train()

    def step() -> None:
        loss, _ = task.loss(model, batch)
        loss.backward()
        model.zero_grad()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize(accelerator.device)

    step()  # what is made once
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Contestant(num_parameters, step, peak_bytes(step, accelerator.device))


def table(contestants: Mapping[str, Contestant]) -> str:
    """Markdown: a row a run; times as the median of the rounds, and as a ratio to the first run with its interval of 95 %."""
    first_label, first = next(iter(contestants.items()))
    lines = [["", "parameters", "ms a step", f"ratio to {first_label}", "peak MiB"], ["---"] * 5]
    for label, one in contestants.items():
        ratio = median_ratio([own / other for own, other in zip(one.seconds, first.seconds, strict=True)])
        milliseconds = 1000 * statistics.median(one.seconds)
        lines.append([label, f"{one.num_parameters:,}", f"{milliseconds:.0f}", str(ratio), f"{one.peak / 2**20:.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    run_command(main)
