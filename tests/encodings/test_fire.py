"""FIRE against the formula of the paper pair by pair, within its L and beyond."""

import math

import pytest
import torch
from torch import Tensor, nn

from relpos2d import Combined, Encoding, Grid, Points, attend, check, create_encoding
from relpos2d.encoding import LatticeNumbers
from relpos2d.encodings.fire import FunctionalInterpolation
from tests.oracles import gradients, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

EPS = 1e-6


def fire(length: float = 40.0, c: float = 0.3, multiplier: float = 0.9, dtype=torch.float64, **options):
    """With weights drawn anew and L at `multiplier` * `length`."""
    encoding = FunctionalInterpolation(3, 4, Grid(7), init_length=length, dtype=dtype, **options)
    redraw(encoding)
    with torch.no_grad():
        encoding.c.fill_(c)
        encoding.L_multiplier.fill_(multiplier)
    return encoding


def formula(encoding: FunctionalInterpolation, head: int, query: float, key: float) -> float:
    """In plain numbers."""
    state = {name: value.tolist() for name, value in encoding.state_dict().items()}
    c, reach = state["c"], max(query, abs(state["L_multiplier"] * encoding.init_length))
    share = math.log(abs(c * (query - key)) + 1) / (math.log(abs(c * reach) + 1) + EPS)
    total = state["mlp.2.bias"][head]
    for (w,), b, out in zip(state["mlp.0.weight"], state["mlp.0.bias"], state["mlp.2.weight"][head], strict=True):
        total += out * max(w * share + b, 0.0)
    return total


def by_autograd(encoding: FunctionalInterpolation, head: int, query: float, key: float) -> Tensor:
    """One pair, with gradients."""
    length = abs(encoding.L_multiplier * encoding.init_length)
    reach = query if query > length else length
    share = torch.log(abs(encoding.c * (query - key)) + 1) / (torch.log(abs(encoding.c * reach) + 1) + EPS)
    hidden = torch.relu(encoding.mlp[0].weight[:, 0] * share + encoding.mlp[0].bias)
    return (encoding.mlp[2].weight[head] * hidden).sum() + encoding.mlp[2].bias[head]


GRIDS = [
    (Grid(5), range(5), Grid(9), range(9)),
    (Grid(3, origin=34), (34, 35, 36), Grid(37), range(37)),  # up to L = 36 itself, behind a cache
    (Grid(4, origin=35), range(35, 39), Grid(9), range(9)),  # some beyond
    (Grid(3, origin=200), (200, 201, 202), Grid(5, origin=180), range(180, 185)),
    (Grid(3, origin=35.25), (35.25, 36.25, 37.25), Grid(4, step=1.5), (0, 1.5, 3, 4.5)),
]


class TestFormula:
    @pytest.mark.parametrize("multiplier", [0.9, -0.9])
    @pytest.mark.parametrize(("queries", "places_q", "keys", "places_k"), GRIDS)
    def test_pair_by_pair(self, multiplier: float, queries: Grid, places_q, keys: Grid, places_k) -> None:
        encoding = fire(multiplier=multiplier)
        bias = encoding.bias(queries, keys)
        for h in range(3):
            for i, x in enumerate(places_q):
                for j, y in enumerate(places_k):
                    assert abs(bias[h, i, j].item() - formula(encoding, h, x, y)) < 1e-10

    @pytest.mark.parametrize("c", [0.3, -0.3])
    @pytest.mark.parametrize(("queries", "places_q", "keys", "places_k"), GRIDS)
    def test_gradients_pair_by_pair(self, c: float, queries: Grid, places_q, keys: Grid, places_k) -> None:
        encoding = fire(c=c, multiplier=0.9001, mlp_width=7)
        q, k, v = (
            torch.randn(1, 3, n, 4, dtype=torch.float64, requires_grad=True)
            for n in (len(places_q), len(places_k), len(places_k))
        )
        expected = pair_attention(q, k, v, 0.5, lambda b, h, i, j: by_autograd(encoding, h, places_q[i], places_k[j]))
        out = attend(q, k, v, encoding, queries, keys)
        assert_close(out, expected)
        inputs = [q, k, v, *encoding.parameters()]
        # beyond L it has no say
        ours, wanted = (
            torch.autograd.grad(x.square().sum(), inputs, allow_unused=True, materialize_grads=True)
            for x in (out, expected)
        )
        for gradient, oracle in zip(ours, wanted, strict=True):
            assert_close(gradient, oracle)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_pieces_are_the_mlp_for_sharp_weights(self, dtype: torch.dtype) -> None:
        encoding = fire(dtype=dtype, mlp_width=64)
        first, last = encoding.mlp[0], encoding.mlp[2]
        with torch.no_grad():
            first.weight.mul_(2000)
            first.bias.mul_(1000)
            first.weight[:3] = 0  # units that are constant
            first.bias[3:5] = 0  # knots at distance 0
            first.weight[5:7] = torch.tensor([[1e-38], [-1e-38]])  # knots nowhere
            first.weight[8], first.bias[8] = first.weight[7], first.bias[7]  # two at once
        offsets = torch.linspace(-40, 40, 4001, dtype=torch.float64).to(dtype)[:, None]
        numbers = encoding.at(offsets)
        inputs = [*encoding.mlp.parameters()]
        # the MLP as it stands
        distances = torch.log1p(0.3 * offsets.abs()) / (math.log1p(0.3 * 36) + EPS)
        expected = encoding.mlp(distances)
        assert expected.diff(dim=0).abs().max() > 5
        scale = (last.weight.abs() @ (first.weight.abs() + first.bias.abs()[:, None])).max()
        assert (numbers - expected).abs().max() < scale * 4 * torch.finfo(dtype).eps
        if dtype == torch.float64:
            away = (first.weight[:, 0] * distances + first.bias).abs().amin(1) > 0  # no slope is defined at a knot
            weights = torch.randn_like(numbers) * away[:, None]
            ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (numbers, expected))
            for gradient, oracle in zip(ours, theirs, strict=True):
                assert (gradient - oracle).abs().max() < 1e-10 * oracle.abs().max()

    def test_no_pair_has_a_hidden_layer_of_its_own(self) -> None:
        encoding, seen = fire(mlp_width=64), []
        hook = lambda packed: seen.append(packed.numel()) or packed  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda packed: packed):
            bias = encoding.bias(Grid(50, origin=100), Grid(150))
        assert bias.requires_grad
        assert max(seen) <= 3 * 50 * 150


