"""The base class, its vector hooks, sums, and making encodings by name."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import relpos2d.encodings
from relpos2d import (
    Combined,
    Encoding,
    Grid,
    NumberEncoding,
    Points,
    attend,
    create_encoding,
    list_encodings,
    register_encoding,
)
from relpos2d.encoding import AbsoluteEncoding, RotaryEncoding, Term
from relpos2d.encodings import encoding_class, encoding_options
from relpos2d.positions import Positions
from tests.oracles import difference, gradients, multilinear, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close


class ClippedVectors(Encoding):
    """Shaw-like: on one axis, a vector per clipped offset, for one side of attention."""

    family = "vectors"
    axes = (1,)

    def __init__(self, *sizes, meets: Literal["query", "key", "value"], scaled: bool = True, heads: int = 1, **options):
        super().__init__(*sizes, **options)
        self.meets, self.scaled = meets, scaled
        self.rows = nn.Parameter(torch.randn(heads, 5, self.head_dim, dtype=options.get("dtype")))

    def terms(self) -> list[Term]:
        return [Term(self.rows, self.meets, lambda offsets: offsets[..., 0].clamp(-2, 2) + 2, scaled=self.scaled)]

    def row(self, h: int, offset: tuple[float, ...]) -> Tensor:
        """The same, one offset at a time."""
        head = self.rows[h if len(self.rows) > 1 else 0]
        return multilinear(lambda whole: head[min(max(whole[0], -2), 2) + 2], offset)


class Decomposed(Encoding):
    """Unscaled vectors for y and for x that meet the query."""

    family = "vectors"
    axes = (2,)

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        height, width = self.positions.shape
        self.rel_pos_h = nn.Parameter(torch.randn(1, 2 * height - 1, self.head_dim, dtype=options.get("dtype")))
        self.rel_pos_w = nn.Parameter(torch.randn(1, 2 * width - 1, self.head_dim, dtype=options.get("dtype")))

    def terms(self) -> list[Term]:
        height, width = self.positions.shape
        return [
            Term(self.rel_pos_h, "query", lambda d: (d[..., 0] + height - 1).clamp(0, 2 * height - 2), scaled=False),
            Term(self.rel_pos_w, "query", lambda d: (d[..., 1] + width - 1).clamp(0, 2 * width - 2), scaled=False),
        ]

    def row(self, axis: int, d: float) -> Tensor:
        rows = (self.rel_pos_h, self.rel_pos_w)[axis][0]
        last = len(rows) - 1
        return multilinear(lambda whole: rows[min(max(whole[0] + last // 2, 0), last)], (d,))


class Waves(Encoding):
    """Vectors by a formula of the offset, as in Transformer-XL, that meet the query plus something."""

    family = "vectors"

    def __init__(self, *sizes, meets: Literal["query", "key", "value"] = "query", **options):
        super().__init__(*sizes, **options)
        self.meets = meets
        self.frequency = nn.Parameter(torch.rand(self.num_heads, 1, self.head_dim, dtype=options.get("dtype")))
        self.pos_bias_v = nn.Parameter(torch.randn(self.num_heads, 1, self.head_dim, dtype=options.get("dtype")))

    def terms(self) -> list[Term]:
        def vectors(offsets: Tensor) -> Tensor:
            return (offsets.to(self.frequency.dtype) * self.frequency).sin()

        return [Term(vectors, self.meets, added=None if self.meets == "value" else self.pos_bias_v)]

    def row(self, h: int, d: tuple[float, ...]) -> Tensor:
        return (d[0] * self.frequency[h, 0]).sin()


class Projected(Encoding):
    """Vectors that the host's own projection makes of embeddings of clipped offsets, as in DeBERTa."""

    family = "vectors"

    def __init__(self, *sizes, meets: Literal["query", "key"] = "query", **options):
        super().__init__(*sizes, **options)
        self.meets = meets
        self.rows = nn.Parameter(torch.randn(1, 5, self.num_heads * self.head_dim, dtype=options.get("dtype")))

    def terms(self) -> list[Term]:
        other: Literal["query", "key"] = "key" if self.meets == "query" else "query"
        return [Term(self.rows, self.meets, lambda d: d[..., 0].clamp(-2, 2) + 2, projected=other)]


class ContentShift(Encoding):
    """Transformer-XL's u: a vector per head added to the query before content meets content."""

    family = "vectors"

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.pos_bias_u = nn.Parameter(torch.randn(self.num_heads, 1, self.head_dim, dtype=options.get("dtype")))

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        assert k.shape[1] == self.num_heads
        return self.pos_bias_u.to(q.dtype)


