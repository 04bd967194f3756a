"""One training loop for all tasks. It never learns what a box or a transcript is."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.tensorboard import SummaryWriter

from train.checkpoint import Checkpoint, last_checkpoint, replace_text, save_checkpoint
from train.config import Config
from train.data.stream import AspectDraws, CountedDraws, Draws, TimedDraws, TrainingBatches
from train.distribute import mean_over_processes
from train.learner import Learner
from train.report import Progress
from train.run_folder import CHECKPOINTS, HISTORY, TENSORBOARD
from train.tasks import Records, Task


class NonFiniteLoss(RuntimeError):
    """Training went wrong: too many steps in a row had a loss or a gradient that is infinite or no number."""


class Stopped(RuntimeError):
    """The run was asked to end, has saved, and can be continued."""

    def __init__(self, step: int, signal_number: int, overwrites: bool = False):
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}, which is saved")
        self.step, self.signal_number, self.overwrites = step, signal_number, overwrites


@dataclass(frozen=True)
class Result:
    """The last evaluation's metrics, the records behind them, and what the run has to say of itself."""

    metrics: dict[str, Any]
    records: Records
    summary: dict[str, Any]


def fit(learner: Learner, draws: Draws, folder: Path) -> Result:
    """Trains to the last step, writing history, checkpoints and scalars into the folder.

    A learner that was made from a checkpoint goes on from there, and ends as if it had never been interrupted.

    Raises:
        NonFiniteLoss: none of those steps has reached the weights.
        Stopped: by SIGTERM or SIGINT, after saving.
        TooManyDamaged: more examples than allowed could not be read.
        OSError: something could not be written; the last checkpoint is untouched.
    """
    config, task, accelerator, checkpoint = learner.config, learner.task, learner.accelerator, learner.checkpoint
    trainer = config.trainer
    start, before = (checkpoint.step, checkpoint.state) if checkpoint else (0, {})
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

        def is_evaluated(step: int) -> bool:
            return step % trainer.eval_every == 0 or step == trainer.max_steps

        def finish(step: int, line: dict[str, float]) -> None:
            nonlocal metrics, records
            if is_evaluated(step):
                with clock("evaluation"):
                    metrics, records = task.evaluate(learner.evaluated, accelerator)
                line |= {f"test_{key}": value for key, value in metrics.items() if isinstance(value, float)}
            if line:
                with clock("logging"):
                    history.log(step, line | {"seconds": round(clock.total, 3)})
                    progress.say(step, line)

        if checkpoint:  # which was saved before it was evaluated and logged
            finish(start, {**history.last_line, **before["line"]})
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
            if step % trainer.save_every == 0 or is_evaluated(step) or stopping:
                with clock("saving"):
                    weights, optimizer, counters = learner.state()
                    state = {
                        "learner": counters,
                        "drawn": draws.after(step - start),
                        "num_examples": draws.num_examples,
                        "num_seconds": num_seconds(task),
                        "line": line,
                        "seconds": clock.seconds,
                    }
                    history.flush()
                    if accelerator.is_main_process:
                        save_checkpoint(
                            folder / CHECKPOINTS, Checkpoint(step, weights, optimizer, state), trainer.keep_checkpoints
                        )
            if stopping and not is_last:
                raise Stopped(step, stop.signal_number or signal.SIGTERM, trainer.overwrite)
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
        start, num_steps = drawn_before(checkpoint), checkpoint.step
        found = (
            ("training examples", "num_examples", num_examples),
            ("seconds of sound", "num_seconds", num_seconds(task)),
        )
        for what, key, now in found:
            before = checkpoint.state.get(key, now)
            if before != now and not config.trainer.allow_changes:
                raise ValueError(
                    f"data: {now} {what}, but the run to be continued was begun with {before}; trainer.allow_changes=true goes "
                    f"on all the same"
                )
    options: dict[str, Any] = {
        "batch_size": config.trainer.batch_size,
        "num_steps": config.trainer.max_steps - num_steps,
        "seed": config.seed,
        "start": start,
        "process_index": accelerator.process_index,
        "num_processes": accelerator.num_processes,
        "accumulate": config.trainer.accumulate,
    }
    if config.trainer.batch_seconds is not None:
        durations = task.train_data.durations  # type: ignore[attr-defined]  # of recordings alone, says the config
        return TimedDraws(durations, config.trainer.batch_seconds, **options)
    ratios = getattr(task.train_data, "aspect_ratios", None)
    num_groups = 3 if config.trainer.aspect_groups is None else config.trainer.aspect_groups
    if ratios is not None and num_groups:
        return AspectDraws(ratios, num_groups, **options)
    draws = CountedDraws(num_examples, **options)
    if config.loss.mixes and draws.part_size % 2:
        raise ValueError(
            f"loss.mixup, loss.cutmix: need parts of even size, these are {draws.part_size}: trainer.batch_size = "
            f"{draws.batch_size} for {draws.num_processes} processes and trainer.accumulate = {draws.accumulate}"
        )
    return draws


