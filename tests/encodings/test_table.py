"""The table of offsets against a look-up pair by pair, timm's Swin and torchvision's Video Swin."""

import copy
import itertools

import pytest
import torch
from timm.layers import resize_rel_pos_bias_table
from timm.models.swin_transformer import WindowAttention
from torch import Tensor
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from relpos2d import Grid, attend, check, create_encoding
from relpos2d.encodings.table import OffsetTable
from tests.oracles import difference, gradients, grid_places, multilinear, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close


def table(*shape: int, num_heads: int = 3, num_prefix_tokens: int = 0, dtype=torch.float64, **options) -> OffsetTable:
    encoding = OffsetTable(num_heads, 4, Grid(*shape, num_prefix_tokens=num_prefix_tokens), dtype=dtype, **options)
    redraw(encoding)
    return encoding


def looked_up(encoding: OffsetTable, shape: tuple[int, ...], queries: Grid, keys: Grid) -> Tensor:
    """Numbers of all pairs from the rows of the table of a window `shape`, one pair at a time, without prefix."""
    rows = encoding.relative_position_bias_table

    def row(offset: tuple[int, ...]) -> Tensor:
        index = 0
        for d, size in zip(offset, shape, strict=True):
            d = min(max(d, -(size - 1)), size - 1)
            index = index * (2 * size - 1) + d + size - 1
        return rows[index]

    q = grid_places(queries.shape, [float(s) for s in queries.step], [float(o) for o in queries.origin])
    k = grid_places(keys.shape, [float(s) for s in keys.step], [float(o) for o in keys.origin])
    numbers = []
    for a in q:
        for b in k:
            offset = tuple(
                min(max(d, -(s - 1)), s - 1) for d, s in zip(difference(a, b), shape, strict=True)
            )  # outside: as on the edge
            numbers.append(multilinear(row, offset))
    return torch.stack(numbers).reshape(len(q), len(k), -1).permute(2, 0, 1)


class TestFormula:
    @pytest.mark.parametrize(
        ("window", "queries", "keys"),
        [
            ((7,), Grid(7), Grid(7)),
            ((3, 5), Grid(3, 5), Grid(3, 5)),
            ((2, 3, 5), Grid(2, 3, 5), Grid(2, 3, 5)),
            ((3, 5), Grid(3, 5), Grid(2, 3)),
            ((3, 5), Grid(6, 4), Grid(6, 4)),
            ((3, 5), Grid(5, 3).pool(2), Grid(5, 3)),
            ((3, 5), Grid(5, 3), Grid(5, 3).pool(2)),
            ((3, 5), Grid(3, 5, step=0.5), Grid(3, 5, step=(0.75, 1), origin=(0.25, -1))),
            ((5,), Grid(1, origin=4), Grid(5)),
            ((2, 3, 5), Grid(2, 3, 5).pool((1, 2, 2)), Grid(2, 3, 5)),
            ((1, 4), Grid(1, 4), Grid(1, 4)),
            ((4, 1), Grid(3, 2), Grid(3, 2)),
        ],
    )
    def test_is_the_row_of_the_offset(self, window: tuple[int, ...], queries: Grid, keys: Grid) -> None:
        encoding = table(*window)
        bias = encoding.bias(queries, keys)
        expected = looked_up(encoding, window, queries, keys)
        assert_close(bias, expected)
        parameter = [encoding.relative_position_bias_table]
        assert_close(gradients(bias, parameter)[0], gradients(expected, parameter)[0])

    def test_a6_rectangular_window(self) -> None:
        encoding = table(7, 9)
        assert encoding.relative_position_bias_table.shape == (221, 3)
        assert_close(encoding.bias(Grid(7, 9), Grid(7, 9)), looked_up(encoding, (7, 9), Grid(7, 9), Grid(7, 9)))

    def test_at_reads_rows_and_between_them(self) -> None:
        encoding = table(3, 4)
        rows = encoding.relative_position_bias_table
        whole = encoding.at(torch.tensor([[0, 0], [2, -3], [-2, 3]], dtype=torch.float64))
        assert_close(whole, rows[[2 * 7 + 3, 4 * 7 + 0, 0 * 7 + 6]])
        between = encoding.at(torch.tensor([0.5, 0.25], dtype=torch.float64))
        corners = 0.5 * 0.75 * rows[17] + 0.5 * 0.25 * rows[18] + 0.5 * 0.75 * rows[24] + 0.5 * 0.25 * rows[25]
        assert_close(between, corners)
        outside = encoding.at(torch.tensor([[9.0, -40.0], [-9.5, 0.5]], dtype=torch.float64))
        assert_close(outside, torch.stack([rows[4 * 7], 0.5 * (rows[3] + rows[4])]))

    def test_parameters(self) -> None:
        encoding = create_encoding("table", 3, 4, Grid(4, 6, num_prefix_tokens=1))
        assert {name: tuple(p.shape) for name, p in encoding.named_parameters()} == {
            "relative_position_bias_table": (7 * 11, 3),
            "prefix_bias": (3, 3),
        }
        assert encoding.no_weight_decay() == {"relative_position_bias_table", "prefix_bias"}
        assert encoding.prefix_bias.abs().max() == 0
        assert 0.01 < encoding.relative_position_bias_table.std() < 0.03

    def test_refuses_an_unknown_way_to_resize(self) -> None:
        with pytest.raises(ValueError, match="OffsetTable: resize='bilinear' must be one of timm, bicubic, clamp"):
            create_encoding("table", 3, 4, Grid(7, 7), resize="bilinear")

    def test_repr_tells_window_and_resize(self) -> None:
        assert "window_size=(4, 6), resize='clamp'" in repr(create_encoding("table", 3, 4, Grid(4, 6), resize="clamp"))


