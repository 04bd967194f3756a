"""The cache: what it gives back, how it grows, and how rows change places."""

import torch

from relpos2d.models import Cache
from tests.refusals import refuses


def filled(*lengths: int, batch_size: int = 2) -> tuple[Cache, torch.Tensor]:
    """A cache with two layers that was given pieces of these lengths, and all keys of the second layer."""
    cache, pieces = Cache(), []
    for length in lengths:
        for layer in range(2):
            piece = torch.randn(batch_size, 3, length, 4)
            cache.append(layer, piece, -piece)
        pieces.append(piece)
        cache.advance(length, None)
    return cache, torch.cat(pieces, dim=2)


def test_gives_back_all_that_it_was_given() -> None:
    cache, expected = filled(3, 1, 1, 4, 1)
    new = torch.randn(2, 3, 2, 4)
    keys, values = cache.append(1, new, -new)
    expected = torch.cat((expected, new), dim=2)
    assert torch.equal(keys, expected)
    assert torch.equal(values, -expected)
    assert (cache.length, cache.batch_size) == (10, 2)


def test_what_is_not_counted_as_read_is_written_over() -> None:
    cache, expected = filled(3)
    cache.append(0, torch.ones(2, 3, 5, 4), torch.ones(2, 3, 5, 4))
    new = torch.randn(2, 3, 1, 4)
    cache.append(0, new, new)
    keys, _ = cache.append(1, new, new)
    assert torch.equal(keys, torch.cat((expected, new), dim=2))


def test_grows_by_doubling() -> None:
    cache, places = Cache(), set()
    for _ in range(65):
        keys, _ = cache.append(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        places.add(keys.untyped_storage().nbytes())
        cache.advance(1, None)
    assert places == {2**n * 8 for n in range(8)}


def test_reorder_moves_keys_values_and_mask() -> None:
    cache, expected = filled(3, 1)
    cache.mask = torch.tensor([[True, True, True, True], [False, True, True, True]])
    rows = torch.tensor([1, 1, 0])
    cache.reorder(rows)
    assert cache.batch_size == 3
    assert cache.mask.tolist() == [[False, True, True, True]] * 2 + [[True] * 4]
    new = torch.randn(3, 3, 1, 4)
    keys, values = cache.append(1, new, -new)
    assert torch.equal(keys, torch.cat((expected[rows], new), dim=2))
    assert torch.equal(values, -keys)


def test_source_is_made_once_and_moves_unless_it_is_the_same() -> None:
    cache, calls = Cache(), []

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return torch.arange(2.0), -torch.arange(2.0)

    cache.source(0, make)
    assert cache.source(0, make)[0].tolist() == [0.0, 1.0]
    assert len(calls) == 1
    cache.reorder(torch.tensor([1, 0]), same_source=True)
    assert cache.source(0, make)[0].tolist() == [0.0, 1.0]
    cache.reorder(torch.tensor([1, 0, 0]))
    assert [x.tolist() for x in cache.source(0, make)] == [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]


def test_refuses_gradients() -> None:
    keys = torch.randn(1, 1, 2, 4, requires_grad=True)
    with refuses("Cache: is for decoding and keeps no gradients"):
        Cache().append(0, keys, keys.detach())
