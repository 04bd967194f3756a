"""Numbers as a few more channels: the error that is reported is the error there is, and what it promises of the weights holds."""

import math

import pytest
import torch
from torch import Tensor

from relpos2d import Grid, attend, create_encoding
from relpos2d.attention import lowrank
from relpos2d.encoding import Encoding, LatticeNumbers
from relpos2d.positions import visible
from tests.attention.grids import GRIDS
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM, SCALE = 3, 6, 0.3


def build(name: str, queries: Grid) -> Encoding:
    positions = Grid(*queries.shape, num_prefix_tokens=queries.num_prefix_tokens)
    encoding = create_encoding(name, num_heads=HEADS, head_dim=HEAD_DIM, positions=positions, dtype=torch.float64)
    redraw(encoding)
    return encoding.requires_grad_(False)


def numbers_of(name: str, queries: Grid, keys: Grid | None = None) -> LatticeNumbers:
    numbers = build(name, queries).numbers(queries, keys or queries)
    assert numbers is not None
    return numbers


def smooth_numbers() -> LatticeNumbers:
    lattice = Grid(40).lattice(Grid(40))
    bell = (-(lattice.offsets(dtype=torch.float64).squeeze(-1) / 15).square()).exp()
    return LatticeNumbers(lattice, bell * torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), None)


def draw(queries: Grid, keys: Grid, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = (queries.num_tokens, keys.num_tokens, keys.num_tokens)
    return [torch.randn(2, HEADS, size, HEAD_DIM, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("grids", GRIDS)
def test_all_channels_give_all_numbers(grids: str) -> None:
    queries, keys = GRIDS[grids]
    encoding, qkv = build("table", queries), draw(queries, keys)
    rank = min(queries.num_tokens, keys.num_tokens)
    out, factors = lowrank.attend(
        *qkv, encoding.numbers(queries, keys), mask=None, is_causal=False, scale=SCALE, dropout_p=0.0, rank=rank
    )
    expected = attend(*qkv, encoding, queries, keys, scale=SCALE, backend="explicit")
    assert factors.rank == rank
    assert factors.error < 1e-12
    assert_close(out, expected)
    for got, wanted in zip(gradients(out, qkv), gradients(expected, qkv), strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("grids", GRIDS)
def test_product_without_the_matrix(grids: str) -> None:
    queries, keys = GRIDS[grids]
    numbers = numbers_of("table", queries, keys)
    matrix, dense = lowrank._Matrix(numbers, is_causal=False), numbers.bias()
    x, y = (torch.randn(HEADS, side.num_tokens, 4, dtype=torch.float64) for side in (keys, queries))
    assert_close(matrix.times(x), dense @ x)
    assert_close(matrix.times(y, transposed=True), dense.mT @ y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [Grid(9, num_prefix_tokens=2), Grid(7, origin=2)], ids=str)
def test_error_is_the_error(
    queries: Grid, is_causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowrank, "PAIRS_AT_ONCE", 70)  # several blocks, the last one not full
    keys = Grid(9, num_prefix_tokens=queries.num_prefix_tokens)
    numbers = numbers_of("table", queries, keys)
    factors = lowrank.factor(numbers, is_causal=is_causal, dtype=dtype, rank=3)
    assert factors.queries.dtype == factors.keys.dtype == dtype
    off = (factors.queries.double() @ factors.keys.double().mT - numbers.bias()).abs()
    seen = visible(queries, keys, is_causal=is_causal)
    off = off if seen is None else off * seen
    assert_close(factors.errors, off.amax(dim=(1, 2)))
    assert factors.error == factors.errors.max() > 0.1


def test_leading_singular_values_are_found() -> None:
    """No product of that many channels is nearer, all pairs taken together (Eckart and Young)."""
    numbers = numbers_of("cpb", Grid(12, 10))
    factors = lowrank.factor(numbers, rank=4)
    left = (numbers.bias() - factors.queries @ factors.keys.mT).square().sum(dim=(1, 2)).sqrt()
    best = torch.linalg.svdvals(numbers.bias())[:, 4:].square().sum(-1).sqrt()
    torch.testing.assert_close(left, best, rtol=1e-3, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_change_by_no_more_than_promised(is_causal: bool) -> None:
    grid = Grid(9)
    encoding, (q, k, _) = build("table", grid), draw(grid, grid)
    identity = torch.eye(9, dtype=torch.float64).expand(2, HEADS, 9, 9)  # values that hand out the weights
    weights, factors = lowrank.attend(
        q, k, identity, encoding.numbers(grid, grid), mask=None, is_causal=is_causal, scale=SCALE, dropout_p=0.0, rank=5
    )
    exact = attend(q, k, identity, encoding, grid, is_causal=is_causal, scale=SCALE, backend="explicit")
    ratios = (weights / exact)[exact > 0]
    change = torch.maximum(ratios, 1 / ratios).max()
    assert factors.weight_factor == pytest.approx(math.exp(2 * factors.error))
    assert change <= factors.weight_factor
    assert change >= factors.weight_factor**0.2  # not promised so widely that nothing could break it


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_causal_alibi_has_rank_two(num_prefix_tokens: int) -> None:
    grid = Grid(300, num_prefix_tokens=num_prefix_tokens)
    numbers = numbers_of("alibi", grid)
    numbers = LatticeNumbers(numbers.lattice, numbers.values, None)
    causal = lowrank.factor(numbers, is_causal=True)
    assert causal.rank == 2
    assert causal.error < 1e-9
    with refuses("above tolerance=0.01; give a rank"):
        lowrank.factor(numbers)


def test_fewest_channels_within_the_tolerance() -> None:
    numbers = smooth_numbers()
    factors = lowrank.factor(numbers, tolerance=0.05)
    assert 0 < factors.error <= 0.05
    assert lowrank.factor(numbers, rank=factors.rank).error == pytest.approx(factors.error)
    assert all(lowrank.factor(numbers, rank=rank).error > 0.05 for rank in range(1, factors.rank))
    assert lowrank.factor(numbers, tolerance=1e-4).rank > factors.rank


def test_queries_tried_first_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = smooth_numbers()
    expected = lowrank.factor(numbers, tolerance=0.05)
    monkeypatch.setattr(lowrank, "NUM_TRIED", 1)
    assert lowrank.factor(numbers, tolerance=0.05).rank == expected.rank


def test_no_numbers_need_no_channels() -> None:
    numbers = numbers_of("table", Grid(5))
    factors = lowrank.factor(LatticeNumbers(numbers.lattice, numbers.values * 0, None))
    assert (factors.rank, factors.error, factors.weight_factor) == (0, 0.0, 1.0)


MASKS = {
    "key padding": torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])[:, None, None],
    "windows": torch.eye(5, dtype=torch.bool).logical_not()[None, None].repeat(2, 1, 1, 1),
    "added": torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5),
    "added and trained": torch.linspace(-2, 2, 30, dtype=torch.float64).view(2, 3, 1, 5).requires_grad_(),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, is_causal: bool) -> None:
    grid, mask = Grid(5), MASKS[kind]
    if kind == "windows" and is_causal:
        mask = mask | (torch.arange(5) == 0)  # the first query would see nobody
    encoding, qkv = build("table", grid), draw(grid, grid)
    options = {"mask": mask, "is_causal": is_causal, "scale": SCALE}
    out, _ = lowrank.attend(*qkv, encoding.numbers(grid, grid), dropout_p=0.0, rank=5, **options)
    expected = attend(*qkv, encoding, grid, backend="explicit", **options)
    assert_close(out, expected)
    inputs = [*qkv, mask] if mask.requires_grad else qkv
    for got, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (Grid(4, num_prefix_tokens=2), Grid(4, num_prefix_tokens=2)),
        (Grid(3, origin=2), Grid(5)),
        (Grid(2, origin=7), Grid(5)),
        (Grid(6, step=1.5), Grid(7, step=2)),
    ],
)
def test_causal_goes_by_coordinates(queries: Grid, keys: Grid) -> None:
    encoding, qkv = build("table", queries), draw(queries, keys)
    rank = min(queries.num_tokens, keys.num_tokens)
    out, _ = lowrank.attend(
        *qkv, encoding.numbers(queries, keys), mask=None, is_causal=True, scale=SCALE, dropout_p=0.0, rank=rank
    )
    assert_close(out, attend(*qkv, encoding, queries, keys, is_causal=True, scale=SCALE, backend="explicit"))