def num_seconds(task: Task) -> float | None:
    """How long the training recordings are together, since batches are made by that; None for what is no recording."""
    durations = getattr(task.train_data, "durations", None)
    return None if durations is None else round(sum(durations), 3)


def drawn_before(checkpoint: Checkpoint) -> int:
    """Where the draws of a checkpoint stood; they had another name once."""
    state = checkpoint.state
    return state["drawn"] if "drawn" in state else state["examples_seen"]


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

    Attributes:
        last_line: what was logged at `start`.
    """

    def __init__(self, folder: Path, start: int, enabled: bool):
        self.path, self.last_line = folder / HISTORY, dict[str, float]()
        self.file = self.scalars = None
        if not enabled:
            return
        if start:
            lines = whole_lines(self.path)
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in lines if line["step"] < start))
            self.last_line = next((line for line in lines if line["step"] == start), {})
            self.last_line = {key: value for key, value in self.last_line.items() if key not in ("step", "seconds")}
        self.file = self.path.open("a" if start else "w")
        self.scalars = SummaryWriter(folder / TENSORBOARD, purge_step=start or None)

    def __enter__(self) -> "History":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for writer in (self.file, self.scalars):
            try:
                if writer is not None:
                    writer.close()
            except OSError as error:
                if kind is None:  # else there is an error already that tells more
                    raise self.unwritable(error) from error

    def log(self, step: int, line: dict[str, float]) -> None:
        if self.file and self.scalars:
            try:
                self.file.write(json.dumps({"step": step, **line}) + "\n")
                self.file.flush()
                for key, value in line.items():
                    self.scalars.add_scalar(key, value, step)
            except OSError as error:
                raise self.unwritable(error) from error

    def flush(self) -> None:
        """What has been logged reaches the disk: before a checkpoint that takes it for written."""
        if self.file:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> OSError:
        return OSError(f"{self.path} or {TENSORBOARD}/ could not be written ({error}); the checkpoints are untouched")


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a history but for half a one, from a process that was killed."""
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
            if isinstance(line["step"], int):
                lines.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def create_accelerator(config: Config) -> Accelerator:
    """accelerate's, which finds the devices and the other processes.

    Raises:
        ValueError: the device cannot do what is asked for.
    """
    accelerator = Accelerator(
        cpu=config.trainer.device == "cpu",
        mixed_precision=config.trainer.mixed_precision,
        # one process may fetch or index the data while the others wait
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
    )
    if (
        config.trainer.mixed_precision == "fp16" and accelerator.scaler is None
    ):  # accelerate would do without in silence
        raise ValueError(
            f"trainer.mixed_precision = 'fp16': needs a GPU, the device is {accelerator.device}; bf16 works there"
        )
    return accelerator