class TestWithinL:
    def test_a_number_per_offset_up_to_l(self) -> None:
        encoding = fire()
        last = Grid(37)
        numbers = encoding.numbers(last, Grid(80))
        assert isinstance(numbers, LatticeNumbers)
        assert encoding.numbers(Grid(38), last) is None
        assert encoding.numbers(last.points(2), last) is None
        assert_close(encoding.bias(last, Grid(80)), encoding.bias(last.points(1), Grid(80))[0])
        assert encoding.knows_query

    def test_at_l_itself_both_ways_give_l_the_same_gradient(self) -> None:
        encoding = fire(length=36.0, multiplier=1.0)
        grid = Grid(1, origin=36)
        (one,) = gradients(encoding.bias(grid, Grid(9)), [encoding.L_multiplier])
        (other,) = gradients(encoding.bias(grid.points(), Grid(9)), [encoding.L_multiplier])
        assert one.abs() > 1e-6
        assert_close(one, other)

    def test_l_is_read_anew(self) -> None:
        encoding, grid = fire().eval(), Grid(30)
        with torch.no_grad():
            before = encoding.bias(grid, grid)
            encoding.L_multiplier.fill_(0.1)
            after = encoding.bias(grid, grid)
        assert_close(after[:, 3, 1], before.new_tensor([formula(encoding, h, 3, 1) for h in range(3)]))
        assert_close(after[:, 29, 1], before.new_tensor([formula(encoding, h, 29, 1) for h in range(3)]))

    @pytest.mark.parametrize("length", [2, 7, 33])
    def test_relative_on_every_length(self, length: int) -> None:
        check(fire(), Grid(length))
        assert len(list(fire().parameters())) == 6

    def test_one_token_more_changes_nothing(self) -> None:
        encoding = fire()
        for length in (36, 60):
            more = encoding.bias(Grid(length + 1), Grid(length + 1))
            assert_close(more[:, :length, :length], encoding.bias(Grid(length), Grid(length)))


