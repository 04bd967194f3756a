"""Which example is drawn when, and with which random numbers."""

import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.train.forks import in_a_fork
from train.data import stream
from train.data.stream import (
    CountedDraws,
    DamagedExample,
    Drawn,
    TimedDraws,
    TooManyDamaged,
    TrainingBatches,
    evaluation_batches,
    seed_everything,
)


class Noise(Dataset[torch.Tensor]):
    """The index and a random number of each generator; some cannot be read."""

    def __init__(self, length: int = 10, damaged: tuple[int, ...] = ()):
        self.length, self.damaged = length, damaged

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.damaged:
            raise DamagedExample(f"{index}.jpg", "truncated")
        numbers = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor([float(index), *numbers])


def drawn(
    seed: int = 0,
    num_workers: int = 0,
    num_steps: int = 6,
    damaged: tuple[int, ...] = (),
    max_damaged: int = 0,
    **options: Any,
) -> list[torch.Tensor]:
    draws = CountedDraws(10, 4, num_steps, seed, **options)
    with TrainingBatches(
        Noise(damaged=damaged), draws, num_workers, pin_memory=False, max_damaged=max_damaged
    ) as batches:
        return [next(batches) for _ in range(len(draws))]


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
    for numbers in torch.cat(alone)[:, 1:].T.tolist():
        assert len(set(numbers)) == len(numbers)  # nothing repeated between examples and epochs


def test_drawing_leaves_the_random_state_alone() -> None:
    def numbers() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002

    seed_everything(5)
    expected = numbers()
    seed_everything(5)
    Drawn(Noise(), seed=0)[(0, 3)]
    assert numbers() == expected
    assert Drawn(Noise(damaged=(3,)), seed=0)[(0, 3)][0] is None
    seed_everything(5)
    assert numbers() == expected