def place_list(positions: Positions, b: int) -> list[tuple[float, ...] | None]:
    """Place of each token of a sample, None for prefix tokens."""
    coords = positions.coords(dtype=torch.float64)
    rows = coords if coords.ndim == 2 else coords[b if len(coords) > 1 else 0]
    return [None] * positions.num_prefix_tokens + [tuple(row) for row in rows.tolist()]


def per_pair(q_pos: Positions, k_pos: Positions, vector: Callable[[int, tuple[float, ...]], Tensor], zero: Tensor):
    """(b, h, i, j) -> the vector of the pair; `zero` where a prefix token takes part."""

    def of_pair(b: int, h: int, i: int, j: int) -> Tensor:
        query, key = place_list(q_pos, b)[i], place_list(k_pos, b)[j]
        return zero if query is None or key is None else vector(h, difference(query, key))

    return of_pair


POINTS = Points(torch.tensor([[[0.0], [1.5], [-2.25], [7.0]], [[0.5], [0.5], [3.0], [-9.0]]]), num_prefix_tokens=1)
LINES = [
    (Grid(5), Grid(5)),
    (Grid(4, num_prefix_tokens=2), Grid(4, num_prefix_tokens=2)),
    (Grid(6), Grid(6).pool(2)),
    (Grid(3, step=2 / 3, num_prefix_tokens=1), Grid(5)),
    (Grid(1, origin=3), Grid(4)),
    (POINTS, POINTS),
    (POINTS, Grid(3)),
]


def inputs(q_pos: Positions, k_pos: Positions, num_heads: int = 2, head_dim: int = 3) -> list[Tensor]:
    sizes = (q_pos.num_tokens, k_pos.num_tokens, k_pos.num_tokens)
    return [torch.randn(2, num_heads, size, head_dim, dtype=torch.float64, requires_grad=True) for size in sizes]


def assert_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    assert_close(ours, theirs)
    for a, b in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert_close(a, b)


