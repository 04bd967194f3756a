"""Which example is drawn when, and with which random numbers."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from train.data.stream import Drawn, Draws, evaluation_batches, training_batches


class Noise(Dataset[torch.Tensor]):
    """The index and a random number."""

    def __init__(self, length: int = 10):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def drawn(seed: int = 0, num_workers: int = 0, num_steps: int = 6, **options: Any) -> list[torch.Tensor]:
    return list(training_batches(Noise(), Draws(10, 4, num_steps, seed, **options), num_workers, pin_memory=False))


def test_every_epoch_holds_every_example_once_in_another_order() -> None:
    indices = torch.cat(drawn(num_steps=5))[:, 0].tolist()
    assert sorted(indices[:10]) == sorted(indices[10:]) == list(range(10))
    assert indices[:10] != indices[10:]


def test_j6_draws_differ_between_epochs_and_do_not_depend_on_workers() -> None:
    alone, again, other = drawn(), drawn(), drawn(seed=1)
    with_workers = drawn(num_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone, with_workers, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    numbers = torch.cat(alone)[:, 1].tolist()
    assert len(set(numbers)) == len(numbers)  # nothing repeated between examples and epochs


def test_drawing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Drawn(Noise(), seed=0)[(0, 3)]
    assert torch.equal(torch.rand(3), expected)


def test_a_later_start_and_more_processes_draw_the_same() -> None:
    whole = drawn()
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], drawn(start_step=2), strict=True))
    shares = [drawn(process_index=index, num_processes=2) for index in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert torch.equal(batch[0::2], first)
        assert torch.equal(batch[1::2], second)


def test_m7_data_smaller_than_a_batch_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"trainer.batch_size = 64: must be at most 50, the training examples there are"
    ):
        Draws(50, 64, 10, seed=0)
    assert len(list(Draws(64, 64, 10, seed=0))) == 10


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.batch_size = 9: must be a multiple of 2"):
        Draws(50, 9, 10, seed=0, num_processes=2)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 11])
def test_testing_reads_each_example_once(num_processes: int) -> None:
    seen = []
    for process in range(num_processes):
        for indices, batch in evaluation_batches(Noise(), 4, 0, process, num_processes):
            assert batch[:, 0].tolist() == indices
            assert len(indices) <= 4
            seen += indices
    assert sorted(seen) == list(range(10))
