"""Grids and points: where tokens stand, their distinct offsets, who sees whom; held to counting pair by pair."""

import copy
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos2d import Grid, Points, join
from relpos2d.positions import real_tokens, visible
from tests.oracles import difference, grid_places
from tests.refusals import refuses
from tests.tolerances import assert_close


def pair_table(queries: Grid, keys: Grid) -> torch.Tensor:
    """Offset of each pair from counting the places."""
    q = grid_places(queries.shape, queries.step, queries.origin)
    k = grid_places(keys.shape, keys.step, keys.origin)
    return torch.tensor([[[float(x) for x in difference(a, b)] for b in k] for a in q], dtype=torch.float64)


class TestGrid:
    @pytest.mark.parametrize(("height", "width"), [(4, 6), (6, 4), (3, 4), (1, 5), (5, 1)])
    def test_a1_a2_token_t_stands_at_row_and_column(self, height: int, width: int) -> None:
        coords = Grid(height, width).coords()
        assert coords.shape == (height * width, 2)
        for t in range(height * width):
            assert coords[t].tolist() == [t // width, t % width]

    def test_a1_token_7_of_4_by_6(self) -> None:
        assert Grid(4, 6).coords()[7].tolist() == [1, 1]

    def test_a2_first_tokens_of_height_3_width_4(self) -> None:
        assert Grid(3, 4).coords()[:5].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]

    def test_three_axes_run_with_the_last_fastest(self) -> None:
        grid = Grid(2, 3, 5)
        assert grid.coords().tolist() == [list(p) for p in grid_places((2, 3, 5), (1, 1, 1), (0, 0, 0))]

    def test_counts(self) -> None:
        grid = Grid(4, 6, num_prefix_tokens=5)
        assert (grid.shape, grid.num_axes, grid.num_places, grid.num_tokens) == ((4, 6), 2, 24, 29)
        assert (grid.num_prefix_tokens, Grid(7).num_prefix_tokens) == (5, 0)
        assert Grid(7).num_axes == 1

    def test_step_and_origin_one_each_or_one_for_all(self) -> None:
        grid = Grid(2, 3, step=(2, Fraction(1, 3)), origin=(1, -2))
        assert (grid.step, grid.origin) == ((2, Fraction(1, 3)), (1, -2))
        assert_close(grid.coords()[4], torch.tensor([3.0, -2 + 1 / 3]))
        assert Grid(2, 3, step=0.1, origin=0.5).step == (Fraction(1, 10), Fraction(1, 10))
        assert Grid(2, 3, origin=[0.5, 1]).origin == (Fraction(1, 2), 1)

    def test_is_a_value(self) -> None:
        grid = Grid(4, 6, num_prefix_tokens=1, step=2, origin=0.5)
        same = Grid(4, 6, num_prefix_tokens=1, step=(2, 2), origin=(0.5, 0.5))
        assert grid == same
        assert hash(grid) == hash(same)
        assert copy.deepcopy(grid) == pickle.loads(pickle.dumps(grid)) == grid
        for other in (Grid(6, 4), Grid(4, 6), Grid(4, 6, num_prefix_tokens=1), Grid(4, 6, 1)):
            assert grid != other
        with pytest.raises(AttributeError):
            grid.shape = (1,)  # type: ignore[misc]

    def test_repr_shows_what_is_not_default(self) -> None:
        assert repr(Grid(4, 6)) == "Grid(4, 6)"
        assert (
            repr(Grid(4, 6, num_prefix_tokens=1, step=(1, 0.5), origin=(0, 2)))
            == "Grid(4, 6, num_prefix_tokens=1, step=(1, 1/2), origin=(0, 2))"
        )

    def test_repr_leaves_out_each_default_by_itself(self) -> None:
        assert repr(Grid(7, step=2)) == "Grid(7, step=(2))"
        assert repr(Grid(7, origin=2)) == "Grid(7, origin=(2))"

    def test_coords_keep_dtype_and_device(self) -> None:
        assert Grid(3).coords().dtype == torch.float32
        assert Grid(3).coords(dtype=torch.float64).dtype == torch.float64
        assert Grid(3).coords(device="meta").device.type == "meta"

    def test_d2_places_far_from_the_origin_stay_apart(self) -> None:
        coords = Grid(600).coords()[:, 0]
        assert coords[257] == 257
        assert len(coords.unique()) == 600

    def test_pool_by_2_stands_between_its_tokens(self) -> None:
        pooled = Grid(4, 6, num_prefix_tokens=1).pool(2)
        assert pooled == Grid(2, 3, num_prefix_tokens=1, step=2, origin=0.5)

    def test_pool_by_3_stands_on_the_middle_token(self) -> None:
        assert Grid(9, 6).pool((3, 1)) == Grid(3, 6, step=(3, 1), origin=(1, 0))

    def test_pool_of_a_shifted_grid_and_a_last_block_not_full(self) -> None:
        assert Grid(5, step=2, origin=1).pool(2) == Grid(3, step=4, origin=2)

    def test_pool_twice_is_pool_by_the_product(self) -> None:
        assert Grid(24, 12).pool(2).pool((3, 2)) == Grid(24, 12).pool((6, 4))

    def test_pooled_place_is_the_mean_of_its_block(self) -> None:
        grid = Grid(6, 4, step=Fraction(1, 2), origin=(3, -1))
        means = grid.coords().unflatten(0, (3, 2, 2, 2)).mean(dim=(1, 3)).flatten(0, 1)
        assert_close(grid.pool(2).coords(), means)

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Grid(), "Grid: needs at least one axis"),
            (lambda: Grid(0), r"Grid: shape=\(0,\) must hold whole numbers of at least 1"),
            (lambda: Grid(4, 0), r"Grid: shape=\(4, 0\) must hold"),
            (lambda: Grid(4, -1), r"Grid: shape=\(4, -1\) must hold"),
            (lambda: Grid(4.5), r"Grid: shape=\(4.5,\) must hold"),
            (lambda: Grid(True, 3), r"Grid: shape=\(True, 3\) must hold"),
            (lambda: Grid((7, 7)), r"Grid: shape=\(\(7, 7\),\) must hold"),
            (lambda: Grid(4, num_prefix_tokens=-1), "Grid: num_prefix_tokens=-1 must be a whole number of at least 0"),
            (lambda: Grid(4, num_prefix_tokens=1.0), "Grid: num_prefix_tokens=1.0 must be"),
            (lambda: Grid(4, num_prefix_tokens=True), "Grid: num_prefix_tokens=True must be"),
            (lambda: Grid(4, step=0), "Grid: step=0 must be positive"),
            (lambda: Grid(4, 4, step=(1, -1)), r"Grid: step=\(1, -1\) must be positive"),
            (lambda: Grid(4, step=float("nan")), "Grid: step=nan must be finite"),
            (lambda: Grid(4, origin=float("inf")), "Grid: origin=inf must be finite"),
            (lambda: Grid(4, 4, step=(1, 2, 3)), r"Grid: step=\(1, 2, 3\) has 3 entries, the shape has 2 axes"),
            (lambda: Grid(4, origin=(1, 2)), r"Grid: origin=\(1, 2\) has 2 entries, the shape has 1 axes"),
            (lambda: Grid(4).pool(0), "Grid.pool: factor=0 must hold whole numbers of at least 1"),
            (lambda: Grid(4).pool(1.5), "Grid.pool: factor=1.5 must hold"),
            (lambda: Grid(4).pool((2, 2)), r"Grid: factor=\(2, 2\) has 2 entries"),
            (lambda: Grid(4).lattice(Grid(4, 4)), "offsets: 1 axes against 2; both sides need the same axes"),
            (lambda: Grid(4).offsets(Grid(4, 4)), "offsets: 1 axes against 2"),
        ],
    )
    def test_refuses(self, make, text: str) -> None:
        with refuses(text):
            make()

    def test_one_token_and_one_axis_are_allowed(self) -> None:
        assert Grid(1, 1).num_tokens == 1
        assert Grid(4, num_prefix_tokens=0).pool(1) == Grid(4)