class TestBeyondL:
    def test_f4_step_by_step_is_the_whole(self) -> None:
        encoding = fire(length=10.0)
        q, k, v = torch.randn(3, 2, 3, 30, 4, dtype=torch.float64)
        whole = attend(q, k, v, encoding, Grid(30), is_causal=True)
        for i in (0, 8, 9, 10, 29):
            step = attend(
                q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], encoding, Grid(1, origin=i), Grid(i + 1)
            )
            assert_close(step, whole[:, :, i : i + 1])

    def test_each_sample_has_its_own_places(self) -> None:
        encoding = fire(length=10.0)
        q_pos, k_pos = (torch.rand(2, n, 1, dtype=torch.float64) * 60 for n in (4, 5))
        bias = encoding.bias(Points(q_pos, num_prefix_tokens=1), Points(k_pos))
        assert bias.shape == (2, 3, 5, 5)
        for b in range(2):
            for i in range(4):
                for j in range(5):
                    expected = [formula(encoding, h, q_pos[b, i].item(), k_pos[b, j].item()) for h in range(3)]
                    assert_close(bias[b, :, i + 1, j], bias.new_tensor(expected))

    def test_in_a_sum_with_others(self) -> None:
        one, other = fire(length=10.0), create_encoding("alibi", 3, 4, Grid(7), dtype=torch.float64)
        both = Combined(one, other)
        assert both.knows_query
        for length in (9, 20):
            grid = Grid(length)
            assert_close(both.bias(grid, grid), one.bias(grid, grid) + other.bias(grid, grid))

    @pytest.mark.parametrize("trains", [True, False])
    def test_rows_in_blocks_keep_a_memory_limit(self, trains: bool) -> None:
        encoding, grid = fire(length=10.0).requires_grad_(trains), Grid(61, num_prefix_tokens=1)
        encoding.prefix_bias = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        q, k, v = torch.randn(3, 2, 3, 62, 4, dtype=torch.float64).requires_grad_(trains)
        for is_causal in (True, False):
            whole = attend(q, k, v, encoding, grid, is_causal=is_causal)
            part, explanation = attend(q, k, v, encoding, grid, is_causal=is_causal, memory_limit=60_000, explain=True)
            assert explanation.way == "blocks"
            assert explanation.num_rows < 61
            assert_close(part, whole)
            if trains:
                inputs = [*encoding.parameters()]
                for ours, expected in zip(gradients(part, inputs), gradients(whole, inputs), strict=True):
                    assert_close(ours, expected)


class Holder(nn.Module):
    def __init__(self, encoding: Encoding, grid: Grid) -> None:
        super().__init__()
        self.encoding, self.grid = encoding, grid

    def forward(self, q: Tensor) -> Tensor:
        return attend(q, q, q, self.encoding, self.grid)


@pytest.mark.traced
class TestFollowed:
    @pytest.mark.parametrize("length", [9, 20])
    def test_exported(self, length: int) -> None:
        block, q = Holder(fire(length=12.0), Grid(length)), torch.randn(2, 3, length, 4, dtype=torch.float64)
        with torch.no_grad():
            expected = block(q)
            assert_close(torch.export.export(block, (q,)).module()(q), expected)

    @pytest.mark.parametrize("length", [9, 20])
    def test_torch_func(self, length: int) -> None:
        encoding = fire(length=12.0)
        bias = encoding.bias(Grid(length), Grid(length))
        expected = gradients(bias, [encoding.c])[0]
        weights = torch.linspace(-1, 2, bias.numel(), dtype=torch.float64).view_as(bias)

        def total(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(Whole(encoding, length), parameters).mul(weights).sum()

        parameters = {f"encoding.{name}": p.detach() for name, p in encoding.named_parameters()}
        assert_close(torch.func.grad(total)(parameters)["encoding.c"], expected)

    def test_shapes_alone(self) -> None:
        with torch.device("meta"):
            encoding = create_encoding("fire", 3, 4, Grid(7))
        assert encoding.bias(Grid(7), Grid(9)).shape == (3, 7, 9)


class Whole(nn.Module):
    def __init__(self, encoding: Encoding, length: int) -> None:
        super().__init__()
        self.encoding, self.grid = encoding, Grid(length)

    def forward(self) -> Tensor:
        return self.encoding.bias(self.grid, self.grid)


def test_parameters_and_their_start() -> None:
    encoding = create_encoding("fire", 3, 4, Grid(9), mlp_width=5, init_length=100.0)
    assert {name: tuple(p.shape) for name, p in encoding.named_parameters()} == {
        "mlp.0.weight": (5, 1),
        "mlp.0.bias": (5,),
        "mlp.2.weight": (3, 5),
        "mlp.2.bias": (3,),
        "c": (),
        "L_multiplier": (),
    }
    assert encoding.c == torch.tensor(0.1)
    assert encoding.length == 100
    before = encoding.mlp[0].weight.clone()
    encoding.reset_parameters()
    assert (encoding.mlp[0].weight - before).abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d2_half_parameters_tell_far_neighbours_apart(dtype: torch.dtype) -> None:
    encoding = fire(length=1000.0, dtype=dtype)
    bias = encoding.bias(Grid(1, origin=600), Grid(601))[:, 0]
    assert bias.dtype == torch.float32
    assert (bias.diff() != 0).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoding.bias(Grid(1, origin=600), Grid(601))[:, 0], bias)
    q = torch.randn(1, 3, 301, 4, dtype=dtype)
    assert attend(q, q, q, encoding, Grid(301)).dtype == dtype


def test_refusals() -> None:
    with refuses("FunctionalInterpolation: mlp_width=0 must be at least 1"):
        fire(mlp_width=0)
    for length in (0.0, -3.0, math.inf, math.nan):
        with refuses(f"FunctionalInterpolation: init_length={length} must be a positive number of tokens"):
            fire(length)
    with refuses(r"FunctionalInterpolation: has no meaning on 2 axes \(Grid\(3, 5\)\), allowed: 1"):
        create_encoding("fire", 3, 4, Grid(3, 5))
