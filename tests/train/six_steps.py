"""A run of six steps, and the same run lost after its third step and started again; on the CPU and on GPUs."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.train.runs import VIT
from train.__main__ import main
from train.checkpoint import load_checkpoint
from train.run_folder import CHECKPOINTS, HISTORY, METRICS

SIX_STEPS = (
    "classify/digits_vit",
    VIT,
    "model.drop_path_rate=0.2",
    "encoding=[learned, table, rope_mixed]",
    "handover={steps: 4}",
    "loss=mixed",
    "schedule.warmup_steps=2",
    "optimizer={name: adamw, lr: 1e-3, weight_decay: 0.05}",
    "trainer={max_steps: 6, batch_size: 8, log_every: 1, save_every: 3, ema_decay: 0.99, clip_grad_norm: 5.0}",
)


def six_steps_twice(folder: Path, digits_csv: str, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run of six steps leaves, and what it leaves when it was lost after the third and started again."""
    given = [*SIX_STEPS, f"data.path={digits_csv}", f"output={folder / 'run'}", *options]
    arguments = [*{each.split("=")[0]: each for each in given}.values()]
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
