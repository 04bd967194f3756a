"""check() must catch what is broken, name where, and let everything relative through."""

import pytest
import torch
from torch import nn

import relpos2d
from relpos2d import CheckError, Combined, Encoding, Grid, NumberEncoding, RotaryEncoding, check, create_encoding
from relpos2d.encoding import Term, _with_prefix

GRID = Grid(3, 5, num_prefix_tokens=2)
RELATIVE = [info.name for info in relpos2d.list_encodings() if info.family != "absolute"]
GRIDS = [Grid(7), Grid(5, 3), GRID, Grid(3, 2, 5), Grid(3, 5, step=0.5, origin=(-1, 2))]


def of_name(name: str, grid: Grid, **options: object) -> Encoding:
    return create_encoding(name, 3, 24, grid, **options)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", RELATIVE)
def test_every_relative_encoding_passes_where_it_has_a_meaning(name: str, grid: Grid) -> None:
    axes = next(info.axes for info in relpos2d.list_encodings() if info.name == name)
    if axes is not None and grid.num_axes not in axes:
        with pytest.raises(ValueError, match="has no meaning on"):
            of_name(name, grid)
        return
    assert check(of_name(name, grid), grid).grid == grid


@pytest.mark.parametrize("strength", [0.0, 0.5])
@pytest.mark.parametrize("name", ["table", "rope_mixed"])
def test_reduced_strength_passes(name: str, strength: float) -> None:
    check(of_name(name, GRID, strength=strength), GRID)


def test_sums_pass() -> None:
    check(create_encoding(["table", "rope_axial", "none"], 3, 24, GRID), GRID)


@pytest.mark.parametrize(
    ("spec", "num_parameters"),
    [
        ({"name": "deberta", "share_projections": True, "norm_embeddings": True, "num_buckets": 4}, 3),
        ([{"name": "deberta", "share_projections": True, "num_buckets": 4}, "alibi"], 2),
        ({"name": "xlnet", "token_types": True}, 5),
        ([{"name": "xlnet", "token_types": True}, "alibi"], 6),
    ],
    ids=str,
)
def test_projections_of_a_host_and_types_of_tokens_are_stood_in_for(spec: object, num_parameters: int) -> None:
    grid = Grid(5, num_prefix_tokens=1)
    report = check(create_encoding(spec, 2, 4, grid), grid)
    observed = report["a gradient reaches every parameter"].observation
    assert observed == f"{num_parameters} of {num_parameters}"


def test_a_term_for_types_that_cannot_learn_is_found() -> None:
    encoding = of_name("xlnet", Grid(7), token_types=True)
    parts_score = encoding._parts_score
    encoding._parts_score = lambda *args: None if (score := parts_score(*args)) is None else score.detach()
    with pytest.raises(CheckError, match="none reaches r_s_bias"):
        check(encoding, Grid(7))


@pytest.mark.parametrize("name", ["sincos", "learned"])
def test_absolute_encodings_are_named_so_with_two_pairs_and_values(name: str) -> None:
    with pytest.raises(CheckError, match=r"is absolute, .* -> .* has .* but .* -> .* has .*, both at offset \("):
        check(of_name(name, GRID), GRID)


def test_an_absolute_member_of_a_sum_is_found() -> None:
    with pytest.raises(CheckError, match=r"Combined on .*Learned is absolute"):
        check(create_encoding(["table", "learned"], 3, 24, GRID), GRID)


def test_the_encoding_and_the_random_state_are_left_alone() -> None:
    encoding = of_name("table", GRID, strength=0.25).eval()
    before = {name: value.clone() for name, value in encoding.state_dict().items()}
    state = torch.get_rng_state()
    check(encoding, GRID)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in encoding.state_dict().items())
    assert not encoding.training
    assert encoding.relative_position_bias_table.dtype == torch.float32
    assert all(parameter.grad is None for parameter in encoding.parameters())


def test_the_report_is_a_table_of_measured_errors() -> None:
    report = check(of_name("table", GRID), GRID)
    line = report["depends on the offset alone"]
    assert 0 <= line.error <= line.allowed
    assert report["tells offsets apart"].observation == "3 of 3 heads"
    assert report["  along the axes"].observation == "0, 1"
    assert report["  tells d from -d"].observation == "yes"
    assert report["a gradient reaches every parameter"].observation == "2 of 2"
    text = str(report)
    assert text.startswith("OffsetTable on Grid(3, 5, num_prefix_tokens=2): all properties hold")
    assert all(property_.name in text for property_ in report.properties)
    rows = {row.strip().split("  ")[0]: len(row) for row in text.splitlines()[2:]}
    assert rows["property"] == rows["depends on the offset alone"] == rows["Points equal Grid"]
    assert rows["tells offsets apart"] == rows["along the axes"] == rows["a gradient reaches every parameter"]