class TestTerms:
    @pytest.mark.parametrize("heads", [1, 2])
    @pytest.mark.parametrize("scaled", [True, False])
    @pytest.mark.parametrize("meets", ["query", "key", "value"])
    @pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
    def test_clipped_vectors(
        self, q_pos: Positions, k_pos: Positions, meets: Literal["query", "key", "value"], scaled: bool, heads: int
    ) -> None:
        encoding = ClippedVectors(
            2, 3, Grid(5), meets=meets, scaled=scaled, heads=heads, strength=0.5, dtype=torch.float64
        )
        q, k, v = inputs(q_pos, k_pos)
        zero = torch.zeros(3, dtype=torch.float64)
        vector = per_pair(q_pos, k_pos, encoding.row, zero)
        scale = 0.7
        if meets == "value":
            expected = pair_attention(q, k, v, scale, value=lambda b, h, i, j: 0.5 * vector(b, h, i, j))
        else:
            factor = 0.5 * (scale if scaled else 1.0)

            def number(b: int, h: int, i: int, j: int) -> Tensor:
                side = q[b, h, i] if meets == "query" else k[b, h, j]
                return factor * (side * vector(b, h, i, j)).sum()

            expected = pair_attention(q, k, v, scale, number)
        out = attend(q, k, v, encoding, q_pos, k_pos, scale=scale)
        assert_same(out, expected, [q, k, v, encoding.rows])
        assert_close(attend(q, k, v, encoding, q_pos, k_pos, scale=scale, backend="explicit"), out)

    @pytest.mark.parametrize("meets", ["query", "key", "value"])
    @pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
    def test_vectors_by_a_formula(
        self, q_pos: Positions, k_pos: Positions, meets: Literal["query", "key", "value"]
    ) -> None:
        encoding = Waves(2, 3, Grid(5), meets=meets, strength=0.5, dtype=torch.float64)
        q, k, v = inputs(q_pos, k_pos)
        vector = per_pair(q_pos, k_pos, encoding.row, torch.zeros(3, dtype=torch.float64))
        if meets == "value":
            leaves = [q, k, v, encoding.frequency]
            expected = pair_attention(q, k, v, 0.7, value=lambda b, h, i, j: 0.5 * vector(b, h, i, j))
        else:
            leaves = [q, k, v, encoding.frequency, encoding.pos_bias_v]

            def number(b: int, h: int, i: int, j: int) -> Tensor:
                side = q[b, h, i] if meets == "query" else k[b, h, j]
                return 0.7 * 0.5 * ((side + encoding.pos_bias_v[h, 0]) * vector(b, h, i, j)).sum()

            expected = pair_attention(q, k, v, 0.7, number)
        assert_same(attend(q, k, v, encoding, q_pos, k_pos, scale=0.7), expected, leaves)

    @pytest.mark.parametrize("meets", ["query", "key"])
    def test_vectors_that_the_host_projects(self, meets: Literal["query", "key"]) -> None:
        encoding = Projected(2, 3, Grid(5), meets=meets, dtype=torch.float64)
        project = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        line = Grid(4, num_prefix_tokens=1)
        q, k, v = inputs(line, line)
        made = project[1 if meets == "query" else 0](encoding.rows[0]).unflatten(-1, (2, 3))
        vector = per_pair(
            line, line, lambda h, d: made[int(min(max(d[0], -2), 2)) + 2, h], torch.zeros(3, dtype=torch.float64)
        )

        def number(b: int, h: int, i: int, j: int) -> Tensor:
            return 0.7 * ((q[b, h, i] if meets == "query" else k[b, h, j]) * vector(b, h, i, j)).sum()

        out = attend(q, k, v, Combined(encoding, positions=line), line, scale=0.7, project=project)
        used = project[1 if meets == "query" else 0]
        assert_same(out, pair_attention(q, k, v, 0.7, number), [q, k, v, encoding.rows, used.weight, used.bias])
        with refuses(
            r"shares the projections of queries and keys with its host; give them: project=\(q_proj, k_proj\)"
        ):
            attend(q, k, v, encoding, line)

    def test_a_formula_is_asked_once_per_distinct_offset(self) -> None:
        encoding, asked = Waves(2, 3, Grid(5), dtype=torch.float64), []
        (term,) = encoding.terms()

        def counting(offsets: Tensor) -> Tensor:
            asked.append(len(offsets))
            return term.vectors(offsets)

        encoding.terms = lambda: [dataclasses.replace(term, vectors=counting)]
        q, k, _ = inputs(Grid(7), Grid(4))
        encoding.score(q, k, Grid(7), Grid(4), 1.0)
        encoding.score(q, k, Grid(7).points(2), Grid(4).points(2), 1.0)
        assert asked == [10, 10]

    @pytest.mark.parametrize(
        ("q_pos", "k_pos"),
        [
            (Grid(3, 4), Grid(3, 4)),
            (Grid(2, 3, num_prefix_tokens=2), Grid(2, 3, num_prefix_tokens=2)),
            (Grid(4, 2), Grid(4, 2).pool(2)),
            (Grid(2, 3).points(2), Grid(2, 3, step=0.5)),
        ],
    )
    def test_decomposed(self, q_pos: Positions, k_pos: Positions) -> None:
        encoding = Decomposed(2, 3, Grid(3, 4), dtype=torch.float64)
        q, k, v = inputs(q_pos, k_pos)
        vector = per_pair(
            q_pos,
            k_pos,
            lambda h, d: encoding.row(0, d[0]) + encoding.row(1, d[1]),
            torch.zeros(3, dtype=torch.float64),
        )
        expected = pair_attention(q, k, v, 3**-0.5, lambda b, h, i, j: (q[b, h, i] * vector(b, h, i, j)).sum())
        out = attend(q, k, v, encoding, q_pos, k_pos)
        assert_same(out, expected, [q, k, v, encoding.rel_pos_h, encoding.rel_pos_w])

    def test_content_shift(self) -> None:
        grid = Grid(2, 3, num_prefix_tokens=1)
        encoding = ContentShift(2, 3, grid, strength=0.5, dtype=torch.float64)
        q, k, v = inputs(grid, grid)
        shift = encoding.pos_bias_u
        expected = pair_attention(q, k, v, 0.7, lambda b, h, i, j: 0.7 * 0.5 * (shift[h, 0] * k[b, h, j]).sum())
        assert_same(attend(q, k, v, encoding, grid, scale=0.7), expected, [q, k, v, shift])
        encoding.set_strength(0.0)
        assert_close(attend(q, k, v, encoding, grid, scale=0.7), pair_attention(q, k, v, 0.7))

    @pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
    def test_sum_of_vectors_numbers_content_and_rotation(self, strength: float) -> None:
        line = Grid(5)
        options: dict = {"dtype": torch.float64}
        parts = [
            ClippedVectors(2, 4, line, meets="key", strength=0.5, **options),
            ClippedVectors(2, 4, line, meets="value", **options),
            ClippedVectors(2, 4, line, meets="query", scaled=False, **options),
            ContentShift(2, 4, line, strength=0.25, **options),
            create_encoding("table", 2, 4, line, strength=0.5, **options),
            create_encoding("alibi", 2, 4, line, **options),
            create_encoding("rope_axial", 2, 4, line, strength=0.5, **options),
        ]
        positions = Grid(5, num_prefix_tokens=2)
        encoding = Combined(*parts, positions=positions, strength=strength)
        redraw(encoding)
        q, k, v = inputs(positions, positions, head_dim=4)
        key, value, query, shift, table, alibi, _ = parts
        zero = torch.zeros(4, dtype=torch.float64)
        key_of, value_of, query_of = (per_pair(positions, positions, p.row, zero) for p in (key, value, query))
        turned = create_encoding("rope_axial", 2, 4, line, strength=0.5 * strength, **options)
        full_q = q + strength * 0.25 * shift.pos_bias_u
        q_turned, k_turned = turned.rotate(full_q, positions), turned.rotate(k, positions)
        blocks = {(True, False): 0, (False, True): 1, (True, True): 2}

        def number(b: int, h: int, i: int, j: int) -> Tensor:
            total = 0.5 * (q_turned[b, h, i] * k_turned[b, h, j]).sum() - 0.5 * (q[b, h, i] * k[b, h, j]).sum()
            total = total + strength * 0.5 * 0.5 * (k[b, h, j] * key_of(b, h, i, j)).sum()
            total = total + strength * (q[b, h, i] * query_of(b, h, i, j)).sum()
            if i >= 2 and j >= 2:
                row = 0.5 * table.relative_position_bias_table[i - j + 4, h] - alibi.slopes[h] * abs(i - j)
            else:
                row = encoding.prefix_bias[blocks[i < 2, j < 2], h]
            return total + strength * row

        expected = pair_attention(q, k, v, 0.5, number, value=lambda b, h, i, j: strength * value_of(b, h, i, j))
        leaves = [q, k, v, *(p for p in encoding.parameters())]
        assert_same(attend(q, k, v, encoding, positions), expected, leaves)

    @pytest.mark.parametrize(("batch", "heads"), [(1, 2), (2, 4), (4, 2), (3, 2)])
    def test_numbers_and_vectors_whatever_the_batch(self, batch: int, heads: int) -> None:
        line = Grid(5, num_prefix_tokens=1)
        encoding = create_encoding(["t5", "shaw"], heads, 4, line, dtype=torch.float64)
        redraw(encoding)
        q, k, v = torch.randn(3, batch, heads, 6, 4, dtype=torch.float64)
        scores = 0.5 * q @ k.transpose(-1, -2) + encoding.bias(line, line) + encoding.score(q, k, line, line, 0.5)
        for options in ({}, {"backend": "explicit"}, {"backend": "sdpa"}, {"memory_limit": 3000 * batch * heads}):
            assert_close(attend(q, k, v, encoding, line, **options), scores.softmax(-1) @ v)

    def test_values_need_the_weights(self) -> None:
        encoding = ClippedVectors(2, 3, Grid(5), meets="value", dtype=torch.float64)
        q, k, v = inputs(Grid(5), Grid(5))
        nested = Combined(Combined(encoding))
        assert_close(attend(q, k, v, nested, Grid(5)), attend(q, k, v, encoding, Grid(5)))
        for each in (encoding, Combined(encoding), nested):
            with refuses(f"backend 'sdpa' has no weights to give to {type(each).__name__}"):
                attend(q, k, v, each, Grid(5), backend="sdpa")

    def test_half_precision_keeps_its_dtype(self) -> None:
        for meets in ("query", "key", "value"):
            encoding = ClippedVectors(2, 3, Grid(5), meets=meets).to(torch.bfloat16)
            x = torch.randn(1, 2, 5, 3, dtype=torch.bfloat16)
            out = attend(x, x, x, encoding, Grid(5))
            assert out.dtype == torch.bfloat16
            full = attend(x.float(), x.float(), x.float(), encoding.float(), Grid(5))
            assert_close(out.float(), full, torch.bfloat16)


