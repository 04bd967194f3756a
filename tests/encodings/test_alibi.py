"""ALiBi against its formula pair by pair, x-transformers and the slopes of the paper."""

import math

import pytest
import torch

from relpos2d import Grid, attend, create_encoding
from tests.oracles import difference, grid_places
from tests.public import AlibiPositionalBias
from tests.tolerances import assert_close

SLOPES = {
    1: [2.0**-8],
    3: [2.0**-4, 2.0**-8, 2.0**-2],
    6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
    8: [2.0**-i for i in range(1, 9)],
    12: [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5],
    16: [2.0 ** (-i / 2) for i in range(1, 17)],
}


@pytest.mark.parametrize("num_heads", sorted(SLOPES))
def test_f11_slopes(num_heads: int) -> None:
    slopes = create_encoding("alibi", num_heads, 4, Grid(7)).slopes
    assert_close(slopes, torch.tensor(SLOPES[num_heads]))
    assert len(slopes.unique()) == num_heads


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 7, 8, 12, 20])
def test_x_transformers(num_heads: int) -> None:
    ours = create_encoding("alibi", num_heads, 4, Grid(9))
    theirs = AlibiPositionalBias(num_heads)
    assert_close(ours.bias(Grid(9), Grid(9)), theirs(9, 9).reshape(num_heads, 9, 9))
    # the last queries of a longer sequence of keys, as in decoding
    assert_close(ours.bias(Grid(4, origin=5), Grid(9)), theirs(4, 9).reshape(num_heads, 4, 9))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (Grid(7), Grid(7)),
        (Grid(4, 3), Grid(4, 3)),
        (Grid(4, 6).pool(2), Grid(4, 6)),
        (Grid(5, origin=0.25), Grid(3, step=2)),
    ],
)
def test_formula_pair_by_pair(queries: Grid, keys: Grid) -> None:
    bias = create_encoding("alibi", 6, 4, queries, dtype=torch.float64).bias(queries, keys)
    q = grid_places(queries.shape, [float(s) for s in queries.step], [float(o) for o in queries.origin])
    k = grid_places(keys.shape, [float(s) for s in keys.step], [float(o) for o in keys.origin])
    for i, a in enumerate(q):
        for j, b in enumerate(k):
            distance = math.sqrt(sum(d * d for d in difference(a, b)))
            expected = torch.tensor([-slope * distance for slope in SLOPES[6]], dtype=torch.float64)
            assert_close(bias[:, i, j], expected)


def test_f12_a_row_of_keys_is_enough_under_a_causal_mask_only() -> None:
    grid, num_heads = Grid(7), 6
    encoding = create_encoding("alibi", num_heads, 4, grid)
    q, k, v = torch.randn(3, 2, num_heads, 7, 4)
    by_key = encoding.slopes[:, None, None] * torch.arange(7.0)
    none = create_encoding("none", num_heads, 4, grid)
    causal = attend(q, k, v, encoding, grid, is_causal=True)
    assert_close(attend(q, k, v, none, grid, mask=by_key, is_causal=True), causal)
    full = attend(q, k, v, encoding, grid)
    assert (attend(q, k, v, none, grid, mask=by_key) - full).abs().max() > 0.01
    distance = (torch.arange(7.0)[:, None] - torch.arange(7.0)).abs()
    assert_close(attend(q, k, v, none, grid, mask=-encoding.slopes[:, None, None] * distance), full)


def test_needs_one_or_two_axes() -> None:
    with pytest.raises(ValueError, match=r"Alibi: has no meaning on 3 axes \(Grid\(2, 3, 4\)\), allowed: 1 or 2"):
        create_encoding("alibi", 3, 4, Grid(2, 3, 4))


def test_has_nothing_to_learn_but_the_prefix() -> None:
    assert list(create_encoding("alibi", 3, 4, Grid(5, 3)).parameters()) == []
    encoding = create_encoding("alibi", 3, 4, Grid(5, 3, num_prefix_tokens=1))
    assert [name for name, _ in encoding.named_parameters()] == ["prefix_bias"]


def test_gradient_of_places_is_finite_at_distance_zero() -> None:
    offsets = torch.zeros(3, 2, requires_grad=True)
    create_encoding("alibi", 3, 4, Grid(5, 3)).at(offsets).sum().backward()
    assert offsets.grad.abs().max() == 0