def test_blind_to_direction_is_relative_and_said() -> None:
    assert check(of_name("alibi", GRID), GRID)["  tells d from -d"].observation == "no"


class BlindToColumns(NumberEncoding):
    def at(self, offsets, query=None):
        return offsets[..., :1].expand(*offsets.shape[:-1], self.num_heads)


def test_blind_to_an_axis_is_relative_and_said() -> None:
    assert check(BlindToColumns(3, 24, GRID), GRID)["  along the axes"].observation == "0"


# Broken encodings ----------------------------------------------------------------------------------------------------


class Distance(NumberEncoding):
    """Right: a learned slope, both axes, direction counts. The broken ones below differ in one thing."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.slope = nn.Parameter(torch.ones(self.num_heads))

    def at(self, offsets, query=None):
        return (offsets[..., :1] + 0.3 * offsets[..., 1:] ** 2) * self.slope


class DistanceOfPairs(Distance):
    """The same, written out for each pair of places, as the broken ones need it."""

    def bias(self, q_pos, k_pos):
        prefix = q_pos.num_prefix_tokens, k_pos.num_prefix_tokens
        return _with_prefix(self._numbers(q_pos, k_pos), self._prefix(), *prefix)

    def _numbers(self, q_pos, k_pos):
        return self.at(q_pos.offsets(k_pos, dtype=torch.float64)).movedim(-1, -3) * self.strength


def test_written_out_for_each_pair_it_is_still_right() -> None:
    check(DistanceOfPairs(3, 24, GRID).double(), GRID)


class TransposedRaster(DistanceOfPairs):
    """The bias of a (W, H) grid laid over the tokens of an (H, W) grid."""

    def _numbers(self, q_pos, k_pos):
        if isinstance(q_pos, Grid):
            q_pos, k_pos = (Grid(*reversed(pos.shape)) for pos in (q_pos, k_pos))
        return super()._numbers(q_pos, k_pos)


class TransposedOnGridsOnly(DistanceOfPairs):
    """Relative, but dy and dx are exchanged on the way of Grid."""

    def _numbers(self, q_pos, k_pos):
        numbers = self.at(q_pos.offsets(k_pos, dtype=torch.float64).flip(-1)).movedim(-1, -3) * self.strength
        return numbers if isinstance(q_pos, Grid) else super()._numbers(q_pos, k_pos)


class KeyOnly(DistanceOfPairs):
    """ALiBi's row of key places, right only under a causal mask."""

    def _numbers(self, q_pos, k_pos):
        row = k_pos.coords(dtype=torch.float64).sum(-1)
        return (row[..., None, :] * self.slope[:, None, None] + 0 * q_pos.coords().sum()).expand(
            *row.shape[:-1], self.num_heads, q_pos.num_places, k_pos.num_places
        )


class Rolled(DistanceOfPairs):
    """Off by one among the keys, as with a prefix token that is not counted."""

    def _numbers(self, q_pos, k_pos):
        numbers = super()._numbers(q_pos, k_pos)
        return numbers.roll(1, dims=-1)


class Constant(Distance):
    def at(self, offsets, query=None):
        return 0 * super().at(offsets) + self.slope


class AlwaysZero(Distance):
    """As one published KERPLE: -p log(1) whatever the offset."""

    def at(self, offsets, query=None):
        return -self.slope * torch.log(torch.ones_like(offsets[..., :1]) + 0 * offsets[..., :1])


class DeadParameter(Distance):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.unused = nn.Parameter(torch.ones(2))


class Detached(Distance):
    """The table gathered once and never again: the parameter cannot learn."""

    def at(self, offsets, query=None):
        return super().at(offsets).detach()


class NotFinite(Distance):
    def at(self, offsets, query=None):
        return torch.log(offsets.abs()).sum(-1, keepdim=True) * self.slope


class IgnoresStrength(Distance):
    def bias(self, q_pos, k_pos):
        strength, full = self.strength, torch.ones_like(self.strength)
        self._buffers["strength"] = full
        try:
            return super().bias(q_pos, k_pos)
        finally:
            self._buffers["strength"] = strength