def test_kernel_gets_no_mask_and_channels_by_eights(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls = torch.nn.functional.scaled_dot_product_attention, []

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append((q.shape[-1], k.shape[-1], v.shape[-1], options["attn_mask"], options["is_causal"]))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for is_causal in (False, True):
        for rank in (2, 3):  # 6 + 2 is 8 already
            lowrank.attend(
                *draw(Grid(5), Grid(5)),
                numbers_of("table", Grid(5)),
                mask=None,
                is_causal=is_causal,
                scale=SCALE,
                dropout_p=0.0,
                rank=rank,
            )
    assert calls == [(n, n, n, None, is_causal) for is_causal in (False, True) for n in (8, 16)]


def test_dropout_reaches_the_weights() -> None:
    out, _ = lowrank.attend(
        *draw(Grid(5), Grid(5)),
        numbers_of("table", Grid(5)),
        mask=None,
        is_causal=False,
        scale=1.0,
        dropout_p=1.0,
        rank=2,
    )
    assert (out == 0).all()


def test_factors_are_made_once_for_many_calls() -> None:
    numbers, qkv = numbers_of("table", Grid(5)), draw(Grid(5), Grid(5))
    options = {"mask": None, "is_causal": False, "scale": SCALE, "dropout_p": 0.0}
    factors = lowrank.factor(numbers, rank=3)
    out, same = lowrank.attend(*qkv, factors, **options)
    assert same is factors
    assert_close(out, lowrank.attend(*qkv, numbers, rank=3, **options)[0])
    with refuses("give rank and tolerance to lowrank.factor"):
        lowrank.attend(*qkv, factors, rank=3, **options)
    with refuses("hold only for causal attention"):
        lowrank.attend(*qkv, lowrank.factor(numbers, is_causal=True, rank=3), **options)


def test_numbers_that_are_trained_are_refused() -> None:
    encoding = build("table", Grid(5)).requires_grad_()
    with refuses("no gradient reaches numbers that are factored"):
        lowrank.factor(encoding.numbers(Grid(5), Grid(5)), rank=3)
    with torch.no_grad():
        factors = lowrank.factor(encoding.numbers(Grid(5), Grid(5)), rank=3)
    assert not factors.queries.requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank=0 must be between 1 and 5"),
        ({"rank": 6}, "rank=6 must be between 1 and 5"),
        ({"tolerance": 0.0}, "tolerance=0.0 must be above 0"),
        ({"rank": 2, "tolerance": 0.1}, "allowed is one of them"),
        ({"tolerance": 1e-6, "dtype": torch.bfloat16}, "rank 5 in torch.bfloat16 a score is off by"),
    ],
)
def test_what_cannot_be(options: dict[str, object], text: str) -> None:
    with refuses(text):
        lowrank.factor(numbers_of("table", Grid(5)), **options)


def test_causal_needs_one_axis() -> None:
    with refuses("one axis, the positions have 2"):
        lowrank.factor(numbers_of("table", Grid(2, 2)), is_causal=True, rank=2)
