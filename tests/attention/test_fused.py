"""The fused kernel with a view as its mask: output, log-sum-exp and all gradients against plain tensor code; and what it keeps."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from relpos2d import Grid
from relpos2d.attention import fused
from relpos2d.attention.fused import Rows
from relpos2d.tools.memory import peak_bytes
from tests.tolerances import assert_close

HEADS, DIM, SCALE = 3, 8, 0.3

LATTICES = [
    (Grid(7), Grid(7)),
    (Grid(5), Grid(9, origin=-3)),
    (Grid(1), Grid(9)),
    (Grid(9), Grid(1)),
    (Grid(4, 3), Grid(4, 3)),
    (Grid(5, 3), Grid(2, 4)),
    (Grid(9, 1), Grid(9, 3)),
    (Grid(3, 2, 3), Grid(3, 2, 3)),
    (Grid(4, 6), Grid(4, 3, step=(1, 2))),
    (Grid(7, 5), Grid(7, 5, origin=(Fraction(1, 3), 0))),
]


@pytest.fixture(params=["one block", "small blocks", "small calls"])
def sizes(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which small grids take every path that large ones take."""
    if request.param != "one block":
        monkeypatch.setattr(fused, "BLOCK", 30)
        monkeypatch.setattr(fused, "BLOCK_KEYS", 7)
        monkeypatch.setattr(fused, "PIECE", 50)
        monkeypatch.setattr(fused, "SCRATCH_BYTES", 5000)
        for name, value in (("FULL_CALL", 9), ("FULL_BLOCK", 4), ("SMALL_CALL", 5), ("SMALL_BLOCK", 2)):
            monkeypatch.setattr(fused, name, value)
    if request.param == "small calls":
        monkeypatch.setattr(fused, "CACHED_KEYS", 1)


def rows_of(q_pos: Grid, k_pos: Grid, visible: int | None = None) -> Rows:
    return Rows(q_pos.shape[0], math.prod(q_pos.shape[1:]), k_pos.shape[0], math.prod(k_pos.shape[1:]), visible=visible)


