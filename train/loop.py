"""One training loop for all tasks. It never learns what a box or a transcript is."""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.tensorboard import SummaryWriter

from train.checkpoint import Checkpoint, last_checkpoint, replace_text, save_checkpoint
from train.config import Config
from train.data.stream import Draws, TrainingBatches
from train.distribute import mean_over_processes
from train.learner import Learner
from train.report import Progress
from train.run_folder import CHECKPOINTS, HISTORY, TENSORBOARD
from train.tasks import Records, Task


class NonFiniteLoss(RuntimeError):
    """Training went wrong: too many steps in a row had a loss or a gradient that is infinite or no number."""


class Stopped(RuntimeError):
    """The run was asked to end, has saved, and can be continued."""

    def __init__(self, step: int, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}, which is saved")
        self.step, self.signal_number = step, signal_number


@dataclass(frozen=True)
class Result:
    """The last evaluation's metrics, the records behind them, and what the run has to say of itself."""

    metrics: dict[str, Any]
    records: Records
    summary: dict[str, Any]


def fit(
    config: Config, task: Task, folder: Path, accelerator: Accelerator, checkpoint: Checkpoint | None = None
) -> Result:
    """Trains to the last step, writing history, checkpoints and scalars into the folder.

    Args:
        checkpoint: where to go on. The run then ends as if it had never been interrupted.

    Raises:
        NonFiniteLoss: none of those steps has reached the weights.
        Stopped: by SIGTERM or SIGINT, after saving.
        ValueError: the checkpoint does not belong to this model or these data.
        CheckpointError: the last checkpoint is untouched.
    """
    trainer = config.trainer
    draws = create_draws(config, task, accelerator, checkpoint)
    learner = Learner(config, task, accelerator, checkpoint)
    before = checkpoint.state if checkpoint else {}
    start = checkpoint.step if checkpoint else 0
    clock = Clock(before.get("seconds", {}))
    metrics: dict[str, Any] = {}
    records: Records = []

    with (
        History(folder, start, enabled=accelerator.is_main_process) as history,
        Progress(trainer.max_steps, start, enabled=accelerator.is_main_process) as progress,
        TrainingBatches(
            task.train_data,
            draws,
            trainer.num_workers,
            pin_memory=accelerator.device.type == "cuda",
            max_damaged=task.max_damaged,
        ) as batches,
        StopRequest() as stop,
    ):

        def next_batch() -> Any:
            with clock("data"):
                return next(batches)

        def finish(step: int, line: dict[str, float]) -> None:
            nonlocal metrics, records
            if step % trainer.eval_every == 0 or step == trainer.max_steps:
                with clock("evaluation"):
                    metrics, records = task.evaluate(learner.evaluated, accelerator)
                line |= {f"test_{key}": value for key, value in metrics.items() if isinstance(value, float)}
            if line:
                with clock("logging"):
                    history.log(step, line | {"seconds": round(clock.total, 3)})
                    progress.say(step, line)

        if checkpoint:  # saved before it was evaluated and logged
            finish(start, dict(before["line"]))
        for step in range(start + 1, trainer.max_steps + 1):
            own_loss, own_scalars, grad_norm = learner.step(step, next_batch)
            loss, stopping, *values = mean_over_processes(accelerator, own_loss, stop.requested, *own_scalars.values())
            learner.update(finite=math.isfinite(loss) and math.isfinite(grad_norm))
            if learner.num_skipped_in_a_row > trainer.max_skipped_steps:
                raise NonFiniteLoss(
                    f"{learner.num_skipped_in_a_row} steps in a row were not finite and left out, the last is step {step}: "
                    f"loss {loss}, norm of the gradient {grad_norm}, learning rate {learner.learning_rate:.3g}; "
                    f"last good checkpoint: {last_checkpoint(folder / CHECKPOINTS)}"
                )

            is_last = step == trainer.max_steps
            line: dict[str, float] = {}
            with clock("logging"):
                progress.step(step, loss)
                if step % trainer.log_every == 0 or step == 1 or is_last:
                    line |= {"loss": loss, "lr": learner.learning_rate, "grad_norm": grad_norm}
                    line |= dict(zip(own_scalars, values, strict=True))
                    if learner.strengths.value is not None:
                        line["strength"] = learner.strengths.value
                    if learner.num_skipped:
                        line["skipped_steps"] = learner.num_skipped
            if step % trainer.save_every == 0 or is_last or stopping:
                with clock("saving"):
                    weights, optimizer, counters = learner.state()
                    state = {
                        "learner": counters,
                        "examples_seen": draws.start + (step - start) * trainer.batch_size,
                        "num_examples": draws.num_examples,
                        "max_steps": trainer.max_steps,
                        "line": line,
                        "seconds": clock.seconds,
                    }
                    if accelerator.is_main_process:
                        save_checkpoint(
                            folder / CHECKPOINTS, Checkpoint(step, weights, optimizer, state), trainer.keep_checkpoints
                        )
            if stopping and not is_last:
                raise Stopped(step, stop.signal_number or signal.SIGTERM)
            finish(step, line)

    summary = {"steps": trainer.max_steps, "skipped_steps": learner.num_skipped, "seconds": clock.rounded()}
    return Result(metrics, records, summary)


