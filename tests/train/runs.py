"""Folders of runs for the tests of the tools: as training leaves them, with weights that are far from their start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.backbones.builders import draw
from train.checkpoint import Checkpoint, replace_text, save_checkpoint
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
    for name, text in task.files.items():
        replace_text(folder / name, text)
    save_checkpoint(folder / CHECKPOINTS, Checkpoint(3, weights, {}, {}))
    return task.model.eval()


def halved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value / 2 for name, value in model.state_dict().items()}
