"""The loop with a task of its own that is no classification: it knows about losses and batches, nothing else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.data import Dataset

from train.checkpoint import load_checkpoint
from train.config import Config, load_config
from train.loop import NonFiniteLoss, create_accelerator, create_draws, fit
from train.report import read_history
from train.tasks import Records


class Line(Dataset[dict[str, torch.Tensor]]):
    """Points of a plane: y = 2 a - 3 b + 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x @ torch.tensor([2.0, -3.0]) + 1}


class Regression:
    """The smallest task there is."""

    score, records_name = "error", "guesses.jsonl"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.train_data = Line()
        self.model: nn.Module = nn.Linear(2, 1)
        self.losses: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (model(batch["x"])[:, 0] - batch["y"]).square().mean()
        self.losses.append(loss.item())
        return loss, {"train_error": loss.detach().sqrt()}

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Any], Records]:
        return {"error": self.losses[-1], "num_examples": 1}, [{"index": 0}]

    def pictures(self, folder: Path, records: Records) -> list[Path]:
        return []


def config(*overrides: str) -> Config:
    short = [
        "trainer.max_steps=30",
        "trainer.batch_size=8",
        "schedule.warmup_steps=5",
        "optimizer.lr=0.3",
        "optimizer.weight_decay=0.0",
    ]
    return load_config("classify/digits", [*{o.split("=")[0]: o for o in [*short, *overrides]}.values()])


def run(folder: Path, *overrides: str, task: Regression | None = None) -> Regression:
    task = task or Regression()
    folder.mkdir(exist_ok=True)
    chosen = config(*overrides)
    accelerator = create_accelerator(chosen)
    fit(chosen, task, create_draws(chosen, task, accelerator), folder, accelerator)
    return task


def test_the_loss_falls_and_everything_is_written(tmp_path: Path) -> None:
    task = run(tmp_path, "trainer.log_every=10", "trainer.eval_every=15", "trainer.save_every=12")
    assert task.losses[-1] < 0.05 * task.losses[0]
    columns = read_history(tmp_path / "history.jsonl")
    assert columns["loss"][0] == [1, 10, 20, 30]
    assert columns["loss"][1] == [task.losses[step - 1] for step in (1, 10, 20, 30)]
    assert columns["test_error"] == ([15, 30], [task.losses[14], task.losses[29]])
    assert columns["train_error"][1][0] == pytest.approx(math.sqrt(task.losses[0]))
    model, _, state = load_checkpoint(tmp_path / "checkpoints")
    assert (state["step"], state["examples_seen"], state["metrics"]["error"]) == (30, 240, task.losses[29])
    assert torch.equal(model["weight"], task.model.weight)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last", "step_24", "step_30"]
    assert next((tmp_path / "tensorboard").iterdir()).stat().st_size > 100


def test_the_learning_rate_by_step(tmp_path: Path) -> None:
    run(tmp_path, "trainer.log_every=1", "schedule.warmup_lr=0.1", "schedule.min_lr=0.02")
    steps, rates = read_history(tmp_path / "history.jsonl")["lr"]
    expected = [
        0.1 + (0.3 - 0.1) * step / 5 if step < 5 else 0.02 + (0.3 - 0.02) * (1 + math.cos(math.pi * step / 30)) / 2
        for step in range(30)
    ]
    assert steps == list(range(1, 31))
    assert rates == pytest.approx(expected)


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    first, again, other = run(tmp_path / "1"), run(tmp_path / "2"), run(tmp_path / "3", "seed=1")
    assert first.losses == again.losses
    assert first.losses != other.losses


def test_gradients_are_clipped(tmp_path: Path) -> None:
    free = ["optimizer={name: sgd, lr: 0.01, momentum: 0.5}", "trainer.clip_grad_norm=null", "schedule.warmup_steps=0"]
    task, start = Regression(), Regression().model.weight.clone()  # type: ignore[operator]
    run(tmp_path / "free", *free, "trainer.max_steps=1", task=task)
    moved = (task.model.weight - start).norm().item()  # type: ignore[operator]
    task = Regression()
    run(tmp_path / "clipped", *free, "trainer.max_steps=1", "trainer.clip_grad_norm=0.5", task=task)
    norm = json.loads((tmp_path / "free" / "history.jsonl").read_text().splitlines()[0])["grad_norm"]
    assert norm > 0.5
    assert (task.model.weight - start).norm().item() == pytest.approx(moved * 0.5 / norm, rel=1e-3)  # type: ignore[operator]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_weights(value: float, tmp_path: Path) -> None:
    class Wrong(Regression):
        def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, scalars = super().loss(model, batch)
            return (loss * value if len(self.losses) == 8 else loss), scalars

    task = Wrong()
    with pytest.raises(NonFiniteLoss, match=f"the loss is {value} at step 8, .*last good checkpoint: .*step_7"):
        run(tmp_path, "trainer.save_every=7", task=task)
    assert torch.equal(load_checkpoint(tmp_path / "checkpoints")[0]["weight"], task.model.weight)  # type: ignore[arg-type]


def test_m7_data_smaller_than_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.batch_size = 65: must be at most 64"):
        run(tmp_path, "trainer.batch_size=65")
    run(tmp_path, "trainer.batch_size=64", "trainer.max_steps=6")


def test_biases_norms_and_positions_do_not_decay() -> None:
    model = timm.create_model(
        "relpos2d_swin_tiny_patch4_window7_224", encoding="table", depths=(1, 1), num_heads=(2, 2), embed_dim=32
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = config("optimizer.weight_decay=0.1").optimizer
    groups = create_optimizer_v2(model, opt=chosen.name, **chosen.given()).param_groups
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert any(name.endswith("mlp.fc1.weight") for name in decayed)
    assert any("relative_position_bias_table" in name for name in set(names.values()) - decayed)
