"""KERPLE against the formulas of the paper pair by pair, and its parameters within their limits."""

import math

import pytest
import torch
from torch import Tensor

from relpos2d import Grid, Points, attend, check, create_encoding
from relpos2d.encodings.kerple import Kerple
from tests.oracles import gradients, pair_attention
from tests.refusals import refuses
from tests.tolerances import assert_close

KINDS = ("log", "power")
P, A = [0.3, 1.7, 0.9], [0.2, 0.05, 3.0]


def kerple(kind: str = "log", p=P, a=A, dtype=torch.float64, length: int = 7) -> Kerple:
    encoding = Kerple(3, 4, Grid(length), kind=kind, dtype=dtype)
    with torch.no_grad():
        encoding.bias_p.copy_(torch.tensor(p, dtype=torch.float64))
        encoding.bias_a.copy_(torch.tensor(a, dtype=torch.float64))
    return encoding


def kernel(kind: str, p: float, a: float, distance: float) -> float:
    if kind == "log":
        return -p * math.log(1 + a * distance)
    return -a * distance**p


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("queries", "places_q", "keys", "places_k"),
    [
        (Grid(5), range(5), Grid(8), range(8)),
        (Grid(2, origin=30), (30, 31), Grid(32), range(32)),
        (Grid(3, origin=0.25), (0.25, 1.25, 2.25), Grid(3, step=1.5), (0, 1.5, 3)),
    ],
)
def test_formula_pair_by_pair(kind: str, queries: Grid, places_q, keys: Grid, places_k) -> None:
    encoding = kerple(kind)
    p, a = encoding.bias_p, encoding.bias_a
    bias = encoding.bias(queries, keys)
    for h in range(3):
        for i, x in enumerate(places_q):
            for j, y in enumerate(places_k):
                assert abs(bias[h, i, j].item() - kernel(kind, P[h], A[h], abs(x - y))) < 1e-10
    q, k, v = (
        torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True)
        for n in (len(places_q), len(places_k), len(places_k))
    )

    def number(b: int, h: int, i: int, j: int) -> Tensor | float:
        distance = abs(places_q[i] - places_k[j])
        if kind == "log":
            return -p[h] * torch.log(1 + a[h] * distance)
        return -a[h] * torch.exp(p[h] * math.log(distance)) if distance else 0.0

    expected = pair_attention(q, k, v, 0.5, number)
    out = attend(q, k, v, encoding, queries, keys)
    assert_close(out, expected)
    inputs = [q, k, v, p, a]
    for ours, oracle in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_c7_held_at_its_limits_with_a_gradient_and_unchanged(kind: str) -> None:
    p, a = [-1.0, 0.004, 2.5], [0.0, -3.0, 0.0099]
    encoding = kerple(kind, p, a)
    most = 2.0 if kind == "power" else math.inf
    inside = kerple(kind, [min(max(x, 0.01), most) for x in p], [max(x, 0.01) for x in a])
    bias, expected = encoding.bias(Grid(9), Grid(9)), inside.bias(Grid(9), Grid(9))
    assert torch.equal(bias, expected)
    ours = gradients(bias, [encoding.bias_p, encoding.bias_a])
    for gradient, wanted in zip(ours, gradients(expected, [inside.bias_p, inside.bias_a]), strict=True):
        assert wanted.abs().min() > 0
        assert_close(gradient, wanted)
    assert encoding.bias_p.tolist() == p
    assert encoding.bias_a.tolist() == a


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_at_distance_zero(kind: str) -> None:
    encoding = kerple(kind)
    offsets = torch.tensor([[0.0], [2.0]], dtype=torch.float64, requires_grad=True)
    numbers = encoding.at(offsets)
    assert numbers[0].abs().max() == 0
    numbers.sum().backward()
    for x in (offsets, encoding.bias_p, encoding.bias_a):
        assert x.grad.isfinite().all()
    assert offsets.grad[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_relative_on_every_length(kind: str) -> None:
    for length in (2, 7, 33):
        encoding = kerple(kind, length=length)
        assert sum(parameter.numel() for parameter in encoding.parameters()) == 6
        # at distance 1 alone every power is 1, and the exponent has no gradient
        check(encoding, Grid(length, step=3))
    assert torch.equal(encoding.bias(Grid(301), Grid(301))[:, :300, :300], encoding.bias(Grid(300), Grid(300)))


@pytest.mark.parametrize("kind", KINDS)
def test_points_are_the_grid(kind: str) -> None:
    encoding, queries, keys = kerple(kind), Grid(3, origin=2.5), Grid(5, step=0.5)
    expected = encoding.bias(queries, keys).expand(2, -1, -1, -1)
    assert_close(encoding.bias(queries.points(2), keys.points(2)), expected)
    places = torch.tensor([[[0.25], [7.0]], [[3.5], [-40.0]]], dtype=torch.float64)
    assert_close(encoding.bias(Points(places), Points(places))[1, :, 0, 1], encoding.at(torch.tensor([43.5])))


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_as_in_the_authors_code(kind: str) -> None:
    encoding = Kerple(2000, 1, Grid(3), kind=kind)
    assert [(name, tuple(p.shape)) for name, p in encoding.named_parameters()] == [
        ("bias_p", (2000,)),
        ("bias_a", (2000,)),
    ]
    for parameter, most in ((encoding.bias_p, 2), (encoding.bias_a, 1)):
        assert 0 <= parameter.min() < 0.01 * most
        assert 0.99 * most < parameter.max() <= most
        assert abs(parameter.mean() - most / 2) < 0.03 * most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d2_half_parameters_tell_far_neighbours_apart(dtype: torch.dtype) -> None:
    encoding = kerple(dtype=dtype)
    bias = encoding.bias(Grid(1, origin=300), Grid(301))[:, 0]
    assert (bias.diff() > 0).all()
    q = torch.randn(1, 3, 301, 4, dtype=dtype)
    assert attend(q, q, q, encoding, Grid(301)).dtype == dtype


def test_refusals() -> None:
    with refuses("Kerple: kind='linear' must be one of log, power"):
        create_encoding("kerple", 3, 4, Grid(7), kind="linear")
    with refuses(r"Kerple: has no meaning on 2 axes \(Grid\(3, 5\)\), allowed: 1"):
        create_encoding("kerple", 3, 4, Grid(3, 5))
    assert "kind='power'" in repr(kerple("power"))