def inputs(q_pos: Grid, k_pos: Grid, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q as a strided part of a projection, k and v, and a number for each distinct offset."""
    q = torch.randn(batch, q_pos.num_places, HEADS, DIM, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, batch, HEADS, k_pos.num_places, DIM, dtype=dtype)
    numbers = torch.randn(HEADS, *q_pos.lattice(k_pos).shape, dtype=dtype)
    return [x.detach().requires_grad_() for x in (q, k, v, numbers)]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = SCALE * q @ k.transpose(-1, -2) + bias
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    weights = [torch.randn_like(x) for x in ours]
    gradients = []
    for results in (ours, theirs):
        total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        assert isinstance(total, Tensor)
        gradients.append(torch.autograd.grad(total, leaves))
    for a, b in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert_close(a, b)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("q_pos", "k_pos"), LATTICES, ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_equals_the_dense_bias(q_pos: Grid, k_pos: Grid, batch: int) -> None:
    lattice = q_pos.lattice(k_pos)
    q, k, v, numbers = inputs(q_pos, k_pos, batch)
    ours = fused.attend(q, k, v, lattice.rows(numbers)[None], rows_of(q_pos, k_pos), SCALE)
    assert_same(ours, plain(q, k, v, lattice.spread(numbers)), [q, k, v, numbers])


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("queries", "keys", "shift"), [(11, 11, 0), (4, 11, 7), (11, 4, 0), (6, 9, 2)])
def test_causal_leaves_out_the_future(queries: int, keys: int, shift: int) -> None:
    q_pos, k_pos = Grid(queries, origin=shift), Grid(keys)
    lattice, visible = q_pos.lattice(k_pos), queries - 1 + shift
    q, k, v, numbers = inputs(q_pos, k_pos)
    rows = lattice.rows(numbers)
    rows = rows.masked_fill(torch.arange(rows.shape[-1]) > visible, float("-inf"))
    ours = fused.attend(q, k, v, rows[None], rows_of(q_pos, k_pos, visible), SCALE)
    future = q_pos.offsets(k_pos)[..., 0] < 0
    bias = lattice.spread(numbers).masked_fill(future, float("-inf"))
    assert_same(ours, plain(q, k, v, bias), [q, k, v, numbers])


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("images", [1, 3])
def test_windows_have_numbers_of_their_own(images: int) -> None:
    windows, tokens = 4, 6
    q, k, v = torch.randn(3, images * windows, HEADS, tokens, DIM, dtype=torch.float64).unbind(0)
    values = torch.randn(windows, HEADS, tokens, tokens, dtype=torch.float64)
    values[1, :, :, 4:] = float("-inf")
    leaves = [x.requires_grad_() for x in (q, k, v, values)]
    ours = fused.attend(q, k, v, values, Rows(1, tokens, 1, tokens, reverse=False), SCALE)
    assert_same(ours, plain(q, k, v, values.repeat(images, 1, 1, 1)), leaves)


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_pieces_cover_each_sample_and_head_once(batch: int, heads: int) -> None:
    for groups in {1, batch, 3 if batch % 3 == 0 else 1}:
        q = torch.zeros(batch, heads, 6, 2)
        count = torch.zeros(batch, heads)
        pieces, by_head = fused._pieces(q, groups, Rows(1, 6, 1, 6, reverse=False))
        for piece in pieces:
            count[piece.batch, piece.heads] += 1
            sizes = [len(range(batch)[piece.batch]), len(range(heads)[piece.heads])]
            assert 1 in sizes
            assert not by_head or sizes[1] == 1
            shared = piece.groups.stop - piece.groups.start
            assert shared == 1 or [b % groups for b in range(batch)[piece.batch]] == list(range(groups)[piece.groups])
        assert (count == 1).all()


@pytest.mark.parametrize("width", [3, 8, 30, 32, 48, 64, 96, 100, 1000])
def test_a_band_is_worth_a_call(width: int) -> None:
    rows = Rows(96, width, 96, width)
    band = rows.band()
    assert 1 <= band <= 96
    assert band == 96 or band * width >= fused.SMALL_CALL


def test_frozen_numbers_of_one_window_take_torchs_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, HEADS, 6, DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))
    values = torch.randn(1, HEADS, 6, 6, dtype=torch.float64)
    rows = Rows(1, 6, 1, 6, reverse=False)
    monkeypatch.setattr(fused, "_Worker", None)  # our own blocks would stumble here
    out, _ = fused.attend(q, k, v, values, rows, SCALE)
    expected, _ = plain(q, k, v, values)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        assert_close(a, b)


class TestDropout:
    @pytest.mark.usefixtures("sizes")
    @pytest.mark.parametrize("grid", [Grid(9), Grid(4, 3)])
    def test_same_weights_are_dropped_forward_and_backward(self, grid: Grid) -> None:
        """The output is linear in v, with the dropped weights as its matrix, so v = identity shows them."""
        tokens = grid.num_places
        q, k = torch.randn(2, 2, HEADS, tokens, tokens, dtype=torch.float64)
        v = torch.eye(tokens, dtype=torch.float64).expand(2, HEADS, -1, -1).clone()
        numbers = torch.randn(HEADS, *grid.lattice(grid).shape, dtype=torch.float64)
        leaves = [x.requires_grad_() for x in (q, k, v, numbers)]
        rows = rows_of(grid, grid)
        lattice = grid.lattice(grid)
        torch.manual_seed(5)
        weights, _ = fused.attend(q, k, v, lattice.rows(numbers)[None], rows, SCALE, 0.4)
        whole, _ = plain(q, k, v, lattice.spread(numbers))
        kept = (weights.detach() != 0).double() / 0.6
        assert 0.5 < (kept > 0).double().mean() < 0.7
        expected = ((SCALE * q @ k.transpose(-1, -2) + lattice.spread(numbers)).softmax(-1) * kept) @ v
        assert_close(weights, whole.detach() * kept)
        w = torch.randn_like(weights)
        ours, theirs = (torch.autograd.grad((x * w).sum(), leaves) for x in (weights, expected))
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)

    def test_follows_the_common_seed(self) -> None:
        q, k, v, numbers = inputs(Grid(9), Grid(9))
        values, rows = Grid(9).lattice(Grid(9)).rows(numbers)[None], rows_of(Grid(9), Grid(9))
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(fused.attend(q, k, v, values, rows, SCALE, 0.5)[0])
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])

    def test_everything_dropped(self) -> None:
        q, k, v, numbers = inputs(Grid(9), Grid(9))
        values, rows = Grid(9).lattice(Grid(9)).rows(numbers)[None], rows_of(Grid(9), Grid(9))
        out, _ = fused.attend(q, k, v, values, rows, SCALE, 1.0)
        assert out.abs().max() == 0
        assert all(g.abs().max() == 0 for g in torch.autograd.grad(out.sum(), (q, k, v, numbers)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [Grid(33), Grid(5, 7)])
def test_lower_precision(grid: Grid, dtype: torch.dtype) -> None:
    q, k, v, numbers = inputs(grid, grid, dtype=torch.float64)
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    numbers32 = numbers.detach().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*low, numbers32)]
    out, lse = fused.attend(*low, grid.lattice(grid).rows(numbers32)[None], rows_of(grid, grid), SCALE)
    expected, expected_lse = plain(*exact[:3], grid.lattice(grid).spread(exact[3]))
    assert out.dtype == dtype
    assert_close(out.double(), expected, dtype)
    assert_close(lse.double(), expected_lse, dtype)
    ours = torch.autograd.grad(out.sum(), (*low, numbers32))
    theirs = torch.autograd.grad(expected.sum(), exact)
    assert [x.dtype for x in ours] == [dtype] * 3 + [torch.float32]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[
            dtype
        ] * b.norm()


def test_channels_that_are_not_neighbours() -> None:
    q, k, v, numbers = inputs(Grid(9), Grid(9))
    rows, values = rows_of(Grid(9), Grid(9)), Grid(9).lattice(Grid(9)).rows(numbers)[None]
    apart = [torch.stack((x, x + 1), dim=-1).flatten(-2)[..., ::2] for x in (q, k, v)]
    assert apart[0].stride(-1) == 2
    assert_close(fused.attend(*apart, values, rows, SCALE)[0], fused.attend(q, k, v, values, rows, SCALE)[0])


def test_second_derivative_is_refused() -> None:
    q, k, v, numbers = inputs(Grid(5), Grid(5))
    out, _ = fused.attend(q, k, v, Grid(5).lattice(Grid(5)).rows(numbers)[None], rows_of(Grid(5), Grid(5)), SCALE)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative; use attend\(..., backend='explicit'\)"):
        first.sum().backward()


@pytest.mark.parametrize("grid", [Grid(4096), Grid(64, 64)], ids=str)
def test_never_holds_a_number_for_each_pair(grid: Grid) -> None:
    q, k, v = torch.randn(3, 1, 1, 4096, 16).unbind(0)
    numbers = torch.randn(1, *grid.lattice(grid).shape, requires_grad=True)
    dense = 4096 * 4096 * 4

    def step() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = fused.attend(*leaves, grid.lattice(grid).rows(numbers)[None], rows_of(grid, grid), SCALE)
        out.sum().backward()

    with torch.no_grad():
        forward = peak_bytes(
            lambda: fused.attend(q, k, v, grid.lattice(grid).rows(numbers)[None], rows_of(grid, grid), SCALE)
        )
    training = peak_bytes(step)
    if grid.num_axes == 1:
        assert forward < 0.04 * dense
        assert training < 0.2 * dense
    else:
        assert forward < 0.6 * dense  # of one head: the scratch does not grow with the heads
        assert training < 0.7 * dense


def test_memory_grows_with_the_tokens_and_not_with_their_pairs() -> None:
    sizes = []
    for tokens in (2048, 4096):
        q, k, v = torch.randn(3, 1, 2, tokens, 16).unbind(0)
        numbers, grid = torch.randn(2, 2 * tokens - 1), Grid(tokens)
        with torch.no_grad():
            values, rows = grid.lattice(grid).rows(numbers)[None], rows_of(grid, grid)
            sizes.append(peak_bytes(lambda: fused.attend(q, k, v, values, rows, SCALE)))  # noqa: B023
    assert sizes[1] < 2.2 * sizes[0]