GRID_PAIRS = [
    (Grid(3, 4), Grid(3, 4)),
    (Grid(5, 3), Grid(2, 7)),
    (Grid(7), Grid(3)),
    (Grid(2, 3, 5), Grid(3, 2, 3)),
    (Grid(6, 4), Grid(6, 4).pool(2)),
    (Grid(5, 7).pool(2), Grid(5, 7)),
    (Grid(5), Grid(5, step=Fraction(2, 3), origin=Fraction(1, 7))),
    (Grid(4, 3, step=(1, 2)), Grid(3, 5, step=(Fraction(3, 2), 3), origin=(-1, 4))),
    (Grid(1, origin=9), Grid(10)),
    (Grid(3, step=7), Grid(4, step=5)),
]


class TestOffsets:
    @pytest.mark.parametrize(("queries", "keys"), GRID_PAIRS)
    def test_query_minus_key(self, queries: Grid, keys: Grid) -> None:
        assert_close(queries.offsets(keys, dtype=torch.float64), pair_table(queries, keys))

    @pytest.mark.parametrize(("queries", "keys"), GRID_PAIRS)
    def test_lattice_spreads_to_all_pairs(self, queries: Grid, keys: Grid) -> None:
        lattice = queries.lattice(keys)
        distinct = lattice.offsets(dtype=torch.float64)
        assert distinct.shape[:-1] == lattice.shape
        assert lattice.num_offsets == distinct.shape[:-1].numel()
        assert_close(lattice.spread(distinct.movedim(-1, 0)).movedim(0, -1), pair_table(queries, keys))

    @pytest.mark.parametrize(("queries", "keys"), GRID_PAIRS)
    def test_lattice_spreads_by_looking_up_as_by_a_view(self, queries: Grid, keys: Grid) -> None:
        lattice = queries.lattice(keys)
        values = torch.randn(2, *lattice.shape)
        assert torch.equal(lattice._looked_up(values), lattice.spread(values))

    @pytest.mark.parametrize(("queries", "keys"), GRID_PAIRS)
    def test_lattice_ends_are_used_and_rows_are_distinct(self, queries: Grid, keys: Grid) -> None:
        lattice = queries.lattice(keys)
        distinct = lattice.offsets(dtype=torch.float64).flatten(0, -2)
        pairs = pair_table(queries, keys).flatten(0, 1)
        assert len(distinct.unique(dim=0)) == lattice.num_offsets
        assert_close(distinct.amin(0), pairs.amin(0))
        assert_close(distinct.amax(0), pairs.amax(0))

    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), num_axes=st.integers(1, 3))
    def test_lattice_of_any_two_grids(self, data: st.DataObject, num_axes: int) -> None:
        fractions = st.fractions(min_value=Fraction(1, 4), max_value=3, max_denominator=4)

        def grid() -> Grid:
            return Grid(
                *(data.draw(st.integers(1, 5 if num_axes < 3 else 3)) for _ in range(num_axes)),
                step=[data.draw(fractions) for _ in range(num_axes)],
                origin=[data.draw(fractions) - 1 for _ in range(num_axes)],
            )

        queries, keys = grid(), grid()
        lattice = queries.lattice(keys)
        spread = lattice.spread(lattice.offsets(dtype=torch.float64).movedim(-1, 0))
        assert_close(spread.movedim(0, -1), pair_table(queries, keys))

    @pytest.mark.parametrize(("height", "width"), [(3, 4), (7, 7), (8, 12), (9, 7), (7, 9)])
    def test_a3_a4_a6_one_row_per_offset(self, height: int, width: int) -> None:
        lattice = Grid(height, width).lattice(Grid(height, width))
        rows = torch.arange(lattice.num_offsets).reshape(lattice.shape)
        index = lattice.spread(rows)
        assert (index.min(), index.max()) == (0, (2 * height - 1) * (2 * width - 1) - 1)
        assert len(index.unique()) == lattice.num_offsets
        for i, (yi, xi) in enumerate(grid_places((height, width), (1, 1), (0, 0))):
            for j, (yj, xj) in enumerate(grid_places((height, width), (1, 1), (0, 0))):
                assert index[i, j] == (yi - yj + height - 1) * (2 * width - 1) + (xi - xj + width - 1)

    def test_a5_three_unequal_sides(self) -> None:
        window = Grid(2, 3, 5)
        lattice = window.lattice(window)
        assert lattice.num_offsets == 3 * 5 * 9
        index = lattice.spread(torch.arange(lattice.num_offsets).reshape(lattice.shape))
        places = grid_places(window.shape, (1, 1, 1), (0, 0, 0))
        for i, a in enumerate(places):
            for j, b in enumerate(places):
                t, y, x = difference(a, b)
                assert index[i, j] == (t + 1) * 5 * 9 + (y + 2) * 9 + (x + 4)

    def test_spread_keeps_leading_dimensions_and_gradients(self) -> None:
        lattice = Grid(2, 3).lattice(Grid(3, 2))
        values = torch.randn(5, 2, *lattice.shape, requires_grad=True)
        spread = lattice.spread(values)
        assert spread.shape == (5, 2, 6, 6)
        (gradient,) = torch.autograd.grad(spread.sum(), values)
        assert gradient.sum() == spread.numel()

    def test_batch_of_points_against_a_grid(self) -> None:
        points = Points(torch.randn(2, 4, 2))
        offsets = points.offsets(Grid(3, 2))
        assert offsets.shape == (2, 4, 6, 2)
        assert_close(offsets[1, 3, 5], points.places[1, 3] - torch.tensor([2.0, 1.0]))
        assert_close(Grid(3, 2).offsets(points), -offsets.transpose(1, 2))

    def test_device_is_that_asked_for(self) -> None:
        assert Grid(3, 2).offsets(Grid(3, 2), device="meta").device.type == "meta"
        points = Grid(3, 2).points()
        assert points.coords(device="meta").device.type == "meta"
        assert points.offsets(points, device="meta").device.type == "meta"

    def test_offsets_of_points_follow_their_device(self) -> None:
        points = Points(torch.zeros(1, 4, 2, device="meta"))
        assert Grid(3, 2).offsets(points).device.type == "meta"
        assert points.offsets(points).device.type == "meta"


