"""Mixed RoPE against turning pair by pair and timm's rotary module, whose axes come as (x, y)."""

import math

import pytest
import torch
from timm.layers import RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import Tensor

from relpos2d import Grid, create_encoding
from relpos2d.encodings.rope_mixed import MixedRope
from tests.oracles import gradients, grid_places, redraw, turn
from tests.tolerances import assert_close


def turned(x: Tensor, grid: Grid, freqs: Tensor, layout: str) -> Tensor:
    places = grid_places(grid.shape, [float(s) for s in grid.step], [float(o) for o in grid.origin])
    out = []
    for sample in x:
        for h, head in enumerate(sample):
            rows = list(head[: grid.num_prefix_tokens])
            for token, place in zip(head[grid.num_prefix_tokens :], places, strict=True):
                angles = [sum(p * freqs[a, h, j] for a, p in enumerate(place)) for j in range(x.shape[-1] // 2)]
                rows.append(turn(token, angles, layout))
            out.append(torch.stack(rows))
    return torch.stack(out).reshape(x.shape)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(
    "grid",
    [Grid(5), Grid(4, 3), Grid(3, 5, num_prefix_tokens=2), Grid(2, 3, 2), Grid(2, 3, step=0.5, origin=(-3, 0.25))],
)
def test_turns_each_pair_by_its_angle(grid: Grid, layout: str) -> None:
    encoding = create_encoding("rope_mixed", 2, 12, grid, layout=layout, dtype=torch.float64)
    redraw(encoding)
    x = torch.randn(2, 2, grid.num_tokens, 12, dtype=torch.float64, requires_grad=True)
    expected, out = turned(x, grid, encoding.freqs, layout), encoding.rotate(x, grid)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, [x, encoding.freqs]), gradients(expected, [x, encoding.freqs]), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)])
def test_a1_timm_rotary_mixed(shape: tuple[int, int]) -> None:
    theirs = RotaryEmbeddingMixed(24, depth=2, num_heads=3, feat_shape=list(shape), grid_indexing="xy")
    redraw(theirs)
    x = torch.randn(2, 3, math.prod(shape), 8)
    ours = create_encoding("rope_mixed", 3, 8, Grid(*shape))
    for block in range(2):
        with torch.no_grad():
            ours.freqs.copy_(theirs.freqs[:, block].flip(0))  # (x, y) -> (y, x)
        assert_close(ours.rotate(x, Grid(*shape)), apply_rot_embed_cat(x, theirs.get_embed()[block]))


class TestOrientation:
    """A frequency along y only, or along x only, turns by that coordinate alone."""

    @pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3)])
    def test_by_value(self, height: int, width: int, axis: int, num_prefix_tokens: int) -> None:
        grid = Grid(height, width, num_prefix_tokens=num_prefix_tokens)
        encoding = create_encoding("rope_mixed", 2, 4, grid)
        with torch.no_grad():
            encoding.freqs.zero_()
            encoding.freqs[axis, 1, 0] = 0.3  # second head, first pair
        x = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(1, 2, grid.num_tokens, 4)
        out = encoding.rotate(x, grid)[0]
        assert torch.equal(out[0], x[0, 0])
        for i in range(grid.num_tokens):
            t = i - num_prefix_tokens
            angle = 0.3 * (0 if t < 0 else (t // width, t % width)[axis])
            assert_close(out[1, i], torch.tensor([math.cos(angle), math.sin(angle), 1.0, 0.0]))


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_start_has_the_magnitudes_of_theta_in_directions_at_right_angles(num_axes: int) -> None:
    encoding = create_encoding("rope_mixed", 5, 24, Grid(*range(3, 3 + num_axes)), theta=7.0)
    freqs = encoding.freqs.detach()
    assert freqs.shape == (num_axes, 5, 12)
    per_direction = 12 // num_axes
    magnitudes = torch.tensor([7.0 ** (-j / per_direction) for j in range(per_direction)])
    assert_close(freqs.norm(dim=0), magnitudes.repeat(5, num_axes))
    directions = freqs.unflatten(-1, (num_axes, per_direction))[..., 0].permute(1, 2, 0)
    assert_close(directions @ directions.transpose(1, 2), torch.eye(num_axes).expand(5, -1, -1))
    if num_axes > 1:
        assert directions[:, 0].std(dim=0).max() > 0.1  # each head has its own


def test_default_theta_is_that_of_the_reference() -> None:
    encoding = create_encoding("rope_mixed", 2, 8, Grid(4, 6))
    assert encoding.theta == 10.0
    assert encoding.layout == "interleaved"
    assert encoding.no_weight_decay() == {"freqs"}


def test_start_is_drawn_anew() -> None:
    encoding = create_encoding("rope_mixed", 2, 8, Grid(4, 6))
    before = encoding.freqs.clone()
    encoding.reset_parameters()
    assert not torch.equal(before, encoding.freqs)


def test_start_in_half_precision() -> None:
    encoding = create_encoding("rope_mixed", 2, 8, Grid(4, 6), dtype=torch.bfloat16)
    assert encoding.freqs.dtype == torch.bfloat16
    assert_close(encoding.freqs.float().norm(dim=0), torch.tensor([1.0, 10**-0.5] * 2).repeat(2, 1), torch.bfloat16)


def test_every_frequency_gets_a_gradient() -> None:
    encoding = create_encoding("rope_mixed", 2, 8, Grid(4, 6))
    encoding.rotate(torch.randn(2, 2, 24, 8), Grid(4, 6)).square().mul(torch.randn(8)).sum().backward()
    assert isinstance(encoding, MixedRope)
    assert encoding.freqs.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("head_dim", "grid", "options", "text"),
    [
        (30, Grid(4, 6), {}, "MixedRope: head_dim=30 must be a multiple of 4"),
        (7, Grid(9), {}, "MixedRope: head_dim=7 must be a multiple of 2"),
        (8, Grid(2, 3, 4), {}, "MixedRope: head_dim=8 must be a multiple of 6"),
        (8, Grid(4, 6), {"theta": 0.0}, "MixedRope: theta=0.0 must be positive"),
        (8, Grid(4, 6), {"theta": math.nan}, "MixedRope: theta=nan must be positive"),
        (8, Grid(4, 6), {"theta": math.inf}, "MixedRope: theta=inf must be positive and finite"),
    ],
)
def test_refuses(head_dim: int, grid: Grid, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create_encoding("rope_mixed", 2, head_dim, grid, **options)
