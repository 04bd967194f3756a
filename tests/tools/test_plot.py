"""Maps against plain loops, and pictures that are really written."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from relpos2d import Combined, Encoding, Grid, create_encoding, swap
from relpos2d.encoding import Term
from relpos2d.encodings.rope_axial import AxialRope
from relpos2d.tools import plot
from relpos2d.tools.check import fixed_projections
from relpos2d.tools.plot import bias_map, plot_encodings, plot_maps
from tests.tolerances import assert_close


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def drawn_grid_cells(path: Path) -> int:
    """Pixels that are neither grey nor white: the maps and their colour bars."""
    colours = pixels(path).astype(int)
    return int((colours.max(-1) - colours.min(-1) > 40).sum())


@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (6, 1)])
def test_the_map_of_numbers_is_the_formula_at_query_minus_key(shape: tuple[int, int]) -> None:
    encoding = create_encoding("table", 3, 24, Grid(*shape, num_prefix_tokens=2), dtype=torch.float64)
    nn.init.normal_(encoding.relative_position_bias_table)
    nn.init.normal_(encoding.prefix_bias)
    encoding.set_strength(0.5)
    height, width = shape
    maps = bias_map(encoding, Grid(*shape, num_prefix_tokens=2))
    assert maps.shape == (3, height, width)
    expected = torch.zeros(3, height, width)
    for y in range(height):
        for x in range(width):
            row = (height // 2 - y + height - 1) * (2 * width - 1) + (width // 2 - x + width - 1)
            expected[:, y, x] = 0.5 * encoding.relative_position_bias_table[row].detach()
    assert_close(maps, expected)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_the_map_of_a_rotation_is_the_mean_cosine(layout: str) -> None:
    encoding = create_encoding("rope_mixed", 3, 24, Grid(5, 7), layout=layout)
    maps = bias_map(encoding, Grid(5, 7, num_prefix_tokens=1))
    freqs = encoding.freqs.detach().double()
    expected = torch.zeros(3, 5, 7)
    for head in range(3):
        for y in range(5):
            for x in range(7):
                cosines = [
                    math.cos(float(freqs[0, head, j]) * (2 - y) + float(freqs[1, head, j]) * (3 - x)) for j in range(12)
                ]
                expected[head, y, x] = sum(cosines) / 12
    assert_close(maps, expected)
    assert_close(maps[:, 2, 3], torch.ones(3))


def test_the_map_of_a_rotation_that_scales_is_relative_to_offset_0() -> None:
    class Scaled(AxialRope):
        def rotate(self, x, pos, role="query", *, strength=1.0):
            return super().rotate(x, pos, role, strength=strength) * (0.5 if role == "key" else 3.0)

    sizes = (3, 24, Grid(5, 7))
    assert_close(bias_map(Scaled(*sizes), Grid(5, 7)), bias_map(AxialRope(*sizes), Grid(5, 7)))


@pytest.mark.parametrize(
    "scaling",
    [
        {"kind": "dynamic_ntk", "factor": 4.0, "original_length": 5},
        {
            "kind": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3, 4, 5],
            "factor": 2,
            "original_length": 8,
        },
    ],
)
def test_the_map_of_a_rotation_turns_query_and_keys_by_one_length(scaling: dict) -> None:
    encoding = create_encoding("rope", 1, 8, Grid(11), scaling=scaling)
    inv_freq = encoding._inv_freq(torch.ones(()), torch.tensor(11.0))
    assert not torch.equal(inv_freq, encoding.inv_freq)
    expected = (inv_freq * (5 - torch.arange(11.0)).unsqueeze(-1)).cos().mean(-1)
    assert_close(bias_map(encoding, Grid(11))[0], expected)


def test_the_map_of_xpos_is_relative_to_the_place_of_the_query() -> None:
    encoding = create_encoding("rope", 1, 8, Grid(9), scaling={"kind": "xpos", "scale_base": 4.0})
    offsets = (4 - torch.arange(9.0)).unsqueeze(-1)
    rates = (torch.arange(4.0) / 4 + 0.4) / 1.4
    expected = (rates ** (offsets / 4) * (encoding.inv_freq * offsets).cos()).mean(-1)
    assert_close(bias_map(encoding, Grid(9))[0], expected)


def test_the_map_of_vectors_that_a_host_projects_depends_on_the_offset() -> None:
    encoding = create_encoding("deberta", 3, 8, Grid(9), share_projections=True)
    nn.init.normal_(encoding.rel_embeddings.weight)
    maps = bias_map(encoding, Grid(9))
    assert torch.equal(maps, bias_map(encoding, Grid(9)))
    assert_close(bias_map(encoding, Grid(5)), maps[:, 2:7])
    own = create_encoding("deberta", 3, 8, Grid(9))
    own.rel_embeddings = encoding.rel_embeddings
    like = torch.zeros(())
    for projection, fixed in zip((own.pos_query_proj, own.pos_key_proj), fixed_projections(own, like), strict=True):
        projection.weight.data = fixed(torch.eye(24)).T
    assert_close(bias_map(own, Grid(9)), maps)


def test_the_map_of_a_sum_is_the_sum_of_the_maps() -> None:
    grid = Grid(5, 3)
    table, rope = create_encoding("table", 3, 24, grid), create_encoding("rope_axial", 3, 24, grid)
    assert_close(bias_map(Combined(table, rope), grid), bias_map(table, grid) + bias_map(rope, grid))


def test_the_map_of_vectors_is_what_they_add_for_a_unit_query() -> None:
    class Vectors(Encoding):
        def terms(self) -> list[Term]:
            rows = torch.arange(45.0).view(1, 45, 1).expand(-1, -1, self.head_dim)
            return [Term(rows, "query", lambda d: (d[..., 0] + 2) * 9 + d[..., 1] + 4)]

    maps = bias_map(Vectors(2, 9, Grid(3, 5)), Grid(3, 5))
    rows = torch.tensor([[(1 - y + 2) * 9 + (2 - x) + 4 for x in range(5)] for y in range(3)])
    assert_close(
        maps, (3.0 * rows).expand(2, -1, -1)
    )  # a unit query of 9 equal channels adds 3 times a row of equal ones


def test_none_makes_nothing_of_any_key() -> None:
    assert torch.equal(bias_map(create_encoding("none", 3, 24, Grid(5, 3)), Grid(5, 3)), torch.zeros(3, 5, 3))


def test_other_numbers_of_axes_steps_and_dtypes() -> None:
    assert bias_map(create_encoding("rope_axial", 3, 24, Grid(9)), Grid(9)).shape == (3, 9)
    assert bias_map(create_encoding("cpb", 3, 24, Grid(2, 3, 5)), Grid(2, 3, 5)).shape == (3, 2, 3, 5)
    half = bias_map(create_encoding("cpb", 3, 24, Grid(5, 3), dtype=torch.bfloat16), Grid(5, 3))
    assert half.dtype == torch.float32
    assert not half.requires_grad
    alibi = create_encoding("alibi", 4, 24, Grid(3, 5))
    moved = bias_map(alibi, Grid(3, 5, step=2, origin=(7, -1)))
    assert_close(moved, 2 * bias_map(alibi, Grid(3, 5)))


def test_absolute_encodings_and_other_axes_have_no_map() -> None:
    with pytest.raises(ValueError, match="SinCos is absolute"):
        bias_map(create_encoding("sincos", 3, 24, Grid(5, 3)), Grid(5, 3))
    with pytest.raises(ValueError, match=r"Grid\(5\) has 1 axes, Alibi is made for Grid\(5, 3\)"):
        bias_map(create_encoding("alibi", 3, 24, Grid(5, 3)), Grid(5))


@pytest.mark.parametrize("shape", [(5, 7), (11,), (2, 3, 5)])
def test_one_encoding_is_drawn(tmp_path: Path, shape: tuple[int, ...]) -> None:
    plot_maps(create_encoding("cpb", 3, 24, Grid(*shape)), tmp_path / "one.png")
    assert drawn_grid_cells(tmp_path / "one.png") > 5000


def test_every_layer_and_head_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = swap(timm.create_model("vit_tiny_patch16_224", depth=5, img_size=(48, 80)), ["table", "rope_axial"])
    drawn: list[Tensor] = []
    draw = plot._draw

    def noted(panel, image, scale):
        drawn.append(image)
        return draw(panel, image, scale)

    monkeypatch.setattr(plot, "_draw", noted)
    plot_maps(model, tmp_path / "model.png", title="model")
    assert len(drawn) == 5 * 3
    expected = bias_map(model.blocks[4].attn.encoding, Grid(3, 5))
    assert_close(torch.stack(drawn[-3:]), expected)
    drawn.clear()
    plot_maps(model, tmp_path / "less.png", max_layers=3, max_heads=2)
    assert len(drawn) == 3 * 2
    assert_close(torch.stack(drawn[-2:]), expected[:2])


def test_the_window_in_use_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = create_encoding("table", 3, 24, Grid(5, 3))
    encoding.set_window_size((7, 9))
    grids: list[Grid] = []
    draw_map = plot.bias_map
    monkeypatch.setattr(plot, "bias_map", lambda encoding, grid: (grids.append(grid), draw_map(encoding, grid))[1])
    plot_maps([encoding], tmp_path / "window.png")
    plot_maps({"own": encoding}, tmp_path / "window.png", grid=Grid(3, 11))
    assert grids == [Grid(7, 9), Grid(3, 11)]


def test_the_picture_of_three_encodings(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    plot_encodings(tmp_path / "a.png")
    plot_encodings(tmp_path / "b.png")
    plot_encodings(tmp_path / "c.png", seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (pixels(tmp_path / f"{name}.png") for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    assert drawn_grid_cells(tmp_path / "a.png") > 0.3 * a.shape[0] * a.shape[1]


def test_no_global_state_of_matplotlib_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plot_maps(create_encoding("alibi", 3, 24, Grid(3, 5)), tmp_path / "a.png")


@pytest.mark.parametrize("draw", [plot_encodings, lambda p: plot_maps(create_encoding("alibi", 3, 24, Grid(3, 5)), p)])
def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: object) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib; pip install 'relpos2d\[plot\]'"):
        draw(tmp_path / "a.png")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no relative encoding to draw"):
        plot_maps(nn.Linear(3, 5), tmp_path / "a.png")
    with pytest.raises(ValueError, match="Learned is absolute"):
        plot_maps(create_encoding("learned", 3, 24, Grid(3, 5)), tmp_path / "a.png")
    with pytest.raises(ValueError, match="max_layers=0 and max_heads=8 must be at least 1"):
        plot_maps(create_encoding("alibi", 3, 24, Grid(3, 5)), tmp_path / "a.png", max_layers=0)
