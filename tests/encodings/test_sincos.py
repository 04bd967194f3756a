"""Sines and cosines against the formula channel by channel and timm's function."""

import math

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed

from relpos2d import Grid, Points, create_encoding
from tests.oracles import grid_places
from tests.tolerances import assert_close


@pytest.mark.parametrize(
    "grid",
    [Grid(7), Grid(4, 6), Grid(5, 3, num_prefix_tokens=2), Grid(2, 3, 2), Grid(4, 3, step=(0.5, 2), origin=(-3, 0.3))],
)
def test_formula_channel_by_channel(grid: Grid) -> None:
    encoding = create_encoding("sincos", 3, 4, grid, theta=50.0, dtype=torch.float64)
    x = torch.randn(2, grid.num_tokens, 12, dtype=torch.float64)
    num_bands = 12 // (2 * grid.num_axes)
    places = grid_places(grid.shape, [float(s) for s in grid.step], [float(o) for o in grid.origin])
    expected = [[0.0] * 12] * grid.num_prefix_tokens
    for place in places:
        angles = [p * 50.0 ** (-j / num_bands) for p in place for j in range(num_bands)]
        expected.append([*map(math.sin, angles), *map(math.cos, angles)])
    assert_close(encoding.embed(x, grid), x + torch.tensor(expected, dtype=torch.float64))
    encoding.set_strength(0.25)
    assert_close(encoding.embed(x, grid), x + 0.25 * torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (7, 7)])
def test_timm_sincos2d(shape: tuple[int, int]) -> None:
    expected = build_sincos2d_pos_embed(list(shape), dim=24)
    encoding = create_encoding("sincos", 3, 8, Grid(*shape))
    x = torch.zeros(1, math.prod(shape), 24)
    assert_close(encoding.embed(x, Grid(*shape))[0], expected)


def test_points_of_each_sample() -> None:
    encoding = create_encoding("sincos", 2, 4, Grid(4, 6, num_prefix_tokens=1))
    points = Points(torch.tensor([[[1.0, 2.0]], [[0.5, -3.0]]]), num_prefix_tokens=1)
    out = encoding.embed(torch.zeros(2, 2, 8), points)
    assert out[:, 0].abs().max() == 0
    for b in range(2):
        y, x = points.places[b, 0].tolist()
        angles = [y, y / 100, x, x / 100]
        assert_close(out[b, 1], torch.tensor([*map(math.sin, angles), *map(math.cos, angles)]))


def test_has_no_parameters_and_keeps_the_dtype() -> None:
    encoding = create_encoding("sincos", 2, 4, Grid(4, 6))
    assert list(encoding.parameters()) == []
    assert encoding.theta == 10000.0
    x = torch.zeros(1, 24, 8, dtype=torch.bfloat16)
    assert encoding.embed(x, Grid(4, 6)).dtype == torch.bfloat16


def test_d2_places_beyond_256_stay_apart_in_half_precision() -> None:
    encoding = create_encoding("sincos", 1, 8, Grid(300)).to(torch.bfloat16)
    out = encoding.embed(torch.zeros(1, 300, 8, dtype=torch.bfloat16), Grid(300))[0]
    assert (out[256] - out[257]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("head_dim", "grid", "options", "text"),
    [
        (5, Grid(4, 6), {}, r"SinCos: 10 channels \(num_heads \* head_dim\) must be a multiple of 4"),
        (4, Grid(2, 3, 4), {}, "SinCos: 8 channels .* must be a multiple of 6"),
        (4, Grid(4, 6), {"theta": 0.0}, "SinCos: theta=0.0 must be positive"),
        (4, Grid(4, 6), {"theta": math.nan}, "SinCos: theta=nan must be positive"),
        (4, Grid(4, 6), {"theta": math.inf}, "SinCos: theta=inf must be positive and finite"),
    ],
)
def test_refuses(head_dim: int, grid: Grid, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create_encoding("sincos", 2, head_dim, grid, **options)


@pytest.mark.parametrize("shape", [(1, 24, 4), (1, 23, 8), (1, 25, 8)])
def test_refuses_tokens_that_do_not_fit(shape: tuple[int, ...]) -> None:
    encoding = create_encoding("sincos", 2, 4, Grid(4, 6))
    text = rf"SinCos: x has {shape[1]} tokens of {shape[2]} channels, .* allow 24 tokens of 8 channels"
    with pytest.raises(ValueError, match=text):
        encoding.embed(torch.zeros(shape), Grid(4, 6))
