"""Which example is drawn at which step: a function of the seed alone, whatever the number of workers and processes."""

import ctypes
import math
import multiprocessing
import os
import random
import signal
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

Draw = tuple[int, int]  # (epoch, index)
Collate = Callable[[list[Any]], Any]

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent has died


class DamagedExample(ValueError):
    """One example that cannot be read; training goes on with another in its place, up to a limit."""

    def __init__(self, name: str, reason: object):
        super().__init__(f"{name}: no readable image ({reason})")
        self.name, self.reason = name, str(reason)

    def __reduce__(self) -> tuple[Any, ...]:  # comes back whole from a data worker
        return type(self), (self.name, self.reason)


class TooManyDamaged(ValueError):
    """More examples are damaged than allowed."""


class Draws(Sampler[list[Draw]]):
    """The batches of a run's steps to come as lists of (epoch, index).

    Each process takes its share of a batch, in `accumulate` parts one after the other.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        num_steps: int,
        seed: int,
        start: int,
        process_index: int,
        num_processes: int,
        accumulate: int,
    ):
        self.num_examples, self.batch_size, self.num_steps, self.seed = num_examples, batch_size, num_steps, seed
        self.start, self.process_index, self.accumulate = start, process_index, accumulate
        self.num_processes, self.num_parts = num_processes, num_processes * accumulate

    def __len__(self) -> int:
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[list[Draw]]:
        for batch in self.whole_batches():
            for part in range(self.accumulate):
                yield batch[self.process_index * self.accumulate + part :: self.num_parts]

    @abstractmethod
    def whole_batches(self) -> Iterator[list[Draw]]:
        """The batch of each step, all processes and parts together."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def after(self, num_steps: int) -> int:
        """The `start` of who goes on after so many steps."""
        raise NotImplementedError(type(self).__name__)


def check_batch_size(num_examples: int, batch_size: int, num_processes: int, accumulate: int) -> None:
    """Refuses batches that are more than the data, or that cannot be shared out evenly."""
    if num_examples < batch_size:
        raise ValueError(
            f"trainer.batch_size = {batch_size}: must be at most {num_examples}, the training examples there are"
        )
    if batch_size % (num_processes * accumulate):
        parts = f" times trainer.accumulate = {accumulate}" if accumulate > 1 else ""
        raise ValueError(
            f"trainer.batch_size = {batch_size}: must be a multiple of {num_processes}, the processes there are{parts}"
        )


class CountedDraws(Draws):
    """Batches of equally many examples: each epoch is a new order, a batch may reach over two epochs.

    So every batch is full and no example is dropped.

    Args:
        num_examples: how many there are to draw from.
        batch_size: of a step, all processes and parts together.
        num_steps: how many steps there are to come.
        start: how many examples have been drawn before.

    Raises:
        ValueError: the data are fewer than one batch, or a batch cannot be shared out evenly.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        num_steps: int,
        seed: int,
        start: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
        accumulate: int = 1,
    ):
        check_batch_size(num_examples, batch_size, num_processes, accumulate)
        super().__init__(num_examples, batch_size, num_steps, seed, start, process_index, num_processes, accumulate)

    @property
    def part_size(self) -> int:
        """How many examples a process works on at once."""
        return self.batch_size // self.num_parts

    def after(self, num_steps: int) -> int:
        return self.start + num_steps * self.batch_size

    def whole_batches(self) -> Iterator[list[Draw]]:
        order, order_epoch = np.arange(0), -1
        for step in range(self.num_steps):
            batch = []
            for draw in range(self.start + step * self.batch_size, self.start + (step + 1) * self.batch_size):
                epoch, position = divmod(draw, self.num_examples)
                if epoch != order_epoch:
                    order, order_epoch = np.random.default_rng((self.seed, epoch)).permutation(self.num_examples), epoch
                batch.append((epoch, int(order[position])))
            yield batch


class EpochDraws(Draws):
    """Batches that are made of a whole epoch at once: `start` counts them."""

    def after(self, num_steps: int) -> int:
        return self.start + num_steps

    def whole_batches(self) -> Iterator[list[Draw]]:
        epoch, batches = 0, self.batches(0)
        before = 0  # batches of earlier epochs
        for number in range(self.start, self.start + self.num_steps):
            while number - before >= len(batches):
                before += len(batches)
                epoch += 1
                batches = self.batches(epoch)
            yield [(epoch, index) for index in batches[number - before]]

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, in the order in which they are drawn."""
        raise NotImplementedError(type(self).__name__)