def test_a_later_start_and_more_processes_draw_the_same() -> None:
    whole = drawn()
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], drawn(start=8, num_steps=4), strict=True))
    shares = [drawn(process_index=index, num_processes=2) for index in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert torch.equal(batch[0::2], first)
        assert torch.equal(batch[1::2], second)


def test_a_batch_in_parts_holds_the_same_examples() -> None:
    whole = drawn()
    parts = [drawn(process_index=index, num_processes=2, accumulate=2) for index in range(2)]
    for number, batch in enumerate(whole):
        pieces = torch.cat([parts[process][2 * number + part] for process in range(2) for part in range(2)])
        assert torch.equal(pieces[pieces[:, 0].argsort()], batch[batch[:, 0].argsort()])


def test_another_batch_size_goes_on_at_the_same_example() -> None:
    """12 examples in steps of 4, then steps of 2: none is left out and none comes twice."""
    first = drawn(num_steps=3)
    draws = CountedDraws(10, 2, 4, 0, start=12)
    with TrainingBatches(Noise(), draws, 0, pin_memory=False) as batches:
        rest = [next(batches) for _ in range(4)]
    assert sorted(torch.cat([*first, *rest])[:, 0].tolist()) == sorted([*range(10), *range(10)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_example_is_named_once_and_another_comes(num_workers: int) -> None:
    with pytest.warns(UserWarning, match="passed over") as caught:
        batches = drawn(num_workers=num_workers, num_steps=5, damaged=(3, 4), max_damaged=2)
    assert sorted(str(warning.message) for warning in caught) == [
        f"{name}.jpg: no readable image (truncated); passed over, {count} of 2 allowed"
        for name, count in sorted(zip(order_of_damage(), (1, 2), strict=True))
    ]
    assert all(len(batch) == 4 for batch in batches)
    whole, indices = torch.cat(drawn(num_steps=5)), torch.cat(batches)[:, 0]
    expected = whole[:, 0].clone()
    expected[(expected == 3) | (expected == 4)] = 5  # the next that can be read
    assert torch.equal(indices, expected)


def order_of_damage() -> list[int]:
    order = torch.cat(drawn(num_steps=5))[:, 0].tolist()
    return [4, 3] if order.index(4) < order.index(3) else [3, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*passed over")
def test_too_many_damaged_examples_stop_with_their_names(num_workers: int) -> None:
    with pytest.raises(TooManyDamaged, match=r"2 damaged examples, data.max_damaged = 1 are allowed: .*truncated"):
        drawn(num_workers=num_workers, damaged=(2, 7), max_damaged=1)
    with pytest.raises(TooManyDamaged, match=r"10 damaged examples, .*: .*\.jpg, \.\.\. "):
        drawn(num_workers=num_workers, damaged=tuple(range(10)), max_damaged=20)


def test_a_damaged_example_comes_back_whole_from_a_worker() -> None:
    again = pickle.loads(pickle.dumps(DamagedExample("a.jpg", OSError("broken"))))
    assert (again.name, again.reason, str(again)) == ("a.jpg", "broken", "a.jpg: no readable image (broken)")


def test_m7_data_smaller_than_a_batch_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"trainer.batch_size = 64: must be at most 50, the training examples there are"
    ):
        CountedDraws(50, 64, 10, seed=0)
    assert len(list(CountedDraws(64, 64, 10, seed=0))) == 10


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.batch_size = 9: must be a multiple of 2"):
        CountedDraws(50, 9, 10, seed=0, num_processes=2)


DURATIONS = [0.5, 3.0, 1.2, 0.1, 2.9, 7.0, 1.1, 0.7, 4.5, 4.4, 0.2, 1.0, 6.5]


def timed(num_steps: int = 12, batch_seconds: float = 15.0, batch_size: int = 99, **options: Any) -> list[Any]:
    draws = TimedDraws(DURATIONS, batch_seconds, batch_size, num_steps, seed=3, **options)
    found = list(draws)
    assert len(found) == len(draws)
    return found


def test_batches_by_duration_hold_every_recording_once_an_epoch_and_keep_their_limits() -> None:
    batches = timed()
    epochs = sorted({epoch for batch in batches for epoch, _ in batch})
    assert len(epochs) >= 3
    orders = []
    for epoch in epochs[:-1]:
        drawn = [index for batch in batches for number, index in batch if number == epoch]
        assert sorted(drawn) == list(range(len(DURATIONS)))
        orders.append(drawn)
    assert orders[0] != orders[1]
    for batch in batches:
        assert max(DURATIONS[index] for _, index in batch) * len(batch) <= 15.0
    padding = sum(max(DURATIONS[i] for _, i in batch) * len(batch) for batch in batches)
    assert padding < 1.5 * sum(DURATIONS[i] for batch in batches for _, i in batch)  # like meets like
    assert max(len(batch) for batch in timed(batch_size=3)) == 3
    assert max(len(batch) for batch in batches) > 3


def test_batches_by_duration_go_on_where_they_stopped() -> None:
    whole = timed()
    draws = TimedDraws(DURATIONS, 15.0, 99, 5, seed=3)
    assert list(draws) == whole[:5]
    assert timed(num_steps=7, start=draws.after(5)) == whole[5:]
    assert timed(num_steps=12) == whole
    assert list(TimedDraws(DURATIONS, 15.0, 99, 12, seed=4)) != whole


def test_batches_by_duration_are_dealt_out_to_processes_and_parts() -> None:
    whole = timed()
    shares = [timed(process_index=index, num_processes=2) for index in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert first[: (len(batch) + 1) // 2] == batch[0::2]
        assert second[: len(batch) // 2] == batch[1::2]
        assert first  # also of a batch of one recording each gets some
        assert second
    parts = timed(accumulate=2)
    assert len(parts) == 2 * len(whole)
    assert [parts[0::2], parts[1::2]] == shares


def test_batches_by_duration_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"batch_seconds = 6.0: has no room for the longest recording, which lasts 7.00 s"
    ):
        timed(batch_seconds=6.0)
    with pytest.raises(ValueError, match=r"batch_seconds = 13.0: .* in each of 2 parts"):
        timed(batch_seconds=13.0, num_processes=2)
    with pytest.raises(ValueError, match=r"batch_size = 1: must be at least 2, the parts"):
        timed(batch_size=1, accumulate=2)
    with pytest.raises(ValueError, match="there is no recording"):
        TimedDraws([], 6.0, 4, 3, seed=0)


def test_m7_fewer_recordings_than_a_batch_are_one_short_batch() -> None:
    assert [len(batch) for batch in TimedDraws([1.0, 2.0], 60.0, 16, 3, seed=0)] == [2, 2, 2]


class Ragged(Noise):
    """As many numbers as the index, which only its own way makes a batch of."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), float(index))

    def collate(self, examples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(examples, batch_first=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_may_make_batches_in_its_own_way(num_workers: int) -> None:
    draws = TimedDraws([1.0] * 10, 3.0, 99, 4, seed=0)
    with TrainingBatches(Ragged(), draws, num_workers, pin_memory=False) as batches:
        found = [next(batches) for _ in range(4)]
    assert sorted(len(batch) for batch in found) == [1, 3, 3, 3]
    assert all(batch.shape[1] == int(batch.max()) + 1 for batch in found)
    shapes = [tuple(batch.shape) for _, batch in evaluation_batches(Ragged(), 4, num_workers)]
    assert shapes == [(4, 4), (4, 8), (2, 10)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 11])
def test_testing_reads_each_example_once(num_processes: int) -> None:
    seen = []
    for process in range(num_processes):
        for indices, batch in evaluation_batches(Noise(), 4, 0, process, num_processes):
            assert batch[:, 0].tolist() == indices or (indices == [] and len(batch) == 1)
            assert len(indices) <= 4
            seen += indices
    assert sorted(seen) == list(range(10))
    counts = {len(list(evaluation_batches(Noise(), 4, 0, process, num_processes))) for process in range(num_processes)}
    assert len(counts) == 1  # as many forward passes on each process


@pytest.mark.filterwarnings("ignore:.*left out of the test")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_whole_batch_may_be_damaged(num_processes: int) -> None:
    seen, counts = [], []
    for process in range(num_processes):
        batches = list(evaluation_batches(Noise(damaged=(0, 1)), 1, 0, process, num_processes, max_damaged=2))
        counts.append(len(batches))
        seen += [index for indices, batch in batches for index in indices if len(batch) == 1]
    assert sorted(seen) == list(range(2, 10))
    assert len(set(counts)) == 1


def test_damaged_test_examples_are_left_out_and_named() -> None:
    with pytest.warns(UserWarning, match=r"[05].jpg: .* left out of the test, [12] of 2 allowed"):
        batches = list(evaluation_batches(Noise(damaged=(0, 5)), 4, 0, max_damaged=2))
    assert [indices for indices, _ in batches] == [[1, 2, 3], [4, 6, 7], [8, 9]]
    with pytest.raises(TooManyDamaged, match=r"1 damaged examples, data.max_damaged = 0 are allowed: 5.jpg"):
        list(evaluation_batches(Noise(damaged=(5,)), 4, 0))


@pytest.mark.parametrize("at", ["the start of a worker", pytest.param("work", marks=pytest.mark.long)])
def test_workers_end_with_a_trainer_that_is_killed(at: str, tmp_path: Path) -> None:
    """Also where it dies before torch's own watch over it begins: such a worker would wait for ever."""
    begin = stream.live_with_the_trainer

    def late(trainer: int, number: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        while at == "the start of a worker" and os.getppid() == trainer:
            time.sleep(0.01)
        begin(trainer, number)

    def train() -> str:
        stream.live_with_the_trainer = late
        with TrainingBatches(Noise(), CountedDraws(10, 4, 99, 0), num_workers=2, pin_memory=False):
            while len(os.listdir(tmp_path)) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    assert in_a_fork(train) == (-signal.SIGKILL, "")  # and no worker is left
    assert len(list(tmp_path.iterdir())) == 2
