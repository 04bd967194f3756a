"""Everything that learns or counts steps, and is saved: model, optimizer, schedule, strengths, average, loss scaling."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from train.checkpoint import Checkpoint, misfits
from train.config import Config
from train.data.stream import seed_everything
from train.distribute import (
    attention_blocks,
    clip_gradients,
    gradients_stay,
    load_optimizer,
    share_out,
    whole_optimizer,
    whole_weights,
    wrap,
)
from train.recipe import Strengths, choose_trainable, create_average, create_optimizer, create_schedule
from train.tasks import Task


class Learner:
    """Takes steps. After a step, `state()` is all that another learner needs to go on exactly as this one would.

    Learning rate, strengths and random numbers (dropout, drop path, Mixup) are functions of the number of steps taken, and of
    the process, so there is nothing of them to save.

    Raises:
        ValueError: the checkpoint is one of another model.
    """

    def __init__(self, config: Config, task: Task, accelerator: Accelerator, checkpoint: Checkpoint | None = None):
        trainer = config.trainer
        self.config, self.task, self.accelerator, self.checkpoint = config, task, accelerator, checkpoint
        model = task.model.to(accelerator.device)
        choose_trainable(model, trainer)
        self.strengths = Strengths(model, config)
        self.average = create_average(model, trainer)
        self.num_updates = self.num_skipped = self.num_skipped_in_a_row = 0
        if checkpoint is not None:
            load_weights(model, checkpoint, "model")
            if self.average is not None:
                load_weights(self.average.module, checkpoint, "ema" if "ema" in checkpoint.weights else "model")
        if trainer.compile:
            shared = trainer.parallel == "fsdp2" and accelerator.num_processes > 1
            for module in attention_blocks(model) if shared else [model]:
                module.compile()
        self.wrapped = wrap(model, accelerator, trainer.parallel)
        if self.average is not None and self.wrapped is model and accelerator.num_processes > 1:
            share_out(self.average.module, accelerator)
        self.model = model
        self.optimizer = create_optimizer(model, config)
        self.stepping = accelerator.prepare_optimizer(self.optimizer)
        self.schedule = create_schedule(self.optimizer, config)
        if checkpoint is not None:
            self.restore(checkpoint)
        self.wrapped.train()

    @property
    def evaluated(self) -> nn.Module:
        """The model whose numbers count: the average where one is kept."""
        return self.model if self.average is None else self.average.module

    @property
    def learning_rate(self) -> float:
        """That of the schedule; layers and positions may have a multiple of it."""
        return max(group["lr"] / group.get("lr_scale", 1.0) for group in self.optimizer.param_groups)

    def step(self, step: int, next_batch: Callable[[], Any]) -> tuple[float | torch.Tensor, dict[str, Any], float]:
        """Step number `step`, from 1 on, up to the gradients.

        Returns:
            This process's mean loss, what else is to be logged, and the norm of the whole gradient.
        """
        trainer = self.config.trainer
        self.schedule.step_update(step - 1)
        self.strengths.before_step(step - 1)
        seed_everything(self.config.seed, step, self.accelerator.process_index, every_device=True)
        self.stepping.zero_grad()
        parts: list[dict[str, Any]] = []
        for part in range(trainer.accumulate):
            batch = send_to_device(next_batch(), self.accelerator.device)
            with gradients_stay(self.wrapped, self.accelerator, stay=part < trainer.accumulate - 1):
                with self.accelerator.autocast():
                    loss, scalars = self.task.loss(self.wrapped, batch)
                self.accelerator.backward(loss / trainer.accumulate)
            parts.append({"loss": loss.detach(), **scalars})
        grad_norm = clip_gradients(self.wrapped, self.accelerator, trainer.clip_grad_norm)
        if self.num_updates == 0:
            refuse_idle_parameters(self.model)
        means = {key: sum(p[key] for p in parts) / len(parts) for key in parts[0]}
        return means.pop("loss"), means, grad_norm

    def update(self, finite: bool) -> None:
        """Lets the gradients of a step change the weights, or leaves the step out and counts it."""
        scaler = self.accelerator.scaler
        if finite or scaler is not None:  # the scaler looks for itself, and learns from what it finds
            self.stepping.step()
        if finite and not (scaler is not None and self.stepping.step_was_skipped):
            self.num_updates += 1
            self.num_skipped_in_a_row = 0
            if self.average is not None:
                self.average.update(self.model, step=self.num_updates)
        else:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1

    def state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Weights, optimizer and counters. All processes must take part."""
        weights = {"model": whole_weights(self.model)}
        if self.average is not None:
            weights["ema"] = whole_weights(self.average.module)
        scaler = self.accelerator.scaler
        counters = {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        return weights, whole_optimizer(self.model, self.optimizer), counters

    def restore(self, checkpoint: Checkpoint) -> None:
        try:
            load_optimizer(self.model, self.optimizer, checkpoint.optimizer, keep=tuple(self.config.optimizer.given()))
        except (KeyError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the optimizer's state in the checkpoint of step {checkpoint.step} is of another optimizer, or of other "
                f"parameters: {error}"
            ) from error
        counters = checkpoint.state["learner"]
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.num_skipped_in_a_row = counters["num_skipped_in_a_row"]
        if self.accelerator.scaler is not None and counters["scaler"]:
            self.accelerator.scaler.load_state_dict(counters["scaler"])


def load_weights(model: nn.Module, checkpoint: Checkpoint, name: str) -> None:
    if different := misfits(model, checkpoint.weights[name]):
        raise ValueError(
            f"the checkpoint of step {checkpoint.step} is one of another model or encoding: {'; '.join(different)}"
        )
    model.load_state_dict(checkpoint.weights[name])


def refuse_idle_parameters(model: nn.Module) -> None:
    """What never gets a gradient stops training on several processes, and is a mistake on one."""
    idle = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if idle:
        raise ValueError(
            f"{len(idle)} parameters to be trained get no gradient from the loss: {', '.join(idle[:5])}"
            f"{', ...' if len(idle) > 5 else ''}; freeze them (requires_grad_(False))"
        )