class TestPoints:
    def test_counts(self) -> None:
        points = Points(torch.zeros(2, 5, 3), num_prefix_tokens=2)
        assert (points.num_axes, points.num_places, points.num_tokens) == (3, 5, 7)
        assert Points(torch.zeros(2, 5, 3)).num_tokens == 5

    def test_grid_as_points(self) -> None:
        grid = Grid(3, 4, num_prefix_tokens=2, step=0.5, origin=(1, 2))
        points = grid.points(3)
        assert points.places.shape == (3, 12, 2)
        assert points.num_prefix_tokens == 2
        for sample in points.coords():
            assert_close(sample, grid.coords())
        assert grid.points().places.shape[0] == 1
        assert grid.points(device="meta").places.device.type == "meta"

    def test_padding_reads_as_zero_whatever_it_holds(self) -> None:
        places = torch.tensor([[[1.0, 2.0], [float("nan"), float("inf")]]])
        points = Points(places, valid=torch.tensor([[True, False]]))
        assert points.coords().tolist() == [[[1, 2], [0, 0]]]
        assert points.coords(dtype=torch.float64).dtype == torch.float64

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Points(torch.zeros(4, 2)), r"Points: coordinates have shape \(4, 2\), allowed is \(B, N, axes\)"),
            (lambda: Points(torch.zeros(1, 4, 0)), r"Points: coordinates have shape \(1, 4, 0\)"),
            (
                lambda: Points(torch.zeros(1, 4, 2, dtype=torch.bfloat16)),
                "Points: coordinates are torch.bfloat16, allowed are float32 and float64",
            ),
            (lambda: Points(torch.zeros(1, 4, 2, dtype=torch.long)), "Points: coordinates are torch.int64"),
            (
                lambda: Points(torch.zeros(1, 4, 2), valid=torch.ones(4, dtype=torch.bool)),
                r"Points: valid has shape \(4,\), coordinates allow \(1, 4\)",
            ),
            (
                lambda: Points(torch.zeros(1, 4, 2), segments=torch.ones(1, 3, dtype=torch.long)),
                r"Points: segments has shape \(1, 3\), coordinates allow \(1, 4\)",
            ),
            (lambda: Points(torch.zeros(1, 4, 2), valid=torch.ones(1, 4)), "Points: valid is torch.float32"),
            (lambda: Points(torch.zeros(1, 4, 2), segments=torch.ones(1, 4)), "Points: segments is torch.float32"),
            (
                lambda: Points(torch.zeros(1, 4, 2), num_prefix_tokens=-1),
                "Points: num_prefix_tokens=-1 must be a whole number of at least 0",
            ),
        ],
    )
    def test_refuses(self, make, text: str) -> None:
        with refuses(text):
            make()