class AspectDraws(EpochDraws):
    """Batches of equally many images of about the same height / width, so that little of a batch is padding.

    In each epoch every image is drawn once, and the batches come in a new order. What is left over of each group makes batches with
    what is left over of its neighbours, the last of which is filled up with images that come a second time.

    Args:
        aspect_ratios: height / width of each image.
        num_groups: an octave of them.
        batch_size, num_steps, start, ...: as in CountedDraws; `start` counts batches.

    Raises:
        ValueError: the data are fewer than one batch, or a batch cannot be shared out evenly.
    """

    def __init__(
        self,
        aspect_ratios: Sequence[float] | np.ndarray,
        num_groups: int,
        batch_size: int,
        num_steps: int,
        seed: int,
        start: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
        accumulate: int = 1,
    ):
        check_batch_size(len(aspect_ratios), batch_size, num_processes, accumulate)
        super().__init__(
            len(aspect_ratios), batch_size, num_steps, seed, start, process_index, num_processes, accumulate
        )
        octaves = np.log2(np.asarray(aspect_ratios, dtype=np.float64))
        # two octaves, as torchvision's reference has it: beyond them images are rare
        self.groups = np.floor(np.clip(octaves, -1, 1 - 1e-9) * num_groups).astype(np.int64)

    def batches(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(self.num_examples)
        whole, left = [], []
        for group in np.unique(self.groups):
            members = order[self.groups[order] == group]
            num_whole = len(members) // self.batch_size * self.batch_size
            whole.append(members[:num_whole])
            left.append(members[num_whole:])
        rest = np.concatenate(left)
        last = rest[len(rest) // self.batch_size * self.batch_size :]
        again = order[~np.isin(order, last)][: -len(rest) % self.batch_size]
        batches = np.concatenate((*whole, rest, again)).reshape(-1, self.batch_size).tolist()
        return [batches[number] for number in rng.permutation(len(batches))]


class TimedDraws(EpochDraws):
    """Batches of recordings that are about equally long, each as many as last `batch_seconds` with their padding.

    In each epoch every recording is drawn once, and the batches come in a new order. A batch is dealt out one by one, so that a
    step is the same for any number of processes and parts; where the last recordings of an epoch are too few to be dealt out, some
    come twice.

    Args:
        durations: of the recordings, in seconds. Where their speed is drawn, a batch may last longer by that much.
        batch_seconds: of a step, all processes and parts together.
        batch_size: recordings in a batch at most, however short.
        num_steps: how many steps there are to come.
        start: how many batches have been drawn before.

    Raises:
        ValueError: there is no recording, or a batch has not room for the longest one in each part.
    """

    def __init__(
        self,
        durations: Sequence[float],
        batch_seconds: float,
        batch_size: int,
        num_steps: int,
        seed: int,
        start: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
        accumulate: int = 1,
    ):
        super().__init__(len(durations), batch_size, num_steps, seed, start, process_index, num_processes, accumulate)
        if not self.num_examples:
            raise ValueError("trainer.batch_seconds: there is no recording to draw from")
        longest = max(durations)
        if longest * self.num_parts > batch_seconds:
            parts = f", in each of {self.num_parts} parts" if self.num_parts > 1 else ""
            raise ValueError(
                f"trainer.batch_seconds = {batch_seconds}: has no room for the longest recording, which lasts {longest:.2f} "
                f"seconds{parts}; data.max_duration leaves such out"
            )
        if batch_size < self.num_parts:
            raise ValueError(
                f"trainer.batch_size = {batch_size}: must be at least {self.num_parts}, the parts of a batch with "
                f"trainer.batch_seconds"
            )
        self.durations = np.asarray(durations, dtype=np.float64)
        self.batch_seconds = batch_seconds

    def batches(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, epoch))
        # a little disorder, so that other recordings meet in each epoch; the longest first, so that a short rest is a cheap one
        order = np.argsort(-self.durations * rng.uniform(0.9, 1.1, self.num_examples), kind="stable")
        batches: list[list[int]] = [[]]
        longest = 0.0
        for index in order.tolist():
            duration = max(longest, self.durations[index])
            full = duration * (len(batches[-1]) + 1) > self.batch_seconds or len(batches[-1]) == self.batch_size
            if batches[-1] and full:
                batches.append([])
                duration = self.durations[index]
            batches[-1].append(index)
            longest = duration
        for batch in batches:
            for index in order[::-1].tolist():  # the shortest ones, which have room wherever there is any
                if len(batch) >= self.num_parts:
                    break
                batch.append(index)
        return [batches[number] for number in rng.permutation(len(batches))]


class Drawn(Dataset[tuple[Any, list[DamagedExample]]]):
    """A data set read by (epoch, index), with random numbers of its own for each: augmentation repeats exactly, and
    differs between epochs, examples and seeds. The random states outside are left as they were.

    In place of an example that cannot be read comes the next one that can, or None if too many cannot; what was passed over is
    handed on beside it.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, max_damaged: int = 0):
        self.dataset, self.seed, self.max_damaged = dataset, seed, max_damaged

    def __getitem__(self, draw: Draw) -> tuple[Any, list[DamagedExample]]:
        epoch, index = draw
        num_examples = len(self.dataset)  # type: ignore[arg-type]
        damaged: list[DamagedExample] = []
        outside = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (that of others)
        try:
            while True:
                seed_everything(self.seed, epoch, index)
                try:
                    return self.dataset[index], damaged
                except DamagedExample as error:
                    damaged.append(error)
                    if len(damaged) > self.max_damaged or len(damaged) == num_examples:
                        return None, damaged
                    index = (index + 1) % num_examples
        finally:
            torch.set_rng_state(outside[0])
            random.setstate(outside[1])
            np.random.set_state(outside[2])  # noqa: NPY002


def seed_everything(*seeds: int, every_device: bool = False) -> None:
    """Random numbers of torch, numpy and Python that follow from these numbers alone."""
    first, second = np.random.SeedSequence(seeds).generate_state(2, np.uint64).tolist()
    if every_device:
        torch.manual_seed(first)
    else:  # walking through every device takes too long for each image
        torch.default_generator.manual_seed(first)
    random.seed(second)
    np.random.seed(second % 2**32)  # noqa: NPY002 (timm draws from it)


class TrainingBatches:
    """An iterator whose one pass is the whole training run. Close it: its workers end with it.

    Raises (while iterating):
        TooManyDamaged: more than `max_damaged` different examples could not be read by this process, since it was started. Up to
            there each is named in a warning.
    """

    def __init__(self, dataset: Dataset[Any], draws: Draws, num_workers: int, pin_memory: bool, max_damaged: int = 0):
        self.loader = DataLoader(
            Drawn(dataset, draws.seed, max_damaged),
            batch_sampler=draws,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=partial(collate_drawn, collate_of(dataset)),
            worker_init_fn=partial(live_with_the_trainer, os.getpid()),
        )
        self.max_damaged, self.damaged = max_damaged, dict[str, DamagedExample]()
        self.reading = reading(self.loader)

    def __enter__(self) -> "TrainingBatches":
        self.batches = self.reading.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.reading.__exit__(*error)

    def __next__(self) -> Any:
        batch, damaged = next(self.batches)
        for error in damaged:
            if error.name not in self.damaged:
                self.damaged[error.name] = error
                warnings.warn(f"{error}; passed over, {len(self.damaged)} of {self.max_damaged} allowed", stacklevel=2)
        if batch is None or len(self.damaged) > self.max_damaged:
            raise too_many(list(self.damaged.values()), self.max_damaged)
        return batch


@contextmanager
def reading(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """The batches of a loader, whose workers end with the block, and not when the last error that holds them is forgotten."""
    others = multiprocessing.active_children()
    batches = iter(loader)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    try:
        yield batches
    finally:
        if workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]
        for worker in workers:
            worker.kill()  # they do not hear SIGTERM, and one may hang in a read


def too_many(damaged: list[DamagedExample], allowed: int) -> TooManyDamaged:
    names = ", ".join(error.name for error in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
    return TooManyDamaged(
        f"{len(damaged)} damaged examples, data.max_damaged = {allowed} are allowed: {names} "
        f"(the last: {damaged[-1].reason})"
    )


def collate_of(dataset: Dataset[Any]) -> Collate:
    """How examples become a batch: a data set whose examples are of different sizes has a method for it."""
    return getattr(dataset, "collate", default_collate)


def collate_drawn(
    collate: Collate, examples: list[tuple[Any, list[DamagedExample]]]
) -> tuple[Any, list[DamagedExample]]:
    damaged = [error for _, errors in examples for error in errors]
    if any(example is None for example, _ in examples):
        return None, damaged
    return collate([example for example, _ in examples]), damaged


def live_with_the_trainer(trainer: int, _: int) -> None:
    """What a data worker does first. It ends with the trainer, and not before it: where a whole process group is asked to end, the
    trainer still wants its batch, saves, and then ends its workers itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:  # torch looks for the trainer too, but takes whoever is the parent after this for it
        os._exit(1)


class Readable(Dataset[tuple[int, Any]]):
    """A data set read by index, in which what cannot be read is told instead of raised."""

    def __init__(self, dataset: Dataset[Any]):
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.dataset[index]
        except DamagedExample as error:
            return index, error


def collate_readable(collate: Collate, examples: list[tuple[int, Any]]) -> tuple[list[int], Any, list[DamagedExample]]:
    good = [(index, example) for index, example in examples if not isinstance(example, DamagedExample)]
    damaged = [example for _, example in examples if isinstance(example, DamagedExample)]
    batch = collate([example for _, example in good]) if good else None
    return [index for index, _ in good], batch, damaged


def evaluation_batches(
    dataset: Dataset[Any],
    batch_size: int,
    num_workers: int,
    process_index: int = 0,
    num_processes: int = 1,
    max_damaged: int = 0,
) -> Iterator[tuple[list[int], Any]]:
    """(indices, batch) over this process's share of the data, each example once, the last batch short.

    All processes get equally many batches, since a model that is shared out works only if all take part: where one has no
    example left, it gets one that is not its own, and no index for it.

    Raises (while iterating):
        TooManyDamaged: more than `max_damaged` examples could not be read. Up to there each is named in a warning, and left out.
    """
    num_examples = len(dataset)  # type: ignore[arg-type]
    share = range(process_index, num_examples, num_processes)
    largest_share = math.ceil(num_examples / num_processes)
    num_batches = math.ceil(largest_share / batch_size)
    batches = [list(share[number * batch_size : (number + 1) * batch_size]) for number in range(num_batches)]
    loader = DataLoader(
        Readable(dataset),
        batch_sampler=[batch or [0] for batch in batches],
        num_workers=num_workers,
        collate_fn=partial(collate_readable, collate_of(dataset)),
        worker_init_fn=partial(live_with_the_trainer, os.getpid()),
    )
    damaged: list[DamagedExample] = []
    filler: Any = None
    with reading(loader) as read:
        for wanted, (indices, batch, errors) in zip(batches, read, strict=True):
            for error in errors:
                damaged.append(error)
                if len(damaged) > max_damaged:
                    raise too_many(damaged, max_damaged) from error
                warnings.warn(f"{error}; left out of the test, {len(damaged)} of {max_damaged} allowed", stacklevel=2)
            if batch is None and num_processes == 1:
                continue
            filler = batch if batch is not None else filler or first_readable(dataset)
            yield (indices if wanted and batch is not None else []), filler


def first_readable(dataset: Dataset[Any]) -> Any:
    """A batch of one.

    Raises:
        DamagedExample: there is none.
    """
    num_examples = len(dataset)  # type: ignore[arg-type]
    for index in range(num_examples):
        try:
            return collate_of(dataset)([dataset[index]])
        except DamagedExample:
            if index == num_examples - 1:
                raise
    raise IndexError("the data are empty")