class TestOrientation:
    """A table that is 3 at (dy, dx) = (1, -2) and 0 elsewhere biases exactly the pairs it should."""

    @pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
    @pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3)])
    def test_by_value(self, height: int, width: int, num_prefix_tokens: int) -> None:
        grid = Grid(height, width, num_prefix_tokens=num_prefix_tokens)
        encoding = create_encoding("table", 2, 4, grid)
        with torch.no_grad():
            encoding.relative_position_bias_table.zero_()
            encoding.relative_position_bias_table[(1 + height - 1) * (2 * width - 1) + (-2 + width - 1)] = 3.0
        bias = encoding.bias(grid, grid)
        for i in range(grid.num_tokens):
            for j in range(grid.num_tokens):
                expected = 0.0
                if i >= num_prefix_tokens and j >= num_prefix_tokens:
                    ti, tj = i - num_prefix_tokens, j - num_prefix_tokens
                    if ti // width - tj // width == 1 and ti % width - tj % width == -2:
                        expected = 3.0
                assert bias[0, i, j] == expected, (i, j)
        assert (bias == 3).sum() == 2 * (height - 1) * (width - 2)

    def test_through_attention(self) -> None:
        grid = Grid(4, 6)
        encoding = create_encoding("table", 1, 4, grid)
        with torch.no_grad():
            encoding.relative_position_bias_table.zero_()
            encoding.relative_position_bias_table[(1 + 3) * 11 + (-2 + 5)] = 3.0
        zeros = torch.zeros(1, 1, 24, 4)
        weights = attend(zeros, zeros, torch.eye(24)[None, None], encoding, grid)[0, 0]
        query, key = 1 * 6 + 1, 0 * 6 + 3  # offset (1, -2)
        assert weights[query].argmax() == key
        assert_close(weights[query, key] / weights[query, 0], torch.tensor(3.0).exp())