class TestBase:
    def test_strength_is_saved_and_set(self) -> None:
        encoding = Encoding(2, 4, Grid(5), strength=0.25)
        assert encoding.state_dict() == {"strength": torch.tensor(0.25)}
        encoding.set_strength(1.0)
        assert encoding.strength == 1
        encoding.reset_parameters()
        assert encoding.strength == 0.25
        assert Encoding(2, 4, Grid(5)).strength == 1
        assert Encoding(2, 4, Grid(5), dtype=torch.float64, device="meta").strength.dtype == torch.float64
        assert Encoding(2, 4, Grid(5), device="meta").strength.is_meta

    @pytest.mark.parametrize("strength", [-0.1, 1.1, math.nan])
    def test_strength_out_of_range(self, strength: float) -> None:
        text = r"Encoding: strength=.* must be between 0 \(no encoding\) and 1 \(all of it\)"
        with refuses(text):
            Encoding(2, 4, Grid(5), strength=strength)
        encoding = Encoding(2, 4, Grid(5))
        with refuses(text):
            encoding.set_strength(strength)
        assert encoding.strength == 1

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((0, 4, Grid(5)), "NoEncoding: num_heads=0 must be a whole number of at least 1"),
            ((2, 0, Grid(5)), "NoEncoding: head_dim=0 must be a whole number of at least 1"),
            ((2, -4, Grid(5)), "NoEncoding: head_dim=-4 must"),
            ((2, 4.0, Grid(5)), "NoEncoding: head_dim=4.0 must be a whole number"),
            ((2.5, 4, Grid(5)), "NoEncoding: num_heads=2.5 must be a whole number"),
            ((2, 4, (5, 5)), r"NoEncoding: positions=\(5, 5\) must be a Grid, for example Grid\(14, 14\)"),
        ],
    )
    def test_refuses(self, arguments: tuple, text: str) -> None:
        with refuses(text):
            create_encoding("none", *arguments)

    def test_one_head_of_one_channel_is_allowed(self) -> None:
        encoding = create_encoding("none", 1, 1, Grid(1))
        assert (encoding.num_heads, encoding.head_dim, encoding.positions) == (1, 1, Grid(1))
        assert repr(encoding) == "NoEncoding(num_heads=1, head_dim=1, positions=Grid(1))"

    def test_axes_without_a_meaning(self) -> None:
        class Line(Encoding):
            axes = (1,)

        with refuses(r"Line: has no meaning on 2 axes \(Grid\(3, 3\)\), allowed: 1$"):
            Line(2, 4, Grid(3, 3))
        assert Line(2, 4, Grid(3)).positions == Grid(3)

    def test_what_the_base_does_not_know(self) -> None:
        grid = Grid(3)
        for base in (NumberEncoding, AbsoluteEncoding, RotaryEncoding):
            encoding = base(2, 4, grid)
            with pytest.raises(NotImplementedError):
                {
                    NumberEncoding: lambda e: e.bias(grid, grid),
                    AbsoluteEncoding: lambda e: e.embed(torch.zeros(1, 3, 8), grid),
                    RotaryEncoding: lambda e: e.rotate(torch.zeros(1, 2, 3, 4), grid),
                }[base](encoding)

    def test_scale_of_the_paper_is_information(self) -> None:
        assert create_encoding("table", 2, 16, Grid(5)).reference_scale(16) == 0.25

    def test_set_window_size_is_for_those_who_have_one(self) -> None:
        encoding = create_encoding("rope_axial", 2, 4, Grid(5))
        encoding.set_window_size((9,))
        assert encoding.positions == Grid(5)

    def test_number_formula_is_all_a_subclass_writes(self) -> None:
        class Slope(NumberEncoding):
            def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
                return offsets.sum(-1, keepdim=True) * torch.arange(1.0, self.num_heads + 1)

        encoding = Slope(2, 4, Grid(3, 4), strength=0.5)
        bias = encoding.bias(Grid(3, 4), Grid(2, 2, origin=1))
        offset = Grid(3, 4).coords()[7] - Grid(2, 2, origin=1).coords()[2]
        assert bias.shape == (2, 12, 4)
        assert_close(bias[:, 7, 2], 0.5 * offset.sum() * torch.tensor([1.0, 2.0]))

    def test_numbers_are_evaluated_once_per_distinct_offset(self) -> None:
        seen = []

        class Counting(NumberEncoding):
            def at(self, offsets: Tensor, query: Tensor | None = None) -> Tensor:
                seen.append(offsets.shape[:-1].numel())
                return offsets[..., :1].expand(*offsets.shape[:-1], self.num_heads)

        encoding = Counting(2, 4, Grid(3, 4))
        encoding.bias(Grid(3, 4), Grid(3, 4))
        # steps that share hardly a measure: 6 * 8 + 5 * 7 + 1 lattice points for 7 * 8 pairs
        odd = encoding.bias(Grid(1, 7, step=8), Grid(1, 8, step=7))
        equal = Counting(2, 4, Grid(1)).bias(Grid(1, 1), Grid(1, 1))
        assert seen == [5 * 7, 7 * 8, 1]
        assert_close(odd[0, 5, 3], torch.tensor(0.0))
        assert equal.shape == (2, 1, 1)

    def test_prepared_once_for_many(self) -> None:
        q_pos, k_pos = Grid(4, 6), Grid(4, 6).pool(2)
        encoding = create_encoding("table", 2, 3, q_pos, dtype=torch.float64)
        q, k, v = inputs(q_pos, k_pos)
        prepared = encoding.prepare(q_pos, k_pos)
        expected = attend(q, k, v, encoding, q_pos, k_pos)
        assert_close(attend(q, k, v, prepared, q_pos, k_pos), expected)
        assert_close(attend(q, k, v, prepared, q_pos), expected)
        own = encoding.prepare(q_pos)
        assert (own.q_pos, own.k_pos) == (q_pos, q_pos)
        assert_close(own.bias, encoding.bias(q_pos, q_pos))
        twice = attend(q, k, v, prepared, q_pos) + attend(2 * q, k, v, prepared, q_pos)
        plain = expected + attend(2 * q, k, v, encoding, q_pos, k_pos)
        leaves = [encoding.relative_position_bias_table]
        assert_close(gradients(twice, leaves)[0], gradients(plain, leaves)[0])
        for wrong in ((Grid(6, 4),), (q_pos, q_pos)):
            with refuses(r"attend: prepared for Grid\(4, 6\) and Grid\(2, 3, step"):
                attend(q, k, v, prepared, *wrong)

    def test_prepared_without_numbers(self) -> None:
        grid = Grid(4, 6)
        encoding = create_encoding("rope_axial", 2, 4, grid, dtype=torch.float64)
        q, k, v = inputs(grid, grid, head_dim=4)
        assert encoding.prepare(grid).bias is None
        assert_close(attend(q, k, v, encoding.prepare(grid), grid), attend(q, k, v, encoding, grid))