class TestJoin:
    def test_one_behind_the_other(self) -> None:
        text, image = Grid(3, 1, num_prefix_tokens=1), Grid(2, 2, origin=(3, 0))
        joined = join(text, image)
        assert joined.num_prefix_tokens == 1
        assert joined.places.tolist() == [[[0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1]]]
        assert joined.valid is None
        assert joined.segments is None

    def test_grid_takes_the_batch_and_dtype_of_points(self) -> None:
        points = Points(torch.randn(3, 4, 2, dtype=torch.float64), valid=torch.rand(3, 4) > 0.5)
        joined = join(Grid(2, 2), points)
        assert joined.places.shape == (3, 8, 2)
        assert joined.places.dtype == torch.float64
        assert joined.valid[:, :4].all()
        assert torch.equal(joined.valid[:, 4:], points.valid)
        assert torch.equal(joined.places[:, 4:], points.places)

    def test_device(self) -> None:
        assert join(Grid(2, 2), Points(torch.zeros(1, 2, 2, device="meta"))).places.device.type == "meta"
        assert join(Grid(2, 2), Grid(1, 1), device="meta").places.device.type == "meta"

    def test_packed_parts_get_segments_of_their_own(self) -> None:
        assert join(Grid(2), Grid(1), Grid(3), packed=True).segments.tolist() == [[0, 0, 1, 2, 2, 2]]

    def test_packed_keeps_the_segments_inside_a_part_apart(self) -> None:
        part = Points(torch.zeros(2, 3, 1), segments=torch.tensor([[-1, 4, 4], [-1, -1, 2]]))
        segments = join(part, Grid(2), part, packed=True).segments
        for row, own in zip(segments, part.segments, strict=True):
            first, middle, last = row[:3], row[3:5], row[5:]
            assert not set(first.tolist()) & set(last.tolist())
            assert not set(middle.tolist()) & set([*first.tolist(), *last.tolist()])
            assert torch.equal(first[:, None] == first, own[:, None] == own)
            assert torch.equal(last[:, None] == last, own[:, None] == own)

    def test_segments_without_packing_stay_as_they_are(self) -> None:
        part = Points(torch.zeros(1, 3, 1), segments=torch.tensor([[0, 5, 5]]))
        assert join(part, part).segments.tolist() == [[0, 5, 5, 0, 5, 5]]
        assert join(Grid(1), part).segments.tolist() == [[0, 0, 5, 5]]

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: join(), "join: needs at least one Grid or Points"),
            (
                lambda: join(Grid(2), Grid(2, num_prefix_tokens=1)),
                "^join: only the first part may have prefix tokens, since they stand in front of all places$",
            ),
            (lambda: join(Grid(2), Grid(2, 2)), "offsets: 1 axes against 2"),
            (
                lambda: join(Points(torch.zeros(2, 1, 1)), Points(torch.zeros(3, 1, 1))),
                r"join: batch sizes \[2, 3\] differ",
            ),
        ],
    )
    def test_refuses(self, make, text: str) -> None:
        with refuses(text):
            make()


