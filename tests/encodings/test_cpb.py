"""The continuous bias against its formula offset by offset and timm's Swin V2."""

import math

import pytest
import torch
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor

from relpos2d import Grid, create_encoding
from relpos2d.encodings.cpb import ContinuousBias
from tests.oracles import difference, gradients, grid_places, redraw
from tests.tolerances import assert_close


def formula(encoding: ContinuousBias, offset: tuple[float, ...], windows: tuple[int, ...]) -> Tensor:
    coords = []
    for d, window in zip(offset, windows, strict=True):
        scaled = 8 * d / max(window - 1, 1)
        coords.append(math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), scaled))
    first, _, second = encoding.cpb_mlp
    hidden = (first.weight @ torch.tensor(coords, dtype=torch.float64) + first.bias).clamp(min=0)
    return 16 / (1 + (-(second.weight @ hidden)).exp())


@pytest.mark.parametrize(
    ("window", "pretrained", "queries", "keys"),
    [
        ((3, 5), 0, Grid(3, 5), Grid(3, 5)),
        ((3, 5), (4, 7), Grid(3, 5), Grid(3, 5)),
        ((3, 5), 6, Grid(2, 3), Grid(5, 3).pool(2)),
        ((7,), 0, Grid(7), Grid(7, step=0.75, origin=-2)),
        ((2, 3, 2), 0, Grid(2, 3, 2), Grid(2, 3, 2)),
        ((1, 4), 0, Grid(1, 4), Grid(1, 4)),
        ((2, 4), (0, 9), Grid(2, 4), Grid(2, 4)),
        ((2, 4), (1, 9), Grid(2, 4), Grid(2, 4)),
    ],
)
def test_formula_pair_by_pair(window: tuple[int, ...], pretrained, queries: Grid, keys: Grid) -> None:
    encoding = create_encoding(
        "cpb", 3, 4, Grid(*window), hidden_dim=5, pretrained_window_size=pretrained, dtype=torch.float64
    )
    redraw(encoding)
    pretrained = (pretrained,) * len(window) if isinstance(pretrained, int) else pretrained
    windows = pretrained if pretrained[0] > 0 else window  # as in timm: the first axis decides
    q = grid_places(queries.shape, [float(s) for s in queries.step], [float(o) for o in queries.origin])
    k = grid_places(keys.shape, [float(s) for s in keys.step], [float(o) for o in keys.origin])
    expected = torch.stack([formula(encoding, difference(a, b), windows) for a in q for b in k])
    expected = expected.reshape(len(q), len(k), 3).permute(2, 0, 1)
    bias = encoding.bias(queries, keys)
    assert_close(bias, expected, torch.float32)  # its coordinates are float32, as in timm
    parameters = list(encoding.parameters())
    for ours, theirs in zip(gradients(bias, parameters), gradients(expected, parameters), strict=True):
        assert_close(ours, theirs, torch.float32)


def timm_bias(attention: WindowAttention) -> Tensor:
    table = attention.cpb_mlp(attention.relative_coords_table).view(-1, attention.num_heads)
    area = attention.window_size[0] * attention.window_size[1]
    numbers = table[attention.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1)
    return 16 * torch.sigmoid(numbers)


@pytest.mark.parametrize("pretrained", [(0, 0), (6, 6), (3, 8)])
@pytest.mark.parametrize("window", [(3, 5), (8, 8), (1, 4)])
def test_timm_swin_v2(window: tuple[int, int], pretrained: tuple[int, int]) -> None:
    theirs = WindowAttention(12, window, 3, pretrained_window_size=pretrained).double()
    theirs.init_non_persistent_buffers()
    redraw(theirs)
    ours = create_encoding("cpb", 3, 4, Grid(*window), pretrained_window_size=pretrained, dtype=torch.float64)
    ours.cpb_mlp.load_state_dict(theirs.cpb_mlp.state_dict())
    assert_close(ours.bias(Grid(*window), Grid(*window)), timm_bias(theirs))
    theirs.set_window_size((4, 6))
    ours.set_window_size((4, 6))
    assert_close(ours.bias(Grid(4, 6), Grid(4, 6)), timm_bias(theirs))


def test_current_window_and_back() -> None:
    encoding = create_encoding("cpb", 3, 4, Grid(3, 5))
    redraw(encoding)
    before = encoding.bias(Grid(3, 5), Grid(3, 5))
    encoding.set_window_size((6, 4))
    assert not torch.allclose(encoding.bias(Grid(3, 5), Grid(3, 5)), before)
    encoding.set_window_size((3, 5))
    assert torch.equal(encoding.bias(Grid(3, 5), Grid(3, 5)), before)


def test_pretrained_window_does_not_follow_the_current() -> None:
    encoding = create_encoding("cpb", 3, 4, Grid(3, 5), pretrained_window_size=7)
    redraw(encoding)
    before = encoding.bias(Grid(3, 5), Grid(3, 5))
    encoding.set_window_size((6, 4))
    assert torch.equal(encoding.bias(Grid(3, 5), Grid(3, 5)), before)


def test_parameters_and_start() -> None:
    encoding = create_encoding("cpb", 3, 4, Grid(3, 5))
    shapes = {name: tuple(p.shape) for name, p in encoding.named_parameters()}
    assert shapes == {"cpb_mlp.0.weight": (512, 2), "cpb_mlp.0.bias": (512,), "cpb_mlp.2.weight": (3, 512)}
    assert encoding.cpb_mlp[0].bias.abs().max() == 0
    for layer in (encoding.cpb_mlp[0], encoding.cpb_mlp[2]):
        assert 0.017 < layer.weight.std() < 0.023
    assert encoding.no_weight_decay() == set(shapes)
    assert create_encoding("cpb", 3, 4, Grid(3, 5), hidden_dim=1).cpb_mlp[0].weight.shape == (1, 2)


def test_starts_near_8_and_stays_between_0_and_16() -> None:
    encoding = create_encoding("cpb", 3, 4, Grid(3, 5))
    assert (encoding.bias(Grid(3, 5), Grid(3, 5)) - 8).abs().max() < 1
    redraw(encoding, std=30)
    bias = encoding.bias(Grid(3, 5), Grid(3, 5))
    assert (bias.min() >= 0, bias.max() <= 16, bias.std() > 1) == (True, True, True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden_dim": 0}, "ContinuousBias: hidden_dim=0 must be at least 1"),
        ({"pretrained_window_size": -1}, "ContinuousBias: pretrained_window_size=-1 must be one number of at least 0"),
        ({"pretrained_window_size": (7, 7, 7)}, r"pretrained_window_size=\(7, 7, 7\) must .* each of the 2 axes"),
        ({"pretrained_window_size": (7, -7)}, r"pretrained_window_size=\(7, -7\) must"),
    ],
)
def test_refuses(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create_encoding("cpb", 3, 4, Grid(3, 5), **options)
