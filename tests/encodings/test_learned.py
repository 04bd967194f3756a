"""The learned vector of a place against plain look-up and timm's resampling."""

import math

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from relpos2d import Grid, Points, create_encoding
from relpos2d.encodings.learned import Learned
from tests.oracles import gradients, multilinear, redraw
from tests.tolerances import assert_close


def learned(*shape: int, num_prefix_tokens: int = 0, dtype=torch.float64, **options) -> Learned:
    encoding = Learned(2, 3, Grid(*shape, num_prefix_tokens=num_prefix_tokens), dtype=dtype, **options)
    redraw(encoding)
    return encoding


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
@pytest.mark.parametrize("shape", [(7,), (4, 6), (2, 3, 5)])
def test_adds_the_vector_of_each_token(shape: tuple[int, ...], num_prefix_tokens: int) -> None:
    encoding = learned(*shape, num_prefix_tokens=num_prefix_tokens)
    x = torch.randn(2, encoding.positions.num_tokens, 6, dtype=torch.float64)
    assert_close(encoding.embed(x, encoding.positions), x + encoding.pos_embed)
    encoding.set_strength(0.5)
    assert_close(encoding.embed(x, encoding.positions), x + 0.5 * encoding.pos_embed)


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
@pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((4, 6), (7, 5)), ((5, 3), (2, 3)), ((14, 14), (3, 20))])
def test_resized_as_timm(old: tuple[int, int], new: tuple[int, int], num_prefix_tokens: int) -> None:
    encoding = learned(*old, num_prefix_tokens=num_prefix_tokens, dtype=torch.float32)
    expected = resample_abs_pos_embed(encoding.pos_embed, list(new), list(old), num_prefix_tokens)
    encoding.set_window_size(new)
    grid = Grid(*new, num_prefix_tokens=num_prefix_tokens)
    x = torch.randn(2, grid.num_tokens, 6)
    assert_close(encoding.embed(x, grid), x + expected)


def test_b5_there_and_back_is_bit_for_bit_the_original() -> None:
    encoding = learned(4, 6, num_prefix_tokens=1, dtype=torch.float32)
    grid, x = Grid(4, 6, num_prefix_tokens=1), torch.zeros(1, 25, 6)
    before = encoding.embed(x, grid)
    encoding.set_window_size((9, 5))
    assert not torch.equal(encoding.embed(x, grid), before)
    encoding.set_window_size((4, 6))
    assert torch.equal(encoding.embed(x, grid), before)
    assert torch.equal(before, encoding.pos_embed)


@pytest.mark.parametrize("sizes", [range(1, 20), (61, 115, 122)])
def test_b6_every_size_gives_exactly_its_grid(sizes) -> None:
    encoding = learned(14, 3)
    for size in sizes:
        encoding.set_window_size((size, 2))
        assert encoding.embed(torch.zeros(1, 2 * size, 6), Grid(size, 2)).shape == (1, 2 * size, 6)


def test_real_places_are_read_bilinearly_and_clamped() -> None:
    encoding = learned(3, 4, num_prefix_tokens=1)
    vectors = encoding.pos_embed[0, 1:]
    places = [(0.0, 0.0), (2.0, 3.0), (0.3, 1.7), (-4.0, 1.5), (9.0, 9.0)]
    points = Points(torch.tensor([places], dtype=torch.float64), num_prefix_tokens=1)
    out = encoding.embed(torch.zeros(1, 6, 6, dtype=torch.float64), points)
    expected = [encoding.pos_embed[0, 0]]
    for y, x in places:
        inside = (min(max(y, 0.0), 2.0), min(max(x, 0.0), 3.0))
        expected.append(multilinear(lambda place: vectors[place[0] * 4 + place[1]], inside))
    assert_close(out[0], torch.stack(expected))
    parameter = [encoding.pos_embed]
    assert_close(gradients(out[0], parameter)[0], gradients(torch.stack(expected), parameter)[0])


def test_part_of_a_grid_has_its_own_vectors() -> None:
    encoding = learned(4, 6)
    whole = encoding.pos_embed[0].unflatten(0, (4, 6))
    out = encoding.embed(torch.zeros(1, 6, 6, dtype=torch.float64), Grid(2, 3, origin=(1, 2)))
    assert_close(out[0], whole[1:3, 2:5].flatten(0, 1))
    stepped = encoding.embed(torch.zeros(1, 24, 6, dtype=torch.float64), Grid(4, 6, step=0.5))
    assert_close(stepped[0, 2], whole[0, 1])
    shifted = encoding.embed(torch.zeros(1, 24, 6, dtype=torch.float64), Grid(4, 6, origin=(1, 0)))
    assert_close(shifted[0, 0], whole[1, 0])


def test_points_equal_the_grid() -> None:
    encoding = learned(4, 6, num_prefix_tokens=2)
    grid, x = Grid(4, 6, num_prefix_tokens=2), torch.randn(3, 26, 6, dtype=torch.float64)
    assert_close(encoding.embed(x, grid.points(3)), encoding.embed(x, grid))


def test_prefix_tokens_that_are_not_there() -> None:
    encoding = learned(4, 6, num_prefix_tokens=2)
    x = torch.zeros(1, 24, 6, dtype=torch.float64)
    assert_close(encoding.embed(x, Grid(4, 6)), encoding.pos_embed[:, 2:])
    bare = learned(4, 6)
    out = bare.embed(torch.zeros(1, 26, 6, dtype=torch.float64), Grid(4, 6, num_prefix_tokens=2))
    assert out[:, :2].abs().max() == 0
    assert_close(out[:, 2:], bare.pos_embed)


def test_b8_another_number_of_prefix_tokens() -> None:
    with pytest.raises(ValueError, match="Learned: made for 2 prefix tokens, given 1"):
        learned(4, 6, num_prefix_tokens=2).embed(torch.zeros(1, 25, 6), Grid(4, 6, num_prefix_tokens=1))


def test_start_and_names() -> None:
    encoding = create_encoding("learned", 8, 8, Grid(9, 7, num_prefix_tokens=1))
    assert encoding.pos_embed.shape == (1, 64, 64)
    assert 0.019 < encoding.pos_embed.std() < 0.021
    assert encoding.no_weight_decay() == {"pos_embed"}
    assert encoding.embed_dim == 64


def test_keeps_the_dtype_of_the_tokens() -> None:
    encoding = learned(4, 6, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert encoding.embed(torch.zeros(1, 24, 6, dtype=dtype), Grid(4, 6)).dtype == dtype


def test_refuses_tokens_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"Learned: x has 23 tokens of 6 channels, .* allow 24 tokens of 6 channels"):
        learned(4, 6).embed(torch.zeros(1, 23, 6), Grid(4, 6))


def test_resizing_inside_a_meta_build_leaves_real_numbers() -> None:
    with torch.device("meta"):
        encoding = create_encoding("learned", 2, 3, Grid(4, 6))
        encoding.set_window_size((5, 7))
    encoding.to_empty(device="cpu")
    source = learned(4, 6, dtype=torch.float32)
    encoding.load_state_dict(source.state_dict())
    source.set_window_size((5, 7))
    x = torch.zeros(1, math.prod((5, 7)), 6)
    assert torch.equal(encoding.embed(x, Grid(5, 7)), source.embed(x, Grid(5, 7)))