class TestTokenTypes:
    def test_parts_and_joins_carry_them(self) -> None:
        types = torch.tensor([[0, 0, 1], [0, 1, 1]])
        points = Points(torch.zeros(2, 3, 1), num_prefix_tokens=1, token_types=types)
        assert points.part(1, 3).token_types.tolist() == [[0, 1], [1, 1]]
        joined = join(points, Points(torch.zeros(2, 1, 1), token_types=torch.tensor([[2], [3]])))
        assert joined.token_types.tolist() == [[0, 0, 1, 2], [0, 1, 1, 3]]
        assert joined.num_prefix_tokens == 1

    def test_hide_nothing(self) -> None:
        points = Points(torch.zeros(1, 3, 1), token_types=torch.tensor([[0, 1, 0]]))
        assert visible(points, points) is None

    def test_refuses(self) -> None:
        with refuses(r"Points: token_types has shape \(1, 2\), coordinates allow \(1, 3\)"):
            Points(torch.zeros(1, 3, 1), token_types=torch.zeros(1, 2, dtype=torch.long))
        with refuses("Points: token_types is torch.float32, allowed are whole numbers"):
            Points(torch.zeros(1, 3, 1), token_types=torch.zeros(1, 3))
        typed = Points(torch.zeros(1, 2, 1), token_types=torch.zeros(1, 2, dtype=torch.long))
        with refuses("join: all parts must have token_types, or none"):
            join(typed, Grid(2))


