"""`python -m train <config> [key=value ...]`: one run from a config to a trained model, its numbers and its pictures."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from rich.console import Console

from train import report
from train.checkpoint import last_checkpoint, replace_text
from train.config import list_configs, load_config
from train.data.fetch import FetchError
from train.distribute import on_main_process
from train.learner import Learner
from train.loop import NonFiniteLoss, Stopped, create_accelerator, create_draws, fit
from train.restore import restore
from train.run_folder import CHECKPOINTS, HISTORY, METRICS, Lock, open_run, records_text
from train.tasks import create_task
from train.tool import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Trains what a config describes. `group=name` exchanges a group of it, `group.key=value` sets one key.",
        epilog=f"configs: {', '.join(list_configs())}",
    )
    parser.add_argument("config", help="a file in configs/ without .yaml, or the path of your own")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="encoding=rope_mixed optimizer.lr=3e-4 output=runs/a"
    )
    given = parser.parse_args(arguments)
    try:
        run(given.config, given.overrides)
    except Stopped as stopped:
        without = " without trainer.overwrite=true" if stopped.overwrites else ""
        print(f"{stopped}; the same command{without} goes on from there", file=sys.stderr)
        return 128 + stopped.signal_number
    except (ValueError, OSError, FetchError, NonFiniteLoss) as error:
        if os.environ.get("RELPOS2D_TRACEBACK"):
            raise
        rank = os.environ.get("RANK")
        print(
            f"{f'[process {rank}] ' if rank else ''}error: {error}\n(RELPOS2D_TRACEBACK=1 shows where)", file=sys.stderr
        )
        return 1
    return 0


def run(name: str, overrides: Sequence[str] = ()) -> Path:
    """Trains a config, or goes on with it, and returns the run's folder."""
    config = load_config(name, overrides)
    accelerator = create_accelerator(config)
    console = Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True)
    set_seed(config.seed)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    with accelerator.local_main_process_first():  # which may have to fetch the data
        task = create_task(config)
    create_draws(config, task, accelerator)
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())

    description = task.description()
    lock = Lock()
    try:
        opened = on_main_process(accelerator, lambda: open_run(name, config, description, lock))
        folder = opened.folder
        console.print(
            f"{name} -> {report.readable(folder)}: {num_parameters:,} parameters on {accelerator.device}"
            + (f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else "")
        )
        for note in task.notes:
            console.print(f"model: {note}")
        for note in opened.notes:
            console.print(f"{report.readable(folder)}: {note}")
        if opened.finished:
            metrics = json.loads((folder / METRICS).read_text()) if accelerator.is_main_process else {}
            console.print(
                f"finished before: test {task.score} {metrics.get(task.score, float('nan')):.4f}\n"
                f"(trainer.overwrite=true starts anew; a larger trainer.max_steps with trainer.allow_changes=true goes on)"
            )
            return folder
        try:
            draws = create_draws(config, task, accelerator, opened.checkpoint)
            learner = Learner(config, task, accelerator, opened.checkpoint)
        except ValueError:
            if accelerator.is_main_process:
                opened.abandon()
            raise
        on_main_process(accelerator, lambda: opened.begin(config, description, task.files))

        result = fit(learner, draws, folder)
        if accelerator.is_main_process:
            metrics, records = result.metrics, result.records
            replace_text(folder / task.records_name, records_text(task.records_name, records))
            pictures = [
                report.draw_curves(folder / HISTORY, folder / "curves.png", task.score),
                *task.pictures(folder, records, restore(folder).model),
            ]
            summary = {
                **metrics,
                **result.summary,
                "seed": config.seed,
                "num_parameters": num_parameters,
                "num_processes": accelerator.num_processes,
                "peak_memory_mib": report.peak_memory_mib(),
                **report.surroundings(),
            }
            replace_text(folder / METRICS, json.dumps(summary, indent=2) + "\n")  # last: this run is complete
            console.print(
                f"test {task.score} {metrics[task.score]:.4f}\n"
                f"checkpoint    {report.readable(last_checkpoint(folder / CHECKPOINTS))}\n"
                f"pictures      {'  '.join(report.readable(picture) for picture in pictures)}"
            )
    finally:
        lock.release()
    accelerator.end_training()
    return folder


if __name__ == "__main__":
    run_command(main)