def create_draws(config: Config, task: Task, accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> Draws:
    """What this process reads at which step.

    Raises:
        ValueError: the batch size does not fit the data or the processes, or the data are others than before.
    """
    num_examples = len(task.train_data)  # type: ignore[arg-type]
    start = num_steps = 0
    if checkpoint is not None:
        start, num_steps = checkpoint.state["examples_seen"], checkpoint.step
        before = checkpoint.state["num_examples"]
        if before != num_examples and not config.trainer.allow_changes:
            raise ValueError(
                f"data: {num_examples} training examples, but the run to be continued was begun with {before}; "
                f"trainer.allow_changes=true goes on all the same"
            )
    draws = Draws(
        num_examples=num_examples,
        batch_size=config.trainer.batch_size,
        num_steps=config.trainer.max_steps - num_steps,
        seed=config.seed,
        start=start,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        accumulate=config.trainer.accumulate,
    )
    if config.loss.mixes and draws.part_size % 2:
        raise ValueError(
            f"loss.mixup, loss.cutmix: need parts of even size, these are {draws.part_size}: trainer.batch_size = "
            f"{draws.batch_size} for {draws.num_processes} processes and trainer.accumulate = {draws.accumulate}"
        )
    return draws


class Clock:
    """Seconds by what they were spent on, and in total; goes on from an earlier part of the run."""

    def __init__(self, before: dict[str, float]):
        self.parts = {key: seconds for key, seconds in before.items() if key != "total"}
        self.started = time.perf_counter() - before.get("total", 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - started

    @property
    def total(self) -> float:
        return time.perf_counter() - self.started

    @property
    def seconds(self) -> dict[str, float]:
        return {**self.parts, "total": self.total}

    def rounded(self) -> dict[str, float]:
        return {key: round(seconds, 2) for key, seconds in self.seconds.items()}


class StopRequest:
    """Notices SIGTERM and the first Ctrl-C; the loop looks at it after each step. A second Ctrl-C interrupts at once.

    Python hands signals to its main thread only; a run in another thread notices none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def requested(self) -> float:
        return float(self.signal_number is not None)

    def __enter__(self) -> "StopRequest":
        watched = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.before = {number: signal.signal(number, self.notice) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def notice(self, number: int, _: object) -> None:
        if number == signal.SIGINT and self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number


class History:
    """One line of history.jsonl and the same numbers as TensorBoard scalars, by the main process.

    Where a run goes on after `start` steps, what it had logged from that step on goes: it comes again.
    """

    def __init__(self, folder: Path, start: int, enabled: bool):
        self.path = folder / HISTORY
        self.file = self.scalars = None
        if not enabled:
            return
        if start:
            replace_text(self.path, "".join(f"{line}\n" for line in lines_before(self.path, start)))
        self.file = self.path.open("a" if start else "w")
        self.scalars = SummaryWriter(folder / TENSORBOARD, purge_step=start or None)

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file and self.scalars:
            self.file.close()
            self.scalars.close()

    def log(self, step: int, line: dict[str, float]) -> None:
        if self.file and self.scalars:
            try:
                self.file.write(json.dumps({"step": step, **line}) + "\n")
                self.file.flush()
            except OSError as error:
                raise OSError(f"{self.path} could not be written ({error}); the checkpoints are untouched") from error
            for key, value in line.items():
                self.scalars.add_scalar(key, value, step)


def lines_before(path: Path, step: int) -> list[str]:
    """The whole lines of a history up to a step, without it."""
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # half a line, from a process that was killed
            continue
    return kept


def create_accelerator(config: Config) -> Accelerator:
    """accelerate's, which finds the devices and the other processes.

    Raises:
        ValueError: the device cannot do what is asked for.
    """
    accelerator = Accelerator(cpu=config.trainer.device == "cpu", mixed_precision=config.trainer.mixed_precision)
    if (
        config.trainer.mixed_precision == "fp16" and accelerator.scaler is None
    ):  # accelerate would do without in silence
        raise ValueError(
            f"trainer.mixed_precision = 'fp16': needs a GPU, the device is {accelerator.device}; bf16 works there"
        )
    return accelerator
