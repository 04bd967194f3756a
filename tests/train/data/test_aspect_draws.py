"""Batches of images of about the same height / width."""

from typing import Any

import numpy as np
import pytest

from train.data.stream import AspectDraws

RATIOS = [0.5, 1.4, 0.75, 1.0, 1.35, 0.52, 0.74, 1.1, 1.3, 3.0, 0.1, 1.05, 0.76]


def batches(num_steps: int, seed: int = 3, num_groups: int = 3, batch_size: int = 2, **options: Any) -> list[Any]:
    return list(AspectDraws(RATIOS, num_groups, batch_size, num_steps, seed, **options))


def test_a_batch_has_images_of_one_group_but_for_what_is_left_over() -> None:
    """Seven groups of 13 images: three whole batches of two, and four of neighbours with one image that comes twice."""
    apart = 0
    for batch in batches(70):
        octaves = np.log2([RATIOS[index] for _, index in batch])
        apart += np.ptp(np.clip(octaves, -1, 1)) > 1 / 3 + 1e-9
        assert len({index for _, index in batch}) == 2
    assert apart <= 70 * 4 / 7


def test_every_epoch_holds_every_image() -> None:
    by_epoch: dict[int, list[int]] = {}
    for batch in batches(30):
        for epoch, index in batch:
            by_epoch.setdefault(epoch, []).append(index)
    assert len(by_epoch) > 2
    for epoch in list(by_epoch)[:-1]:
        assert set(by_epoch[epoch]) == set(range(len(RATIOS)))
        assert len(by_epoch[epoch]) % 2 == 0
    assert by_epoch[0] != by_epoch[1]


def test_a_group_smaller_than_a_batch_is_not_repeated_to_fill_it() -> None:
    found = [batch for batch in batches(40, batch_size=4) if any(index == 10 for _, index in batch)]
    assert len(found) >= 9
    for batch in found:  # the flattest image with others, and not four times the same
        assert len({index for _, index in batch}) == 4


def test_all_images_alike_are_drawn_as_they_come() -> None:
    draws = list(AspectDraws([1.0] * 10, 3, 4, 3, seed=0))
    drawn = [index for batch in draws for _, index in batch]
    assert set(drawn) == set(range(10))
    assert all(len({index for _, index in batch}) == 4 for batch in draws)


def test_it_goes_on_where_it_was_and_repeats_by_seed() -> None:
    whole = batches(20)
    draws = AspectDraws(RATIOS, 3, 2, 5, seed=3)
    assert draws.after(5) == 5
    assert [*draws, *batches(15, start=5)] == whole
    assert batches(20, seed=4) != whole


def test_processes_and_parts_share_each_batch() -> None:
    whole = batches(6, batch_size=4)
    shares = [batches(6, batch_size=4, process_index=index, num_processes=2, accumulate=2) for index in range(2)]
    for number, batch in enumerate(whole):
        parts = [share[2 * number + part] for share in shares for part in range(2)]
        assert sorted(draw for part in parts for draw in part) == sorted(batch)
        assert all(len(part) == 1 for part in parts)


def test_one_group_an_octave_is_portrait_or_landscape() -> None:
    mixed = [len({RATIOS[index] >= 1 for _, index in batch}) == 2 for batch in batches(70, num_groups=1)]
    assert sum(mixed) <= 10  # one batch of what is left over in each of ten epochs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 14}, "trainer.batch_size = 14: must be at most 13, the training examples there are"),
        (
            {"batch_size": 3, "num_processes": 2},
            "trainer.batch_size = 3: must be a multiple of 2, the processes there are",
        ),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(1, **options)