class TestRotary:
    @pytest.mark.parametrize("shape", [(1, 2, 23, 4), (1, 2, 24, 6)])
    def test_refuses_what_does_not_fit(self, shape: tuple[int, ...]) -> None:
        encoding = create_encoding("rope_mixed", 2, 4, Grid(4, 6))
        with refuses(r"MixedRope: x has \d+ tokens"):
            encoding.rotate(torch.zeros(shape), Grid(4, 6))


class TestCombined:
    def test_numbers_add_up_with_their_strengths(self) -> None:
        grid, offsets = Grid(3, 4), torch.randn(5, 2)
        table, cpb = (create_encoding(name, 2, 4, grid, strength=0.5) for name in ("table", "cpb"))
        encoding = Combined(table, cpb, create_encoding("rope_axial", 2, 4, grid), strength=0.25)
        redraw(encoding)
        assert_close(encoding.at(offsets), 0.5 * (table.at(offsets) + cpb.at(offsets)))
        assert_close(encoding.bias(grid, grid), 0.25 * (table.bias(grid, grid) + cpb.bias(grid, grid)))

    def test_absolute_parts_are_embedded(self) -> None:
        grid = Grid(3, 4)
        learned = create_encoding("learned", 2, 4, grid)
        sincos = create_encoding("sincos", 2, 4, grid, strength=0.5)
        table = create_encoding("table", 2, 4, grid)
        x = torch.randn(2, 12, 8)
        by_hand = (learned.embed(x, grid) - x) + (sincos.embed(x, grid) - x)
        assert_close(Combined(learned, table, sincos).embed(x, grid), x + by_hand)
        assert_close(Combined(Combined(learned), sincos, strength=0.5).embed(x, grid), x + 0.5 * by_hand)
        assert torch.equal(Combined(table).embed(x, grid), x)

    def test_prefix_terms_only_where_there_are_numbers(self) -> None:
        grid = Grid(3, 4)
        positions = Grid(3, 4, num_prefix_tokens=1)
        rope, table = (create_encoding(name, 2, 4, grid) for name in ("rope_axial", "table"))
        assert Combined(rope, positions=positions).prefix_bias is None
        assert Combined(rope, positions=positions).bias(positions, positions) is None
        assert Combined(rope, table).prefix_bias is None
        assert Combined(rope, table, positions=positions).prefix_bias.shape == (3, 2)
        assert Combined(rope, Combined(table), positions=positions).prefix_bias.shape == (3, 2)

    def test_reset_resets_all(self) -> None:
        encoding = create_encoding(["table", {"name": "alibi", "strength": 0.5}], 2, 4, Grid(3, num_prefix_tokens=1))
        redraw(encoding)
        for part in encoding:
            part.set_strength(0.125)
        encoding.set_strength(0.25)
        encoding.reset_parameters()
        assert encoding.strength == 1
        assert [part.strength.item() for part in encoding] == [1, 0.5]
        assert encoding.prefix_bias.abs().max() == 0
        assert next(iter(encoding)).relative_position_bias_table.abs().max() < 0.2

    def test_window_and_derived_buffers_reach_the_parts(self) -> None:
        encoding = create_encoding(["table", ["cpb"]], 2, 4, Grid(3, 4))
        encoding.set_window_size((5, 6))
        table, inner = encoding
        assert table.window_size == next(iter(inner)).window_size == (5, 6)
        called = []

        class Derived(Encoding):
            def init_non_persistent_buffers(self) -> None:
                called.append(self)

        part = Derived(2, 4, Grid(3))
        Combined(part).init_non_persistent_buffers()
        assert called == [part]
        part.reset_parameters()
        assert called == [part, part]

    def test_takes_device_and_dtype_of_its_parts(self) -> None:
        part = create_encoding("table", 2, 4, Grid(3), dtype=torch.float64, device="meta")
        encoding = Combined(part, positions=Grid(3, num_prefix_tokens=1))
        for tensor in (encoding.strength, encoding.prefix_bias):
            assert tensor.is_meta
            assert tensor.dtype == torch.float64
        assert encoding.positions == Grid(3, num_prefix_tokens=1)
        assert Combined(part).positions == Grid(3)

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Combined(), "^Combined: needs at least one encoding"),
            (
                lambda: Combined(create_encoding("none", 2, 4, Grid(3)), create_encoding("none", 3, 4, Grid(3))),
                "Combined: .* does not fit .*; heads, head_dim and axes must be equal",
            ),
            (
                lambda: Combined(create_encoding("none", 2, 4, Grid(3)), create_encoding("none", 2, 5, Grid(3))),
                "Combined: .* does not fit",
            ),
            (
                lambda: Combined(create_encoding("none", 2, 4, Grid(3)), create_encoding("none", 2, 4, Grid(3, 3))),
                "Combined: .* does not fit",
            ),
            (
                lambda: Combined(create_encoding("table", 2, 4, Grid(3, num_prefix_tokens=1))),
                "Combined: owns the prefix terms; make its parts for a grid without prefix tokens",
            ),
            (lambda: Combined(create_encoding("none", 2, 4, Grid(3)), strength=2.0), "Combined: strength=2.0"),
        ],
    )
    def test_refuses(self, make, text: str) -> None:
        with refuses(text):
            make()


