"""`python -m train <config> [key=value ...]`: one run from a config to a trained model, its numbers and its pictures."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, set_seed
from rich.console import Console

from train import report
from train.checkpoint import last_checkpoint, replace_text
from train.config import Config, default_output, list_configs, load_config, resolved_yaml
from train.data.fetch import FetchError
from train.loop import CHECKPOINTS, HISTORY, TENSORBOARD, NonFiniteLoss, create_accelerator, create_draws, fit
from train.tasks import create_task

CONFIG, METRICS = "config.yaml", "metrics.json"


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
    except (ValueError, OSError, FetchError, NonFiniteLoss) as error:
        if os.environ.get("RELPOS2D_TRACEBACK"):
            raise
        print(f"error: {error}\n(RELPOS2D_TRACEBACK=1 shows where)", file=sys.stderr)
        return 1
    return 0


def run(name: str, overrides: Sequence[str] = ()) -> Path:
    """Trains a config and returns the run's folder."""
    config = load_config(name, overrides)
    accelerator = create_accelerator(config)
    console = Console(quiet=not accelerator.is_main_process)
    set_seed(config.seed)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    task = create_task(config)
    draws = create_draws(config, task, accelerator)

    # only now: what cannot be built leaves no folder behind
    folder = claim_folder(name, config) if accelerator.is_main_process else Path()
    folder = broadcast_object_list([folder])[0]
    if accelerator.is_main_process:
        replace_text(folder / CONFIG, resolved_yaml(config))
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    console.print(
        f"{name} -> {report.readable(folder)}: {num_parameters:,} parameters on {accelerator.device}",
        highlight=False,
        soft_wrap=True,
    )

    metrics, records = fit(config, task, draws, folder, accelerator)
    accelerator.end_training()
    if accelerator.is_main_process:
        replace_text(folder / task.records_name, "".join(json.dumps(record) + "\n" for record in records))
        summary = {"steps": config.trainer.max_steps, "seed": config.seed, "num_parameters": num_parameters}
        replace_text(folder / METRICS, json.dumps({**metrics, **summary, **report.surroundings()}, indent=2) + "\n")
        pictures = [
            report.draw_curves(folder / HISTORY, folder / "curves.png", task.score),
            *task.pictures(folder, records),
        ]
        console.print(
            f"test {task.score} {metrics[task.score]:.4f}\n"
            f"checkpoint    {report.readable(last_checkpoint(folder / CHECKPOINTS))}\n"
            f"pictures      {'  '.join(report.readable(picture) for picture in pictures)}",
            highlight=False,
            soft_wrap=True,
        )
    return folder


def claim_folder(name: str, config: Config) -> Path:
    """The run's folder, made and empty: `output`, or runs/<config>-<encoding>-<seed> with the first free suffix.

    Raises:
        ValueError: `output` holds something already, and is not allowed to or not known to be overwritten.
    """
    if config.output is None:
        wanted = default_output(name, config)
        suffix = 1
        while True:
            folder = Path(wanted if suffix == 1 else f"{wanted}-{suffix}")
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                suffix += 1
    folder = Path(config.output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output = {config.output!r}: is a file; a folder is wanted")
    if folder.is_dir() and any(folder.iterdir()):
        if not config.trainer.overwrite:
            raise ValueError(
                f"output = {config.output!r}: is not empty. Name another folder, or say trainer.overwrite=true to replace that run"
            )
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"output = {config.output!r}: trainer.overwrite=true replaces runs only, and there is no {CONFIG} in it"
            )
        clear_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clear_run(folder: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for entry in (CHECKPOINTS, TENSORBOARD):
        shutil.rmtree(folder / entry, ignore_errors=True)
    for pattern in ("*.png", "*.jsonl", METRICS, CONFIG):
        for file in folder.glob(pattern):
            file.unlink()


if __name__ == "__main__":
    sys.exit(main())
