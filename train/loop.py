"""One training loop for all tasks. It never learns what a box or a transcript is."""

import json
import math
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.utils.tensorboard import SummaryWriter

from train.checkpoint import last_checkpoint, save_checkpoint
from train.config import Config
from train.data.stream import Draws, training_batches
from train.report import Progress
from train.tasks import Records, Task

HISTORY, CHECKPOINTS, TENSORBOARD = "history.jsonl", "checkpoints", "tensorboard"


class NonFiniteLoss(RuntimeError):
    """Training went wrong: the loss is infinite or no number."""


def fit(
    config: Config, task: Task, draws: Draws, folder: Path, accelerator: Accelerator
) -> tuple[dict[str, Any], Records]:
    """Trains to the last step, writing history, checkpoints and scalars into the folder.

    Returns:
        The metrics of the last evaluation and the records behind them.

    Raises:
        NonFiniteLoss: at the step where it happens, before it reaches the weights.
    """
    trainer = config.trainer
    optimizer = create_optimizer_v2(  # no weight decay on biases, norms and what model.no_weight_decay() names
        task.model,
        opt=config.optimizer.name,
        **config.optimizer.given(),
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.schedule.name,
        num_epochs=trainer.max_steps,
        warmup_epochs=config.schedule.warmup_steps,
        warmup_lr=config.schedule.warmup_lr,
        min_lr=config.schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,  # so that timm's epochs are our steps
    )
    batches = training_batches(
        task.train_data, draws, trainer.num_workers, pin_memory=accelerator.device.type == "cuda"
    )
    model, optimizer = accelerator.prepare(task.model, optimizer)
    model.train()

    metrics: dict[str, Any] = {}
    records: Records = []
    started = time.perf_counter()
    is_main = accelerator.is_main_process
    with History(folder, enabled=is_main) as history, Progress(trainer.max_steps, enabled=is_main) as progress:
        for step, batch in enumerate(batches, start=1):
            scheduler.step_update(step - 1)
            with accelerator.autocast():
                loss, scalars = task.loss(model, send_to_device(batch, accelerator.device))
            if not math.isfinite(loss_value := loss.item()):
                raise NonFiniteLoss(
                    f"the loss is {loss_value} at step {step}, with a learning rate of "
                    f"{optimizer.param_groups[0]['lr']:.3g}; last good checkpoint: {last_checkpoint(folder / CHECKPOINTS)}"
                )
            optimizer.zero_grad()
            accelerator.backward(loss)
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), trainer.clip_grad_norm or math.inf)
            optimizer.step()
            progress.step(step, loss_value)

            is_last = step == trainer.max_steps
            line: dict[str, float] = {}
            if step % trainer.log_every == 0 or step == 1 or is_last:
                line |= {"loss": loss_value, "lr": optimizer.param_groups[0]["lr"], "grad_norm": float(grad_norm)}
                line |= {key: float(value) for key, value in scalars.items()}
                line |= {"seconds": round(time.perf_counter() - started, 3)}
            if step % trainer.eval_every == 0 or is_last:
                metrics, records = task.evaluate(model, accelerator)
                line |= {f"test_{key}": value for key, value in metrics.items() if isinstance(value, float)}
            if line:
                history.log(step, line)
                progress.say(step, line)
            if (step % trainer.save_every == 0 or is_last) and is_main:
                save_checkpoint(
                    folder / CHECKPOINTS,
                    step,
                    accelerator.unwrap_model(model).state_dict(),
                    optimizer.state_dict(),
                    {"seed": config.seed, "examples_seen": step * trainer.batch_size, "metrics": metrics},
                    trainer.keep_checkpoints,
                )
    return metrics, records


def create_draws(config: Config, task: Task, accelerator: Accelerator) -> Draws:
    """What this process reads at which step."""
    return Draws(
        num_examples=len(task.train_data),  # type: ignore[arg-type]
        batch_size=config.trainer.batch_size,
        num_steps=config.trainer.max_steps,
        seed=config.seed,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )


class History:
    """One line of history.jsonl and the same numbers as TensorBoard scalars, by the main process."""

    def __init__(self, folder: Path, enabled: bool):
        self.file = (folder / HISTORY).open("w") if enabled else None
        self.scalars = SummaryWriter(folder / TENSORBOARD) if enabled else None

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file and self.scalars:
            self.file.close()
            self.scalars.close()

    def log(self, step: int, line: dict[str, float]) -> None:
        if self.file and self.scalars:
            self.file.write(json.dumps({"step": step, **line}) + "\n")
            self.file.flush()
            for key, value in line.items():
                self.scalars.add_scalar(key, value, step)


def create_accelerator(config: Config) -> Accelerator:
    return Accelerator(cpu=config.trainer.device == "cpu", mixed_precision=config.trainer.mixed_precision)
