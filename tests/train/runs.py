"""Folders of runs for the tests of the tools: as training leaves them, with weights that are far from their start."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.backbones.builders import draw
from train.__main__ import main
from train.checkpoint import Checkpoint, load_checkpoint, replace_text, save_checkpoint
from train.config import load_config, resolved_yaml
from train.data.description import DESCRIPTION
from train.run_folder import CHECKPOINTS, CONFIG
from train.tasks import create_task

VIT = "model={name: relpos2d_vit_tiny_patch16_224, patch_size: 7, embed_dim: 24, depth: 2, num_heads: 3}"


def make_run(folder: Path, config: str, overrides: Sequence[str] = (), average: bool = False) -> Any:
    """Writes the folder of a run with a drawn model at step 3 (and the same halved as its average), and returns the model."""
    loaded = load_config(config, overrides)
    task = create_task(loaded)
    draw(task.model, seed=5)
    weights = {"model": task.model.state_dict()}
    if average:
        weights["ema"] = halved(task.model)
    folder.mkdir(parents=True)
    replace_text(folder / CONFIG, resolved_yaml(loaded))
    replace_text(folder / DESCRIPTION, task.description())
    save_checkpoint(folder / CHECKPOINTS, Checkpoint(3, weights, {}, {}))
    return task.model.eval()


def halved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value / 2 for name, value in model.state_dict().items()}


SIX_STEPS = (
    "classify/digits_vit",
    VIT,
    "model.drop_path_rate=0.2",
    "encoding=[learned, table, rope_mixed]",
    "handover={steps: 4}",
    "loss=mixed",
    "schedule.warmup_steps=2",
    "trainer={max_steps: 6, batch_size: 8, log_every: 1, save_every: 3, ema_decay: 0.99, clip_grad_norm: 5.0}",
)


def six_steps_twice(folder: Path, digits_csv: str, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run of six steps leaves, and what it leaves when it was lost after the third and started again."""
    arguments = [*SIX_STEPS, f"data.path={digits_csv}", f"output={folder / 'run'}", *options]
    outcomes = []
    for _ in range(2):
        assert main(arguments) == 0
        last = load_checkpoint(folder / "run" / CHECKPOINTS / "step_6")
        lines = [json.loads(line) for line in (folder / "run" / HISTORY).read_text().splitlines()]
        outcomes.append(
            {
                "weights": last.weights,
                "optimizer": last.optimizer,
                "learner": last.state["learner"],
                "history": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
            }
        )
        shutil.rmtree(folder / "run" / CHECKPOINTS / "step_6")
        (folder / "run" / METRICS).unlink()
    return outcomes[0], outcomes[1]