class TestVisible:
    def test_everybody_sees_everybody(self) -> None:
        assert visible(Grid(3, 2), Grid(4, 2)) is None
        assert visible(Grid(3, 2), Points(torch.zeros(1, 4, 2))) is None
        assert real_tokens(Grid(3)) is None

    def test_causal_by_coordinate(self) -> None:
        allowed = visible(Grid(3), Grid(3), is_causal=True)
        assert allowed.tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]

    def test_cached_query_sees_all_its_past(self) -> None:
        allowed = visible(Grid(1, origin=4), Grid(7), is_causal=True)
        assert allowed.tolist() == [[[True] * 5 + [False] * 2]]

    def test_causal_prefix_is_in_front_of_all(self) -> None:
        allowed = visible(Grid(2, num_prefix_tokens=2), Grid(2, num_prefix_tokens=2), is_causal=True)[0]
        assert allowed.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

    def test_cached_query_sees_the_prefix_of_its_keys(self) -> None:
        allowed = visible(Grid(1, origin=1), Grid(3, num_prefix_tokens=2), is_causal=True)[0]
        assert allowed.int().tolist() == [[1, 1, 1, 1, 0]]

    def test_causal_with_pooled_keys_and_points(self) -> None:
        allowed = visible(Grid(4), Grid(4).pool(2), is_causal=True)[0]
        assert allowed.int().tolist() == [[0, 0], [1, 0], [1, 0], [1, 1]]
        points = Points(torch.tensor([[[2.0], [0.5]], [[0.0], [9.0]]]))
        assert visible(points, Grid(3), is_causal=True).int().tolist() == [
            [[1, 1, 1], [1, 0, 0]],
            [[1, 0, 0], [1, 1, 1]],
        ]

    def test_causal_needs_one_axis(self) -> None:
        with refuses("is_causal: needs one axis, the positions have 2"):
            visible(Grid(3, 3), Grid(3, 3), is_causal=True)

    def test_segments_keep_to_themselves_but_see_the_prefix(self) -> None:
        points = Points(torch.zeros(1, 3, 2), segments=torch.tensor([[0, 1, 0]]), num_prefix_tokens=1)
        allowed = visible(points, points)[0]
        assert allowed.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 1]]

    def test_segments_and_causal_together(self) -> None:
        points = Points(torch.tensor([[[0.0], [0.0], [1.0], [1.0]]]), segments=torch.tensor([[0, 1, 0, 1]]))
        allowed = visible(points, points, is_causal=True)[0]
        assert allowed.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]

    def test_padding_is_seen_by_nobody_and_sees_nobody(self) -> None:
        points = Points(torch.zeros(1, 3, 2), valid=torch.tensor([[True, False, True]]), num_prefix_tokens=1)
        assert real_tokens(points).tolist() == [[True, True, False, True]]
        allowed = visible(points, points)[0]
        assert allowed.int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]]

    def test_padding_on_one_side_only(self) -> None:
        points = Points(torch.zeros(2, 2, 2), valid=torch.tensor([[True, False], [False, True]]))
        assert visible(Grid(1, 1), points).int().tolist() == [[[1, 0]], [[0, 1]]]
        assert visible(points, Grid(1, 2)).int().tolist() == [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]

    def test_segments_on_one_side_only_are_refused(self) -> None:
        points = Points(torch.zeros(1, 3, 2), segments=torch.zeros(1, 3, dtype=torch.long))
        for queries, keys in ((points, Grid(1, 3)), (Grid(1, 3), points)):
            with refuses("segments: queries and keys must both have segments, or neither"):
                visible(queries, keys)