class TestPublic:
    @pytest.mark.parametrize("window", [(3, 4), (7, 7), (5, 2)])
    def test_timm_swin(self, window: tuple[int, int]) -> None:
        theirs = WindowAttention(12, 3, window_size=window)
        redraw(theirs)
        ours = create_encoding("table", 3, 4, Grid(*window))
        ours.load_state_dict({**ours.state_dict(), "relative_position_bias_table": theirs.relative_position_bias_table})
        assert torch.equal(ours.bias(Grid(*window), Grid(*window)), theirs._get_rel_pos_bias()[0])

    @pytest.mark.parametrize("window", [(2, 3, 5), (3, 5, 2)])
    def test_torchvision_video_swin(self, window: tuple[int, int, int]) -> None:
        theirs = ShiftedWindowAttention3d(12, list(window), [0, 0, 0], 3)
        redraw(theirs)
        ours = create_encoding("table", 3, 4, Grid(*window))
        ours.load_state_dict({**ours.state_dict(), "relative_position_bias_table": theirs.relative_position_bias_table})
        bias = ours.bias(Grid(*window), Grid(*window))
        assert torch.equal(bias, theirs.get_relative_position_bias(list(window))[0])

    @pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((3, 5), (6, 4)), ((4, 6), (2, 3)), ((5, 3), (7, 9))])
    def test_resized_as_timm(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        theirs = WindowAttention(12, 3, window_size=old)
        redraw(theirs)
        ours = create_encoding("table", 3, 4, Grid(*old))
        ours.load_state_dict({**ours.state_dict(), "relative_position_bias_table": theirs.relative_position_bias_table})
        ours.set_window_size(new)
        with pytest.warns(UserWarning, match="non-tuple sequence"):  # in timm's interpolation
            theirs.set_window_size(new)
        assert_close(ours.bias(Grid(*new), Grid(*new)), theirs._get_rel_pos_bias()[0])

    @pytest.mark.parametrize(("old", "new"), [((3, 5), (6, 4)), ((7, 4), (5, 9))])
    def test_resized_as_bicubic_interpolation(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        encoding = table(*old, resize="bicubic", dtype=torch.float32)
        rows = encoding.relative_position_bias_table
        image = rows.T.reshape(1, 3, 2 * old[0] - 1, 2 * old[1] - 1)
        expected = torch.nn.functional.interpolate(image, (2 * new[0] - 1, 2 * new[1] - 1), mode="bicubic")[0]
        encoding.set_window_size(new)
        assert_close(encoding.table().permute(2, 0, 1), expected)
        assert_close(encoding.bias(Grid(*new), Grid(*new)), Grid(*new).lattice(Grid(*new)).spread(expected))


class TestResize:
    @pytest.mark.parametrize("method", ["timm", "bicubic", "clamp"])
    def test_b5_there_and_back_is_bit_for_bit_the_original(self, method: str) -> None:
        encoding = table(4, 6, resize=method, dtype=torch.float32)
        master, before = encoding.relative_position_bias_table.clone(), encoding.bias(Grid(4, 6), Grid(4, 6))
        encoding.set_window_size((7, 5))
        other = encoding.bias(Grid(4, 6), Grid(4, 6))
        encoding.set_window_size((3, 9))
        encoding.set_window_size((4, 6))
        assert torch.equal(encoding.bias(Grid(4, 6), Grid(4, 6)), before)
        assert torch.equal(encoding.relative_position_bias_table, master)
        assert torch.equal(other, before) == (method == "clamp")

    def test_clamp_keeps_the_meaning_of_offsets(self) -> None:
        encoding = table(3, 5, resize="clamp")
        encoding.set_window_size((6, 4))
        window = Grid(6, 4)
        assert_close(encoding.bias(window, window), looked_up(encoding, (3, 5), window, window))

    @pytest.mark.parametrize("method", ["timm", "bicubic"])
    @pytest.mark.parametrize("axes", [1, 3])
    def test_one_and_three_axes_axis_by_axis(self, method: str, axes: int) -> None:
        old, new = ((4,), (7,)) if axes == 1 else ((2, 3, 4), (3, 5, 4))
        encoding = table(*old, resize=method)
        encoding.set_window_size(new)
        resized = encoding.table()
        assert resized.shape == (*(2 * n - 1 for n in new), 3)
        linear = table(*old, resize=method)
        with torch.no_grad():  # rows that grow evenly stay symmetric about the centre, which stays in place
            coords = torch.stack(
                torch.meshgrid(*(torch.arange(1.0 - n, n) for n in old), indexing="ij"), dim=-1
            ).flatten(0, -2)
            linear.relative_position_bias_table.copy_(coords.sum(-1, keepdim=True).expand(-1, 3))
        linear.set_window_size(new)
        read = linear.table()
        assert_close(read, -read.flip(tuple(range(axes))), torch.float32)
        assert read[tuple(n - 1 for n in new)].abs().max() < 1e-5

    @pytest.mark.parametrize("method", ["timm", "bicubic"])
    def test_b6_every_size_gives_exactly_its_window(self, method: str) -> None:
        encoding = table(14, 3, num_heads=1, resize=method)
        for size in [*range(1, 30), 61, 115, 122]:
            encoding.set_window_size((size, 4))
            assert encoding.table().shape == (2 * size - 1, 7, 1)

    @pytest.mark.parametrize("method", ["timm", "bicubic"])
    @pytest.mark.parametrize(("old", "new"), [((1, 5), (3, 5)), ((3, 1), (1, 4)), ((1, 1), (2, 3))])
    def test_windows_of_one_token(self, method: str, old: tuple[int, int], new: tuple[int, int]) -> None:
        encoding = table(*old, resize=method)
        encoding.set_window_size(new)
        assert encoding.bias(Grid(*new), Grid(*new)).isfinite().all()

    def test_gradient_reaches_the_master(self) -> None:
        encoding = table(3, 5)
        encoding.set_window_size((6, 4))
        bias = encoding.bias(Grid(6, 4), Grid(6, 4))
        (gradient,) = gradients(bias, [encoding.relative_position_bias_table])
        eps = torch.randn_like(gradient) * 1e-3
        with torch.no_grad():
            before = (
                encoding.bias(Grid(6, 4), Grid(6, 4)) * torch.linspace(-1, 2, bias.numel()).reshape(bias.shape)
            ).sum()
            encoding.relative_position_bias_table += eps
            after = (
                encoding.bias(Grid(6, 4), Grid(6, 4)) * torch.linspace(-1, 2, bias.numel()).reshape(bias.shape)
            ).sum()
        assert_close(after - before, (gradient * eps).sum(), torch.float32)

    def test_other_grids_after_resizing_read_the_resized_table(self) -> None:
        encoding = table(3, 5)
        encoding.set_window_size((6, 4))
        whole, part = encoding.bias(Grid(6, 4), Grid(6, 4)), encoding.bias(Grid(6, 4), Grid(2, 4))
        assert_close(part, whole[:, :, :8])

    def test_resizing_inside_a_meta_build_leaves_real_numbers(self) -> None:
        with torch.device("meta"):
            encoding = create_encoding("table", 3, 4, Grid(3, 5))
            encoding.set_window_size((6, 4))
        encoding.to_empty(device="cpu")
        encoding.load_state_dict(table(3, 5, dtype=torch.float32).state_dict())
        expected = create_encoding("table", 3, 4, Grid(3, 5))
        expected.load_state_dict(encoding.state_dict())
        expected.set_window_size((6, 4))
        assert torch.equal(encoding.bias(Grid(6, 4), Grid(6, 4)), expected.bias(Grid(6, 4), Grid(6, 4)))

    @pytest.mark.parametrize("name", ["table", "cpb", "learned"])
    def test_refuses_a_window_of_other_axes(self, name: str) -> None:
        encoding = create_encoding(name, 3, 4, Grid(3, 5))
        with pytest.raises(ValueError, match=rf"^{type(encoding).__name__}: window_size=\(7,\) must have 2 axes"):
            encoding.set_window_size((7,))
        with pytest.raises(ValueError, match=r"Grid: shape=\(0, 7\) must hold"):
            encoding.set_window_size((0, 7))


class TestLoading:
    def test_b1_window_7_into_window_12(self) -> None:
        small, large = table(7, 7, dtype=torch.float32), table(12, 12, dtype=torch.float32)
        large.load_state_dict(small.state_dict())
        rows = large.relative_position_bias_table
        assert rows.shape == (529, 3)
        with pytest.warns(UserWarning, match="non-tuple sequence"):
            expected = resize_rel_pos_bias_table(small.relative_position_bias_table, (12, 12), (529, 3))
        assert_close(rows, expected)
        assert_close(rows[11 * 23 + 11], small.relative_position_bias_table[6 * 13 + 6])

    @pytest.mark.parametrize("method", ["timm", "bicubic", "clamp"])
    def test_b1_bicubic_and_clamp(self, method: str) -> None:
        small, large = table(3, 3), table(4, 6, resize=method)
        large.load_state_dict(small.state_dict())
        small.resize = "timm" if method == "clamp" else method
        small.set_window_size((4, 6))
        assert_close(large.relative_position_bias_table, small.table().flatten(0, 1))

    @pytest.mark.parametrize("shape", [(7, 7), (4, 6), (7,), (2, 3, 5)])
    def test_b1_same_size_is_a_copy(self, shape: tuple[int, ...]) -> None:
        old, new = table(*shape), table(*shape)
        new.load_state_dict(old.state_dict())
        assert torch.equal(old.relative_position_bias_table, new.relative_position_bias_table)

    def test_another_line_is_resized_too(self) -> None:
        old, new = table(5), table(8)
        new.load_state_dict(old.state_dict())
        old.set_window_size((8,))
        assert_close(new.relative_position_bias_table, old.table())

    def test_b5_table_of_a_rectangle_is_not_taken_for_a_square(self) -> None:
        with pytest.raises(RuntimeError, match="size mismatch for relative_position_bias_table"):
            table(7, 7).load_state_dict(table(3, 5).state_dict())

    def test_other_heads_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match="size mismatch for relative_position_bias_table"):
            table(5, 5).load_state_dict(table(3, 3, num_heads=2).state_dict())
        with pytest.raises(RuntimeError, match="size mismatch for relative_position_bias_table"):
            table(5, 5).load_state_dict(table(5, 5, num_heads=2).state_dict())

    @pytest.mark.parametrize(
        ("old", "new"), [((3, 3), (3, 3)), ((4, 6), (4, 6)), ((3, 3), (5, 4)), ((14, 14), (24, 24))]
    )
    def test_b8_rows_of_the_class_token_are_split_off(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        source = table(*old)
        rows, extra = source.relative_position_bias_table.detach(), torch.randn(3, 3, dtype=torch.float64)
        encoding = table(*new, num_prefix_tokens=1)
        state = {"strength": torch.tensor(1.0), "relative_position_bias_table": torch.cat([rows, extra])}
        kept = {name: value.clone() for name, value in state.items()}
        encoding.load_state_dict(state)
        assert torch.equal(encoding.prefix_bias, extra)
        source.set_window_size(new)
        assert_close(encoding.relative_position_bias_table, source.table().flatten(0, 1))
        assert state.keys() == kept.keys()
        assert all(torch.equal(state[name], kept[name]) for name in kept)

    def test_b8_order_of_the_class_rows(self) -> None:
        encoding = table(3, 4, num_prefix_tokens=2)
        bias = encoding.bias(Grid(3, 4, num_prefix_tokens=2), Grid(3, 4, num_prefix_tokens=2))
        class_to_patch, patch_to_class, class_to_class = encoding.prefix_bias
        assert_close(bias[:, :2, 2:], class_to_patch[:, None, None].expand(3, 2, 12))
        assert_close(bias[:, 2:, :2], patch_to_class[:, None, None].expand(3, 12, 2))
        assert_close(bias[:, :2, :2], class_to_class[:, None, None].expand(3, 2, 2))

    def test_b8_rows_of_a_class_token_that_does_not_exist_are_refused(self) -> None:
        state = table(3, 3).state_dict()
        state["relative_position_bias_table"] = torch.randn(28, 3)
        with pytest.raises(RuntimeError, match=r"\[28, 3\].*\[25, 3\]"):
            table(3, 3).load_state_dict(state)

    def test_b8_missing_class_rows_are_reported(self) -> None:
        with pytest.raises(RuntimeError, match=r"Missing key.*prefix_bias"):
            table(3, 3, num_prefix_tokens=1).load_state_dict(table(3, 3).state_dict())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*prefix_bias"):
            table(3, 3).load_state_dict(table(3, 3, num_prefix_tokens=1).state_dict())

    def test_own_class_rows_are_loaded(self) -> None:
        old, new = table(4, 6, num_prefix_tokens=1), table(4, 6, num_prefix_tokens=1)
        new.load_state_dict(old.state_dict())
        assert all(torch.equal(a, b) for a, b in itertools.zip_longest(old.parameters(), new.parameters()))

    def test_loading_into_a_resized_module_fills_the_master(self) -> None:
        old, new = table(4, 6), table(4, 6)
        new.set_window_size((5, 7))
        new.load_state_dict(old.state_dict())
        assert torch.equal(old.relative_position_bias_table, new.relative_position_bias_table)

    def test_resized_module_survives_deepcopy(self) -> None:
        encoding = table(4, 6)
        encoding.set_window_size((5, 7))
        assert torch.equal(copy.deepcopy(encoding).table(), encoding.table())


def test_c4_one_step_moves_the_table() -> None:
    grid = Grid(3, 5)
    encoding = create_encoding("table", 3, 4, grid)
    q, k, v = torch.randn(3, 2, 3, 15, 4)
    optimizer = torch.optim.SGD(encoding.parameters(), lr=1.0)
    before = encoding.relative_position_bias_table.clone()
    out = attend(q, k, v, encoding, grid)
    out.square().sum().backward()
    assert encoding.relative_position_bias_table.grad.abs().min() > 0
    optimizer.step()
    assert not torch.equal(before, encoding.relative_position_bias_table)
    assert not torch.equal(out, attend(q, k, v, encoding, grid))


@pytest.mark.parametrize(("window", "rows"), [((7, 7), 169), ((8, 12), 345), ((9, 7), 221), ((3, 5), 45)])
def test_a4_every_offset_has_a_row_of_its_own(window: tuple[int, int], rows: int) -> None:
    encoding = create_encoding("table", 1, 8, Grid(*window), dtype=torch.float64)
    assert len(encoding.relative_position_bias_table) == rows
    with torch.no_grad():
        encoding.relative_position_bias_table.copy_(torch.arange(rows)[:, None])
    bias = encoding.bias(Grid(*window), Grid(*window))
    assert bias.unique().numel() == rows


def test_b7_each_axis_is_resized_by_itself() -> None:
    old, new = (4, 7), (6, 5)
    lines = [create_encoding("table", 1, 8, Grid(size), dtype=torch.float64) for size in old]
    both = create_encoding("table", 1, 8, Grid(*old), dtype=torch.float64)
    y, x = (line.relative_position_bias_table.detach() for line in lines)
    with torch.no_grad():  # a table that is a product of a column and a row stays one
        both.relative_position_bias_table.copy_((y[:, None] * x[None, :]).flatten(0, 1))
    for line, size in zip(lines, new, strict=True):
        line.set_window_size((size,))
    both.set_window_size(new)
    expected = lines[0].table()[:, None] * lines[1].table()[None, :]
    assert both.table().shape == (11, 9, 1)
    torch.testing.assert_close(both.table(), expected, rtol=0, atol=1e-12)


class TestMaxDistance:
    @pytest.mark.parametrize(
        ("queries", "keys"),
        [
            (Grid(5), Grid(12)),
            (Grid(2, origin=20), Grid(22)),  # behind a cache
            (Grid(3), Grid(3)),
            (Grid(4), Grid(4)),  # whose offsets are just the table
            (Grid(4, step=0.5, origin=0.25), Grid(3, step=2)),
            (Grid(3, 6), Grid(5, 2)),
        ],
    )
    def test_holds_these_offsets_whatever_the_grid_is(self, queries: Grid, keys: Grid) -> None:
        encoding = table(*queries.shape, max_distance=3)
        assert len(encoding.relative_position_bias_table) == 7**queries.num_axes
        expected = looked_up(encoding, (4,) * queries.num_axes, queries, keys)
        bias = encoding.bias(queries, keys)
        assert_close(bias, expected)
        parameter = [encoding.relative_position_bias_table]
        assert_close(gradients(bias, parameter)[0], gradients(expected, parameter)[0])

    def test_attention_and_its_gradients_pair_by_pair(self) -> None:
        encoding, places_q, places_k = table(5, max_distance=2), (6, 7, 8), range(9)
        rows = encoding.relative_position_bias_table
        q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 9, 9))
        expected = pair_attention(
            q, k, v, 0.5, lambda b, h, i, j: rows[min(max(places_q[i] - places_k[j], -2), 2) + 2, h]
        )
        out = attend(q, k, v, encoding, Grid(3, origin=6), Grid(9))
        assert_close(out, expected)
        inputs = [q, k, v, rows]
        for ours, oracle in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
            assert_close(ours, oracle)

    @pytest.mark.parametrize("length", [2, 7, 33])
    def test_relative_on_every_length(self, length: int) -> None:
        encoding = table(length, max_distance=4)
        check(encoding, Grid(length))
        more = encoding.bias(Grid(length + 1), Grid(length + 1))
        assert torch.equal(more[:, :length, :length], encoding.bias(Grid(length), Grid(length)))

    def test_no_window_changes_it(self) -> None:
        encoding = table(4, max_distance=3)
        before = encoding.bias(Grid(9), Grid(9))
        for size in (9, 4, 1):
            encoding.set_window_size((size,))
            assert encoding.window_size == (size,)
            assert torch.equal(encoding.bias(Grid(9), Grid(9)), before)
        with pytest.raises(ValueError, match="must have 1 axes"):
            encoding.set_window_size((3, 3))

    def test_points_are_the_grid(self) -> None:
        encoding, grid = table(7, max_distance=3), Grid(7, step=0.75)
        assert_close(encoding.bias(grid.points(2), grid), encoding.bias(grid, grid).expand(2, -1, -1, -1))

    def test_another_length_loads_and_another_distance_is_refused(self) -> None:
        long, short = table(30, max_distance=3), table(4, max_distance=3)
        long.load_state_dict(short.state_dict())
        assert torch.equal(long.relative_position_bias_table, short.relative_position_bias_table)
        for other in (table(30, max_distance=4), table(4, 4, max_distance=2), table(5)):
            with pytest.raises(RuntimeError, match="size mismatch for relative_position_bias_table"):
                table(*other.positions.shape, max_distance=3).load_state_dict(other.state_dict())

    def test_b8_rows_of_the_class_token_are_split_off(self) -> None:
        source = table(9, max_distance=3)
        rows, extra = source.relative_position_bias_table.detach(), torch.randn(3, 3, dtype=torch.float64)
        state = {"strength": torch.tensor(1.0), "relative_position_bias_table": torch.cat([rows, extra])}
        encoding = table(5, num_prefix_tokens=1, max_distance=3)
        encoding.load_state_dict(state)
        assert torch.equal(encoding.prefix_bias, extra)
        assert torch.equal(encoding.relative_position_bias_table, rows)
        with pytest.raises(RuntimeError, match=r"Missing key.*prefix_bias[\s\S]*\[10, 3\].*\[9, 3\]"):
            table(5, num_prefix_tokens=1, max_distance=4).load_state_dict(state)

    def test_half_parameters(self) -> None:
        encoding = table(7, max_distance=3, dtype=torch.bfloat16)
        q = torch.randn(1, 3, 7, 4, dtype=torch.bfloat16)
        assert attend(q, q, q, encoding, Grid(7)).dtype == torch.bfloat16

    def test_refusals(self) -> None:
        with refuses("OffsetTable: max_distance=0 must be at least 1"):
            table(7, max_distance=0)
        with refuses("OffsetTable: resize='clamp' has no meaning with max_distance=3"):
            table(7, max_distance=3, resize="clamp")
        assert "window_size=(7,), max_distance=3" in repr(table(7, max_distance=3))