class PlacesInPrefixBlock(Distance):
    """The grid's numbers reach into the rows of the prefix."""

    def bias(self, q_pos, k_pos):
        bias = super().bias(q_pos, k_pos).clone()
        if q_pos.num_prefix_tokens:
            bias[..., 0, -1] += self.strength
        return bias


class Rotary(RotaryEncoding):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.freqs = nn.Parameter(torch.linspace(0.1, 0.7, self.head_dim).unflatten(0, (2, -1)))

    def angles(self, coords):
        return (coords @ self.freqs.to(coords.dtype)).unsqueeze(-3)


class BothSigns(Rotary):
    """Keys turn the other way: the score knows the sum of the places."""

    def rotate(self, x, pos, role="query", *, strength=1.0):
        return super().rotate(x, pos, role, strength=strength if role == "query" else -strength)


class QueryOnly(Rotary):
    def rotate(self, x, pos, role="query", *, strength=1.0):
        return super().rotate(x, pos, role, strength=strength) if role == "query" else x


class MixedLayouts(Rotary):
    """Angles repeated for neighbours, halves rotated."""

    def rotate(self, x, pos, role="query", *, strength=1.0):
        angles = self.angles(pos.coords(dtype=x.dtype)) * self.strength * strength
        angles = nn.functional.pad(angles.repeat_interleave(2, -1), (0, 0, pos.num_prefix_tokens, 0))
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class PrefixTurned(Rotary):
    """All tokens stand in line and the prefix tokens have turns of their own."""

    def rotate(self, x, pos, role="query", *, strength=1.0):
        turned = super().rotate(x, pos, role, strength=strength)
        if not pos.num_prefix_tokens:
            return turned
        quarter = torch.cat((-x[..., 1::2, None], x[..., 0::2, None]), -1).flatten(-2)
        p = pos.num_prefix_tokens
        return torch.cat((torch.lerp(x, quarter, self.strength)[..., :p, :], turned[..., p:, :]), -2)


class PrefixShifted(Rotary):
    """The unturned entry stands at the end though the prefix is in front: each patch has its neighbour's place."""

    def rotate(self, x, pos, role="query", *, strength=1.0):
        return (
            super()
            .rotate(x.roll(pos.num_prefix_tokens, -2), pos, role, strength=strength)
            .roll(-pos.num_prefix_tokens, -2)
        )


class LowPrecisionPlaces(Rotary):
    def angles(self, coords):
        return super().angles((coords + 255).bfloat16().to(coords.dtype))