class TestByName:
    def test_every_file_is_an_encoding_and_every_encoding_a_file(self) -> None:
        names = {info.name for info in list_encodings()}
        expected = {"none", "sincos", "learned", "table", "cpb", "rope_axial", "rope_mixed", "alibi"}
        assert expected <= names
        for info in list_encodings():
            cls = encoding_class(info.name)
            assert cls.__module__ == f"relpos2d.encodings.{info.name}"
            assert (cls.family, cls.axes, cls.formula, cls.paper) == (info.family, info.axes, info.formula, info.paper)
            assert info.formula
            assert info.paper or info.name == "none"
        assert [(i.family, i.name) for i in list_encodings()] == sorted((i.family, i.name) for i in list_encodings())

    def test_options_of_a_constructor(self) -> None:
        options = encoding_options(encoding_class("rope_mixed"))
        assert list(options) == ["theta", "layout", "strength"]
        assert options["theta"].default == 10.0
        assert options["theta"].annotation is float
        for info in list_encodings():
            for option in encoding_options(encoding_class(info.name)).values():
                assert option.default is not option.empty, (info.name, option)
                assert option.annotation is not option.empty, (info.name, option)

    def test_from_a_mapping(self) -> None:
        spec = {"name": "rope_mixed", "theta": 3.0, "strength": 0.5}
        encoding = create_encoding(spec, 2, 4, Grid(3, 4))
        assert (encoding.name, encoding.theta, encoding.strength) == ("rope_mixed", 3.0, 0.5)
        assert create_encoding(spec, 2, 4, Grid(3, 4), theta=7.0).theta == 7.0
        assert spec == {"name": "rope_mixed", "theta": 3.0, "strength": 0.5}

    def test_from_a_list(self) -> None:
        positions = Grid(3, 4, num_prefix_tokens=1, step=0.5, origin=2)
        encoding = create_encoding(["table", {"name": "cpb", "hidden_dim": 5}], 2, 4, positions, strength=0.5)
        assert isinstance(encoding, Combined)
        assert (encoding.name, encoding.strength, encoding.positions) == ("combined", 0.5, positions)
        table, cpb = encoding
        assert (table.name, cpb.name, cpb.cpb_mlp[0].out_features) == ("table", "cpb", 5)
        assert table.positions == Grid(3, 4, step=0.5, origin=2)
        named = create_encoding({"name": ["table", "alibi"], "strength": 0.25}, 2, 4, positions)
        assert (named.strength, [part.name for part in named]) == (0.25, ["table", "alibi"])

    @pytest.mark.parametrize("name", [info.name for info in list_encodings()])
    def test_every_constructor_hands_on_strength_device_and_dtype(self, name: str) -> None:
        positions = Grid(3, num_prefix_tokens=1)
        encoding = create_encoding(name, 2, 4, positions, strength=0.25, dtype=torch.float64)
        assert encoding.strength == 0.25
        assert encoding.strength.dtype == torch.float64
        meta = create_encoding(name, 2, 4, positions, device="meta")
        assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))

    def test_device_and_dtype(self) -> None:
        for spec in ("table", ["table", "cpb"]):
            encoding = create_encoding(spec, 2, 4, Grid(3), device="meta", dtype=torch.bfloat16)
            assert all(p.is_meta and p.dtype == torch.bfloat16 for p in encoding.parameters())
            assert all(b.is_meta and b.dtype == torch.bfloat16 for b in encoding.buffers())

    @pytest.mark.parametrize(
        ("spec", "options", "text"),
        [
            ("rope_mixd", {}, "unknown encoding 'rope_mixd'; did you mean 'rope_mixed'[?] known: alibi, cpb"),
            ("tabel", {}, "unknown encoding 'tabel'; did you mean 'table'[?]"),
            ("zzzzzz", {}, "unknown encoding 'zzzzzz'; known: alibi"),
            ({"theta": 3.0}, {}, "unknown encoding ''; known"),
            (
                "rope_mixed",
                {"teta": 3.0},
                "'rope_mixed' has no option 'teta'; did you mean 'theta'[?] options: theta, layout",
            ),
            ("alibi", {"theta": 3.0}, "encoding 'alibi' has no option 'theta'; options: strength"),
            ({"name": "table", "device": "cpu"}, {}, "encoding 'table' has no option 'device'"),
            (["table", "rope_mixd"], {}, "unknown encoding 'rope_mixd'"),
            (["table"], {"theta": 3.0}, r"give the options \['theta'\] to the members of the list, one by one"),
            ([], {}, "Combined: needs at least one encoding"),
            (None, {}, "create_encoding: None must be a name, a mapping with a name, or a list of these"),
            (7, {}, "create_encoding: 7 must be a name"),
        ],
    )
    def test_refuses(self, spec, options: dict, text: str) -> None:
        with refuses(text):
            create_encoding(spec, 2, 4, Grid(3, 4), **options)

    def test_list_refuses_positions_that_are_no_grid(self) -> None:
        with refuses(r"create_encoding: positions=\(3, 4\) must be a Grid"):
            create_encoding(["table"], 2, 4, (3, 4))

    def test_register_from_outside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(relpos2d.encodings, "_classes", dict(relpos2d.encodings._classes))

        @register_encoding
        class Mine(Encoding):
            name = "mine"

        assert register_encoding(Mine) is Mine
        assert isinstance(create_encoding("mine", 2, 4, Grid(3)), Mine)
        assert "mine" in {info.name for info in list_encodings()}

        class Other(Encoding):
            name = "mine"

        class Nameless(Encoding):
            pass

        with refuses(r"the name 'mine' belongs to tests.test_encoding.Mine"):
            register_encoding(Other)
        with refuses("register_encoding: Nameless needs a class attribute `name`"):
            register_encoding(Nameless)
        assert encoding_class("mine") is Mine
