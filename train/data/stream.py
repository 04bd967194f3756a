"""Which example is drawn at which step: a function of the seed alone, whatever the number of workers and processes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class DamagedExample(ValueError):
    """One example that cannot be read; training goes on with another in its place, up to a limit."""

    def __init__(self, name: str, reason: object):
        super().__init__(f"{name}: no readable image ({reason})")
        self.name, self.reason = name, str(reason)

    def __reduce__(self) -> tuple[Any, ...]:  # comes back whole from a data worker
        return type(self), (self.name, self.reason)


class Draws(Sampler[list[tuple[int, int]]]):
    """The batches of a run as lists of (epoch, index): each epoch is a new order, a batch may reach over two epochs.

    So every batch is full and no example is dropped. Each process takes its share of the batch.

    Raises:
        ValueError: the data are fewer than one batch, or a batch cannot be shared out evenly.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        num_steps: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ):
        if num_examples < batch_size:
            raise ValueError(
                f"trainer.batch_size = {batch_size}: must be at most {num_examples}, the training examples there are"
            )
        if batch_size % num_processes:
            raise ValueError(
                f"trainer.batch_size = {batch_size}: must be a multiple of {num_processes}, the processes there are"
            )
        self.num_examples, self.batch_size, self.num_steps, self.seed = num_examples, batch_size, num_steps, seed
        self.start_step, self.process_index, self.num_processes = start_step, process_index, num_processes

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, order_epoch = np.arange(0), -1
        for step in range(self.start_step, self.num_steps):
            batch = []
            for draw in range(step * self.batch_size, (step + 1) * self.batch_size):
                epoch, position = divmod(draw, self.num_examples)
                if epoch != order_epoch:
                    order, order_epoch = np.random.default_rng((self.seed, epoch)).permutation(self.num_examples), epoch
                batch.append((epoch, int(order[position])))
            yield batch[self.process_index :: self.num_processes]


class Drawn(Dataset[Any]):
    """A data set read by (epoch, index), with random numbers of its own for each: augmentation repeats exactly, and
    differs between epochs, examples and seeds. The random state outside is left as it was."""

    def __init__(self, dataset: Dataset[Any], seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, draw: tuple[int, int]) -> Any:
        epoch, index = draw
        seed = np.random.SeedSequence((self.seed, epoch, index)).generate_state(1, np.uint64)[0]
        outside = torch.get_rng_state()
        # not torch.manual_seed, which walks through every device, for each image
        torch.default_generator.manual_seed(int(seed))
        try:
            return self.dataset[index]
        finally:
            torch.set_rng_state(outside)


def training_batches(dataset: Dataset[Any], draws: Draws, num_workers: int, pin_memory: bool) -> DataLoader[Any]:
    """One pass over this loader is the whole training run."""
    return DataLoader(Drawn(dataset, draws.seed), batch_sampler=draws, num_workers=num_workers, pin_memory=pin_memory)


def evaluation_batches(
    dataset: Dataset[Any], batch_size: int, num_workers: int, process_index: int = 0, num_processes: int = 1
) -> Iterator[tuple[list[int], Any]]:
    """(indices, batch) over this process's share of the data, each example once, the last batch short."""
    indices = range(process_index, len(dataset), num_processes)  # type: ignore[arg-type]
    batches = [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
    return zip(batches, loader, strict=True)