class ValueOfTheKey(Encoding):
    """Vectors that join the output and belong to the key's place, not to the offset."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.vectors = nn.Parameter(torch.linspace(-1, 1, 40 * self.head_dim).view(40, -1))

    def value(self, weights, q_pos, k_pos):
        return self.strength * weights @ self.vectors[: weights.shape[-1]]


class ValueOfTheOffset(Encoding):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.vectors = nn.Parameter(torch.linspace(-1, 1, 99 * self.head_dim).view(1, 99, -1))

    def terms(self):
        return [Term(self.vectors, "value", lambda d: (d[..., 0] + 4) * 11 + d[..., 1] + 5)]


class TermsOfTheOffset(ValueOfTheOffset):
    def terms(self):
        bucket = super().terms()[0].bucket
        return [Term(self.vectors, meets, bucket) for meets in ("query", "key", "value")]


@pytest.mark.parametrize("cls", [Distance, Rotary, ValueOfTheOffset, TermsOfTheOffset])
def test_the_right_ones_pass(cls: type[Encoding]) -> None:
    report = check(cls(3, 24, GRID), GRID)
    assert report["tells offsets apart"].observation == "3 of 3 heads"


@pytest.mark.parametrize(
    ("cls", "property_name", "details"),
    [
        (TransposedRaster, "depends on the offset alone", "score of pairs with one offset differ"),
        (TransposedOnGridsOnly, "Points equal Grid", "with Grid and .* with Points"),
        (KeyOnly, "depends on the offset alone", "both at offset"),
        (Rolled, "depends on the offset alone", "both at offset"),
        (Constant, "tells offsets apart", r"all scores are equal: \(0, 0\) -> \(0, 0\) and \(0, 0\) -> \(2, 4\)"),
        (AlwaysZero, "tells offsets apart", "all scores are equal"),
        (DeadParameter, "a gradient reaches every parameter", "none reaches unused"),
        (Detached, "a gradient reaches every parameter", "none reaches slope"),
        (NotFinite, "finite", r"the score of \(0, 0\) -> \(0, 0\) in head 0 is -inf"),
        (IgnoresStrength, "strength 0 adds nothing", "without the encoding it is"),
        (
            PlacesInPrefixBlock,
            "constant within prefix blocks",
            r"block prefix to patch, head 0: prefix 0 -> \(2, 4\) has",
        ),
        (BothSigns, "depends on the offset alone", "both at offset"),
        (QueryOnly, "depends on the offset alone", "both at offset"),
        (MixedLayouts, "depends on the offset alone", "both at offset"),
        (PrefixTurned, "prefix tokens are not turned", "the query of prefix [01] in head"),
        (PrefixShifted, "depends on the offset alone", "both at offset"),
        (LowPrecisionPlaces, "depends on the offset alone", "both at offset"),
        (ValueOfTheKey, "depends on the offset alone", "the value of pairs with one offset differ"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_encoding_is_caught_and_told(cls: type[Encoding], property_name: str, details: str) -> None:
    with pytest.raises(CheckError, match=details) as caught:
        check(cls(3, 24, GRID), GRID)
    assert caught.value.property_name == property_name
    assert caught.value.encoding == cls.__name__
    assert f"{cls.__name__} on {GRID} fails at '{property_name}'" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_broken_member_of_a_sum_is_caught() -> None:
    places = Grid(*GRID.shape)
    encoding = Combined(Distance(3, 24, places), BothSigns(3, 24, places), positions=GRID)
    with pytest.raises(CheckError, match="depends on the offset alone"):
        check(encoding, GRID)


def test_the_named_pairs_have_the_named_values_and_one_offset() -> None:
    class OneWrongPair(DistanceOfPairs):
        def _numbers(self, q_pos, k_pos):
            numbers = super()._numbers(q_pos, k_pos).clone()
            # query (1, 3), key (2, 1) on 3 x 5
            numbers[..., 1, 1 * 5 + 3, 2 * 5 + 1] += 100.0
            return numbers

    message = r"in head 1 \(1, 3\) -> \(2, 1\) has (1\d\d|9\d).* but .* -> .* has .*, both at offset \(-1, 2\)"
    with pytest.raises(CheckError, match=message):
        check(OneWrongPair(3, 24, GRID), GRID)


def test_zeros_at_the_start_hide_nothing() -> None:
    broken = KeyOnly(3, 24, GRID)
    nn.init.zeros_(broken.slope)
    with pytest.raises(CheckError, match="the same, parameters redrawn"):
        check(broken, GRID)

    class EqualHeadsOnly(KeyOnly):
        """Right as long as all slopes are equal, as they are at the start."""

        def _numbers(self, q_pos, k_pos):
            return super()._numbers(q_pos, k_pos) * (self.slope - self.slope.mean())[:, None, None]

    with pytest.raises(CheckError, match="the same, parameters redrawn"):
        check(EqualHeadsOnly(3, 24, GRID), GRID)
    right = Distance(3, 24, GRID)
    nn.init.zeros_(right.slope)
    check(right, GRID)


def test_a_parameter_that_is_not_finite_is_found() -> None:
    encoding = of_name("table", GRID)
    with torch.no_grad():
        encoding.relative_position_bias_table[3, 1] = float("nan")
    with pytest.raises(CheckError, match=r"'finite': the score of .* in head 1 is nan"):
        check(encoding, GRID)


@pytest.mark.parametrize(
    ("encoding", "grid", "message"),
    [
        ("table", GRID, "'table' is no encoding"),
        (Distance(3, 24, GRID), (3, 5), r"grid=\(3, 5\) must be a Grid"),
        (Distance(3, 24, GRID), Grid(5), r"Grid\(5\) has 1 axes, Distance is made for Grid\(3, 5"),
        (Distance(3, 24, GRID), Grid(1, 1), "has 1 places, allowed are 2 to 2500"),
        (Distance(3, 24, GRID), Grid(51, 51), "has 2601 places, allowed are 2 to 2500"),
        (Distance(3, 24, GRID).to("meta"), GRID, "is on the meta device"),
    ],
)
def test_wrong_arguments_are_refused(encoding: object, grid: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(encoding, grid)
    assert not isinstance(caught.value, CheckError)
