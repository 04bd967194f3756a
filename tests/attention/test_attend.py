"""attend(): both backends against double loops, with places, masks, padding, dropout; and what it refuses."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from relpos2d import Encoding, Grid, Points, attend, create_encoding, join
from relpos2d.attention import BACKENDS
from relpos2d.positions import Positions
from tests.oracles import gradients, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

HEADS, DIM = 2, 4
BOTH = pytest.mark.parametrize("backend", ["explicit", "sdpa"])


def qkv(num_queries: int, num_keys: int, batch: int = 2, value_dim: int = DIM, dtype=torch.float64) -> list[Tensor]:
    shapes = ((num_queries, DIM), (num_keys, DIM), (num_keys, value_dim))
    return [torch.randn(batch, HEADS, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def made(name, positions: Grid) -> Encoding:
    encoding = create_encoding(name, HEADS, DIM, positions, dtype=torch.float64)
    redraw(encoding)
    return encoding


def loops(
    encoding: Encoding, q_pos, k_pos, q: Tensor, k: Tensor, v: Tensor, scale: float = DIM**-0.5, **seen
) -> Tensor:
    """The double loop, with the numbers and the turning of the encoding (held to formulas in its own test)."""
    bias = encoding.bias(q_pos, k_pos)
    q, k = encoding.rotate(q, q_pos, "query"), encoding.rotate(k, k_pos, "key")

    def number(b: int, h: int, i: int, j: int) -> Tensor | float:
        if bias is None:
            return 0.0
        return bias[h, i, j] if bias.ndim == 3 else bias[b if len(bias) > 1 else 0, h, i, j]

    return pair_attention(q, k, v, scale, number, **seen)


def assert_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    assert_close(ours, theirs)
    for a, b in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert_close(a, b)


GRIDS = [
    (Grid(3, 4), Grid(3, 4)),
    (Grid(2, 3, num_prefix_tokens=2), Grid(2, 3, num_prefix_tokens=2)),
    (Grid(4, 3), Grid(4, 3).pool(2)),
    (Grid(4, 3).pool((2, 1)), Grid(4, 3)),
    (Grid(3, 2), Grid(3, 2, step=Fraction(2, 3), origin=(0, Fraction(1, 3)))),
    (Grid(2, 2, origin=(4, 0)), Grid(6, 2)),
    (Grid(1, 4, step=9), Grid(1, 5, step=7)),
    (Grid(2, 2, num_prefix_tokens=1), Grid(3, 1)),
]


@BOTH
@pytest.mark.parametrize("name", ["none", "table", "cpb", "alibi", "rope_axial", "rope_mixed", ["table", "rope_axial"]])
@pytest.mark.parametrize(("q_pos", "k_pos"), GRIDS)
def test_double_loop(name, q_pos: Grid, k_pos: Grid, backend: str) -> None:
    encoding = made(name, Grid(3, 4, num_prefix_tokens=q_pos.num_prefix_tokens))
    q, k, v = qkv(q_pos.num_tokens, k_pos.num_tokens, value_dim=3)
    out = attend(q, k, v, encoding, q_pos, k_pos, scale=0.7, backend=backend)
    assert out.shape == (2, HEADS, q_pos.num_tokens, 3)
    leaves = [q, k, v]
    if q_pos.num_prefix_tokens == k_pos.num_prefix_tokens:
        leaves += encoding.parameters()
    assert_same(out, loops(encoding, q_pos, k_pos, q, k, v, 0.7), leaves)


@BOTH
def test_scale_is_that_of_the_head_unless_given(backend: str) -> None:
    grid = Grid(5)
    encoding = made("alibi", grid)
    q, k, v = qkv(5, 5)
    assert_close(attend(q, k, v, encoding, grid, backend=backend), loops(encoding, grid, grid, q, k, v, 0.5))
    assert_close(attend(q, k, v, encoding, grid, scale=1.0, backend=backend), loops(encoding, grid, grid, q, k, v, 1.0))
    assert_close(attend(q, k, v, encoding, grid, scale=0.0, backend=backend), loops(encoding, grid, grid, q, k, v, 0.0))


def test_keys_stand_where_queries_do_unless_told() -> None:
    grid = Grid(2, 3)
    encoding = made("table", grid)
    q, k, v = qkv(6, 6)
    assert torch.equal(attend(q, k, v, encoding, grid), attend(q, k, v, encoding, grid, grid))


@BOTH
def test_pooled_keys_have_half_step_offsets(backend: str) -> None:
    grid = Grid(4, 2)
    encoding = made("table", grid)
    with torch.no_grad():  # a table that grows evenly reads as a linear function, at half steps too
        offsets = grid.lattice(grid).offsets(dtype=torch.float64).flatten(0, 1)
        encoding.relative_position_bias_table.copy_(
            (offsets @ torch.tensor([[0.5], [2.0]], dtype=torch.float64)).expand(-1, 2)
        )
    q, k, v = qkv(8, 2)
    centres = [(0.5, 0.5), (2.5, 0.5)]

    def number(b: int, h: int, i: int, j: int) -> float:
        return 0.5 * (i // 2 - centres[j][0]) + 2.0 * (i % 2 - centres[j][1])

    expected = pair_attention(q, k, v, DIM**-0.5, number)
    assert_close(attend(q, k, v, encoding, grid, grid.pool(2), backend=backend), expected)


@BOTH
@pytest.mark.parametrize("name", ["alibi", "table", "rope_axial", ["table", "rope_mixed"]])
def test_continued_sequence_is_part_of_the_full_one(name, backend: str) -> None:
    full = Grid(7, num_prefix_tokens=1)
    encoding = made(name, full)
    q, k, v = qkv(8, 8)
    whole = attend(q, k, v, encoding, full, is_causal=True, backend=backend)
    for t in range(7):
        step = attend(
            q[:, :, t + 1 : t + 2], k[:, :, : t + 2], v[:, :, : t + 2], encoding,
            Grid(1, origin=t), Grid(t + 1, num_prefix_tokens=1), is_causal=True, backend=backend,
        )  # fmt: skip
        assert_close(step, whole[:, :, t + 1 : t + 2])


class TestCausal:
    @BOTH
    @pytest.mark.parametrize(
        ("q_pos", "k_pos"),
        [
            (Grid(5), Grid(5)),
            (Grid(1, origin=4), Grid(7)),
            (Grid(3, origin=2), Grid(5, num_prefix_tokens=2)),
            (Grid(4), Grid(4).pool(2)),
        ],
    )
    def test_by_coordinate(self, q_pos: Grid, k_pos: Grid, backend: str) -> None:
        encoding = made("table", Grid(5))
        q, k, v = qkv(q_pos.num_tokens, k_pos.num_tokens)
        prefix = k_pos.num_prefix_tokens
        q_at, k_at = q_pos.coords()[:, 0].tolist(), k_pos.coords()[:, 0].tolist()

        def seen(b: int, h: int, i: int, j: int) -> bool:
            return j < prefix or k_at[j - prefix] <= q_at[i]

        out = attend(q, k, v, encoding, q_pos, k_pos, is_causal=True, backend=backend)
        assert_same(out, loops(encoding, q_pos, k_pos, q, k, v, seen=seen), [q, k, v, *encoding.parameters()])

    @BOTH
    def test_is_not_the_top_left_triangle(self, backend: str) -> None:
        encoding = made("none", Grid(7))
        q, k, v = qkv(1, 7)
        out = attend(q, k, v, encoding, Grid(1, origin=6), Grid(7), is_causal=True, backend=backend)
        assert_close(out, attend(q, k, v, encoding, Grid(1, origin=6), Grid(7), backend=backend))

    def test_together_with_a_mask(self) -> None:
        encoding, grid = made("alibi", Grid(5)), Grid(5)
        q, k, v = qkv(5, 5)
        mask = torch.rand(5, 5) > 0.3
        mask[0, 0] = False  # the first query sees nothing at all
        expected = loops(encoding, grid, grid, q, k, v, seen=lambda b, h, i, j: j <= i and bool(mask[i, j]))
        for given in (mask, torch.zeros(5, 5).masked_fill(~mask, float("-inf"))):
            out = attend(q, k, v, encoding, grid, mask=given, is_causal=True)
            assert_same(out, expected, [q, k, v])
            assert out[:, :, 0].abs().max() == 0


MASK_SHAPES = [(2, HEADS, 6, 6), (2, 1, 6, 6), (1, HEADS, 1, 6), (6, 6), (2, 1, 1, 6), (6,), (2, HEADS, 6, 1), (1, 1)]


class TestMasks:
    @BOTH
    @pytest.mark.parametrize("shape", MASK_SHAPES)
    @pytest.mark.parametrize("name", ["table", "rope_axial"])
    def test_bool(self, name: str, shape: tuple[int, ...], backend: str) -> None:
        grid = Grid(2, 3)
        encoding = made(name, grid)
        q, k, v = qkv(6, 6)
        mask = torch.rand(shape) > 0.4
        full = mask.expand(2, HEADS, 6, 6)
        expected = loops(encoding, grid, grid, q, k, v, seen=lambda b, h, i, j: bool(full[b, h, i, j]))
        out = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
        assert_same(out, expected, [q, k, v, *encoding.parameters()])

    @BOTH
    @pytest.mark.parametrize("shape", MASK_SHAPES[:-1])
    @pytest.mark.parametrize("name", ["table", "rope_axial"])
    def test_added(self, name: str, shape: tuple[int, ...], backend: str) -> None:
        grid = Grid(2, 3)
        encoding = made(name, grid)
        q, k, v = qkv(6, 6)
        mask = torch.randn(shape, dtype=torch.float64)
        mask = mask.masked_fill(torch.rand(shape) > 0.6, float("-inf")).requires_grad_()
        full = mask.expand(2, HEADS, 6, 6)
        bias = encoding.bias(grid, grid)
        q_turned, k_turned = encoding.rotate(q, grid), encoding.rotate(k, grid)
        expected = pair_attention(
            q_turned, k_turned, v, DIM**-0.5,
            lambda b, h, i, j: full[b, h, i, j] + (0 if bias is None else bias[h, i, j]),
            seen=lambda b, h, i, j: bool(full[b, h, i, j] > float("-inf")),
        )  # fmt: skip
        out = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
        assert_same(out, expected, [q, k, v, *encoding.parameters()])
        if full.isfinite().any():
            ours, theirs = gradients(out, [mask])[0], gradients(expected, [mask])[0]
            assert_close(ours.nan_to_num(), theirs.nan_to_num())
            assert ours.isfinite().all()

    @BOTH
    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_query_without_a_key_gives_0_and_finite_gradients(self, kind: str, backend: str) -> None:
        grid = Grid(2, 3)
        encoding = made("table", grid)
        q, k, v = qkv(6, 6)
        mask = torch.ones(6, 6, dtype=torch.bool)
        mask[2] = False
        if kind == "float":
            mask = torch.zeros(6, 6).masked_fill(~mask, float("-inf"))
        out = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
        assert out[:, :, 2].abs().max() == 0
        assert out[:, :, 1].abs().min() > 0
        for gradient in gradients(out, [q, k, v, *encoding.parameters()]):
            assert gradient.isfinite().all()
        assert gradients(out, [q])[0][:, :, 2].abs().max() == 0

    @BOTH
    def test_nothing_seen_at_all(self, backend: str) -> None:
        grid = Grid(2, 3)
        encoding = made("table", grid)
        q, k, v = qkv(6, 6)
        for mask in (torch.zeros(1, 1, dtype=torch.bool), torch.full((6, 6), float("-inf"))):
            out = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
            assert out.abs().max() == 0
            assert all(g.abs().max() == 0 for g in gradients(out, [q, k, v]))

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_d8_lowest_float32_as_mask_in_half_precision(self, dtype: torch.dtype, backend: str) -> None:
        grid = Grid(2, 3)
        encoding = create_encoding("table", HEADS, DIM, grid).to(dtype)
        q, k, v = (x.detach() for x in qkv(6, 6, dtype=dtype))
        seen = torch.rand(6, 6) > 0.4
        seen[3] = False
        mask = torch.zeros(6, 6).masked_fill(~seen, torch.finfo(torch.float32).min)
        out = attend(q, k, v, encoding, grid, mask=mask, backend=backend)
        assert out.isfinite().all()
        assert_close(out, attend(q, k, v, encoding, grid, mask=seen, backend=backend))

    @BOTH
    def test_g3_keys_that_nobody_sees_may_hold_nan(self, backend: str) -> None:
        grid = Grid(2, 3)
        encoding = made("table", grid)
        q, k, v = qkv(6, 6)
        expected = attend(q, k, v, encoding, grid, mask=torch.arange(6) < 4, backend=backend)
        hidden = (torch.arange(6) >= 4)[:, None]
        for value in (float("nan"), float("inf")):
            dirty_k, dirty_v = (x.masked_fill(hidden, value) for x in (k, v))
            for mask in (torch.arange(6) < 4, torch.zeros(6).masked_fill(hidden[:, 0], float("-inf"))):
                out = attend(q, dirty_k, dirty_v, encoding, grid, mask=mask, backend=backend)
                assert_close(out, expected)
                for gradient in gradients(out, [q, k, v, *encoding.parameters()]):
                    assert gradient.isfinite().all()


class TestPadding:
    @BOTH
    @pytest.mark.parametrize("name", ["none", "table", "alibi", "rope_axial", ["cpb", "rope_mixed"]])
    def test_points_against_the_double_loop(self, name, backend: str) -> None:
        encoding = made(name, Grid(3, 4))
        valid = torch.tensor([[True, True, False, True, False], [True, False, True, True, True]])
        points = Points(torch.randn(2, 5, 2, dtype=torch.float64) * 2, valid=valid)
        q, k, v = qkv(5, 5)
        out = attend(q, k, v, encoding, points, backend=backend)
        expected = loops(encoding, points, points, q, k, v, seen=lambda b, h, i, j: bool(valid[b, i] & valid[b, j]))
        assert_same(out, expected, [q, k, v, *encoding.parameters()])
        assert out[0, :, 2].abs().max() == 0

    @BOTH
    @pytest.mark.parametrize("name", ["table", "cpb", "alibi", "rope_mixed"])
    def test_g3_nan_in_padding_reaches_nobody(self, name: str, backend: str) -> None:
        encoding = made(name, Grid(3, 4, num_prefix_tokens=1))
        valid = torch.tensor([[True, True, False, True, False], [True, False, True, True, True]])
        places = torch.randn(2, 5, 2, dtype=torch.float64)
        q, k, v = qkv(6, 6)
        clean = Points(places, valid=valid, num_prefix_tokens=1)
        expected = attend(q, k, v, encoding, clean, backend=backend)
        hidden = torch.nn.functional.pad(~valid, (1, 0))[:, None, :, None]
        for value in (float("nan"), float("inf")):
            dirty = Points(places.masked_fill(~valid[..., None], value), valid=valid, num_prefix_tokens=1)
            out = attend(*(x.masked_fill(hidden, value) for x in (q, k, v)), encoding, dirty, backend=backend)
            assert_close(out, expected)
            for gradient in gradients(out, [q, k, v, *encoding.parameters()]):
                assert gradient.isfinite().all()

    @BOTH
    def test_more_padding_changes_no_valid_token(self, backend: str) -> None:
        encoding = made("alibi", Grid(3, 4))
        places = torch.randn(2, 3, 2, dtype=torch.float64)
        q, k, v = qkv(3, 3)
        expected = attend(q, k, v, encoding, Points(places), backend=backend)
        longer = Points(
            torch.cat([places, torch.zeros(2, 4, 2, dtype=torch.float64)], 1), valid=(torch.arange(7) < 3).expand(2, 7)
        )
        padded = (torch.nn.functional.pad(x, (0, 0, 0, 4), value=5.0) for x in (q, k, v))
        out = attend(*padded, encoding, longer, backend=backend)
        assert_close(out[:, :, :3], expected)
        assert out[:, :, 3:].abs().max() == 0

    @BOTH
    def test_dropped_tokens_are_the_rest_of_the_grid(self, backend: str) -> None:
        encoding, grid = made("table", Grid(3, 4)), Grid(3, 4)
        q, k, v = qkv(12, 12)
        kept = torch.stack([torch.randperm(12)[:5] for _ in range(2)])
        points = Points(grid.coords(dtype=torch.float64)[kept])
        index = kept[:, None, :, None].expand(-1, HEADS, -1, DIM)
        out = attend(*(x.gather(2, index) for x in (q, k, v)), encoding, points, backend=backend)
        visible = torch.zeros(2, 1, 1, 12, dtype=torch.bool).scatter_(-1, kept[:, None, None], True)
        expected = attend(q, k, v, encoding, grid, mask=visible, backend=backend)
        assert_close(out, expected.gather(2, index))


class TestSegments:
    @BOTH
    @pytest.mark.parametrize("name", ["table", "rope_mixed"])
    def test_packed_images_are_as_if_alone(self, name: str, backend: str) -> None:
        encoding = made(name, Grid(3, 4))
        images = [Grid(2, 3), Grid(3, 1), Grid(2, 2)]
        packed = join(*images, packed=True)
        q, k, v = qkv(13, 13, batch=1)
        out = attend(q, k, v, encoding, packed, backend=backend)
        alone, start = [], 0
        for image in images:
            part = slice(start, start := start + image.num_places)
            alone.append(attend(q[:, :, part], k[:, :, part], v[:, :, part], encoding, image, backend=backend))
        assert_same(out, torch.cat(alone, 2), [q, k, v])

    def test_segments_of_each_sample(self) -> None:
        encoding = made("alibi", Grid(3, 4))
        segments = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
        points = Points(torch.randn(2, 4, 2, dtype=torch.float64), segments=segments, num_prefix_tokens=1)
        q, k, v = qkv(5, 5)

        def seen(b: int, h: int, i: int, j: int) -> bool:
            return i == 0 or j == 0 or bool(segments[b, i - 1] == segments[b, j - 1])

        assert_same(attend(q, k, v, encoding, points), loops(encoding, points, points, q, k, v, seen=seen), [q, k, v])

    def test_text_then_image(self) -> None:
        encoding = made("rope_axial", Grid(3, 4))
        joined = join(Grid(3, 1), Grid(2, 2, origin=(3, 0)))
        q, k, v = qkv(7, 7)
        expected = loops(encoding, joined, joined, q, k, v)
        assert_close(attend(q, k, v, encoding, joined), expected)
        assert_close(attend(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], encoding, Grid(2, 2)),
                     attend(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], encoding, Grid(2, 2, origin=(3, 0))))  # fmt: skip


class TestDropout:
    @BOTH
    def test_drops_weights_and_scales_the_rest(self, backend: str) -> None:
        grid = Grid(5)
        encoding = made("none", grid)
        zeros, v = torch.zeros(64, HEADS, 5, DIM, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
        v = v.expand(64, HEADS, 5, 5)
        out = attend(zeros, zeros, v, encoding, grid, dropout_p=0.25, backend=backend)
        kept = out > 0
        assert 0.7 < kept.double().mean() < 0.8
        assert_close(out[kept], torch.full_like(out[kept], 0.2 / 0.75))
        assert_close(attend(zeros, zeros, v, encoding, grid, backend=backend), torch.full_like(out, 0.2))

    @BOTH
    def test_everything_dropped(self, backend: str) -> None:
        grid = Grid(5)
        q, k, v = qkv(5, 5)
        assert attend(q, k, v, made("none", grid), grid, dropout_p=1.0, backend=backend).abs().max() == 0


class TestRefuses:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"q": (2, 6, 4)}, r"attend: q has shape \(2, 6, 4\), allowed is \(B, heads, N, head_dim\)"),
            ({"k": (2, 2, 6, 4, 1)}, r"attend: k has shape \(2, 2, 6, 4, 1\)"),
            ({"v": (6, 4)}, r"attend: v has shape \(6, 4\)"),
            ({"k": (3, 2, 6, 4)}, "attend: k has a batch of 3 and q of 2; all need the same"),
            ({"v": (1, 2, 6, 4)}, "attend: v has a batch of 1 and q of 2"),
            ({"q": (2, 3, 6, 4)}, "attend: q has 3 heads, the encoding is made for 2"),
            ({"k": (2, 1, 6, 4)}, "attend: k has 1 heads, the encoding is made for 2"),
            ({"v": (2, 1, 6, 4)}, "attend: v has 1 heads, the encoding is made for 2"),
            ({"q": (2, 2, 6, 5)}, "attend: q has head_dim=5, the encoding is made for 4"),
            ({"k": (2, 2, 6, 3)}, "attend: k has head_dim=3, the encoding is made for 4"),
            ({"q": (2, 2, 7, 4)}, r"attend: q has 7 tokens, its positions Grid\(2, 3\) have 6"),
            ({"k": (2, 2, 5, 4)}, r"attend: k has 5 tokens, its positions Grid\(2, 3\) have 6"),
            ({"v": (2, 2, 5, 4)}, r"attend: v has 5 tokens, its positions Grid\(2, 3\) have 6"),
            ({"backend": "flesh"}, "attend: backend='flesh' must be one of auto, explicit, sdpa"),
            (
                {"q_pos": Grid(6), "k_pos": Grid(2, 3)},
                r"attend: Grid\(6\) has 1 axes, the encoding is made for Grid\(2, 3\)",
            ),
            ({"k_pos": Grid(6)}, r"attend: Grid\(6\) has 1 axes, the encoding is made for Grid\(2, 3\)"),
            ({"q_pos": Points(torch.zeros(3, 6, 2))}, "attend: Points have a batch of 3, q has one of 2"),
            ({"k_pos": Points(torch.zeros(3, 6, 2))}, "attend: Points have a batch of 3, q has one of 2"),
            ({"mask": torch.ones(6, 6, dtype=torch.long)}, "attend: mask is torch.int64, allowed are bool"),
            (
                {"mask": torch.ones(6, 5)},
                r"attend: mask has shape \(6, 5\), allowed is what broadcasts to \(2, 2, 6, 6\)",
            ),
            ({"mask": torch.ones(5, 6, dtype=torch.bool)}, r"attend: mask has shape \(5, 6\)"),
            ({"mask": torch.ones(1, 2, 2, 6, 6)}, r"attend: mask has shape \(1, 2, 2, 6, 6\)"),
            ({"is_causal": True}, "is_causal: needs one axis, the positions have 2"),
        ],
    )
    @pytest.mark.parametrize("name", ["none", "table", "rope_axial"])
    def test_what_does_not_fit(self, name: str, change: dict, text: str) -> None:
        encoding = create_encoding(name, HEADS, DIM, Grid(2, 3))
        given: dict = {n: torch.zeros(change.get(n, (2, HEADS, 6, DIM))) for n in ("q", "k", "v")}
        given |= {"q_pos": Grid(2, 3)} | {n: x for n, x in change.items() if n not in ("q", "k", "v")}
        with refuses(text):
            attend(given.pop("q"), given.pop("k"), given.pop("v"), encoding, given.pop("q_pos"), **given)

    @pytest.mark.parametrize("name", ["k", "v"])
    def test_d3_dtypes_that_differ(self, name: str) -> None:
        given = {n: torch.zeros(1, HEADS, 6, DIM, dtype=torch.bfloat16 if n == name else None) for n in ("q", "k", "v")}
        encoding = create_encoding("table", HEADS, DIM, Grid(2, 3))
        with pytest.raises(
            ValueError, match=f"attend: {name} is torch.bfloat16 and q is torch.float32; all need the same"
        ):
            attend(*given.values(), encoding, Grid(2, 3))

    def test_dropout_that_is_no_probability(self) -> None:
        x = torch.zeros(1, HEADS, 6, DIM)
        for dropout_p in (-0.1, 1.5):
            with refuses(f"attend: dropout_p={dropout_p} must be between 0 and 1"):
                attend(x, x, x, create_encoding("table", HEADS, DIM, Grid(2, 3)), Grid(2, 3), dropout_p=dropout_p)


def test_backends_by_name() -> None:
    assert BACKENDS == ("auto", "explicit", "sdpa", "flex", "lowrank")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_batch_of_points_for_all_samples_and_half_precision(dtype: torch.dtype, backend: str) -> None:
    encoding = create_encoding(["table", "rope_axial"], HEADS, DIM, Grid(2, 3)).to(dtype)
    q, k, v = (x.detach() for x in qkv(6, 6, batch=3, dtype=dtype))
    points: Positions = Grid(2, 3).points(1)
    out = attend(q, k, v, encoding, points, backend=backend)
    assert out.dtype == dtype
    assert_close(out, attend(q, k, v, encoding, Grid(2, 3), backend=backend))
