"""What holds for every encoding of the library: relative ones feel the offset alone, and all can be kept, cast and traced."""

import copy
import itertools
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from relpos2d import Combined, Encoding, Grid, NumberEncoding, Points, attend, create_encoding, list_encodings
from relpos2d.positions import Positions
from tests.oracles import redraw
from tests.tolerances import assert_close

NUM_HEADS, HEAD_DIM = 3, 12
SHAPES = {1: (7,), 2: (4, 3), 3: (2, 3, 2)}
SUMS = [
    ["table", "rope_axial"],
    ["rope_mixed", "alibi", "cpb"],
    [{"name": "table", "strength": 0.5}, ["rope_axial", "alibi"]],
]


def all_cases(*, absolute: bool = True, none: bool = True) -> list:
    """(encoding, number of axes) for every encoding, on one, two and three axes where it has a meaning."""
    cases = []
    for info in list_encodings():
        if (info.family == "absolute" and not absolute) or (info.family == "none" and not none):
            continue
        for num_axes in SHAPES:
            if info.axes is None or num_axes in info.axes:
                cases.append(pytest.param(info.name, num_axes, id=f"{info.name}-{num_axes}"))
    cases += [pytest.param(spec, 2, id=f"sum{i}-2") for i, spec in enumerate(SUMS)]
    cases.append(pytest.param(SUMS[0], 3, id="sum0-3"))
    return cases


EVERY = all_cases()
RELATIVE = all_cases(absolute=False, none=False)
#: for what takes seconds each
ONE_EACH = [case for case in EVERY if case.values[1] == 2 and case.id not in ("sum0-2", "sum1-2", "sum2-2", "none-2")]
ONE_EACH += [pytest.param("none", 2, id="none-2", marks=pytest.mark.long)]  # the others have all that it has
ONE_EACH += [
    pytest.param(info.name, 1, id=f"{info.name}-1", marks=pytest.mark.long)
    for info in list_encodings()
    if info.axes == (1,)
]
SUM = pytest.param(SUMS[0], 2, id="sum0-2")


def make(spec, num_axes: int, num_prefix_tokens: int = 0, dtype: torch.dtype = torch.float64, **options) -> Encoding:
    positions = Grid(*SHAPES[num_axes], num_prefix_tokens=num_prefix_tokens)
    encoding = create_encoding(spec, NUM_HEADS, HEAD_DIM, positions, dtype=dtype, **options)
    redraw(encoding)
    return encoding


def pair_scores(encoding: Encoding, q: Tensor, k: Tensor, q_pos: Positions, k_pos: Positions) -> Tensor:
    """The scores of all pairs, put together from the hooks."""
    scale = HEAD_DIM**-0.5
    content = encoding.content(q, k)
    scores = [encoding.bias(q_pos, k_pos), encoding.score(q, k, q_pos, k_pos, scale)]
    full_q = q if content is None else q + content * encoding.strength
    turned = encoding.rotate(full_q, q_pos, "query") @ encoding.rotate(k, k_pos, "key").transpose(-1, -2)
    return scale * turned + sum(part for part in scores if part is not None)


def same_everywhere(num_queries: int, num_keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The same query at every place, and the same key."""
    q, k = torch.randn(2, 1, NUM_HEADS, 1, HEAD_DIM, dtype=dtype)
    return q.expand(-1, -1, num_queries, -1), k.expand(-1, -1, num_keys, -1)


def has_numbers(encoding: Encoding) -> bool:
    return any(isinstance(module, NumberEncoding) for module in encoding.modules())


def assert_relative(scores: Tensor, q_pos: Grid, k_pos: Grid) -> None:
    """Patch-patch scores depend on the offset alone, and are not constant in any head."""
    patches = scores[0, :, q_pos.num_prefix_tokens :, k_pos.num_prefix_tokens :]
    by_offset: dict[tuple[float, ...], Tensor] = {}
    offsets = q_pos.offsets(k_pos, dtype=torch.float64)
    for i, j in itertools.product(range(q_pos.num_places), range(k_pos.num_places)):
        first = by_offset.setdefault(tuple(offsets[i, j].mul(720).round().tolist()), patches[:, i, j])
        assert_close(patches[:, i, j], first)
    assert len(by_offset) < q_pos.num_places * k_pos.num_places
    assert (torch.stack(list(by_offset.values())).std(dim=0) > 1e-4).all()


class TestRelative:
    @pytest.mark.parametrize("num_prefix_tokens", [0, 2])
    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_scores_depend_on_the_offset_alone(self, spec, num_axes: int, num_prefix_tokens: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens)
        grid = encoding.positions
        q, k = same_everywhere(grid.num_tokens, grid.num_tokens)
        for strength in (1.0, 0.5):
            encoding.set_strength(strength)
            assert_relative(pair_scores(encoding, q, k, grid, grid), grid, grid)

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_on_grids_of_other_steps(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes)
        queries = Grid(*SHAPES[num_axes], step=Fraction(2, 3), origin=-1)
        keys = Grid(*SHAPES[num_axes]).pool(2)
        for q_pos, k_pos in ((queries, encoding.positions), (encoding.positions, keys)):
            q, k = same_everywhere(q_pos.num_tokens, k_pos.num_tokens)
            if q_pos.num_places * k_pos.num_places > q_pos.lattice(k_pos).num_offsets:
                assert_relative(pair_scores(encoding, q, k, q_pos, k_pos), q_pos, k_pos)
            moved_q = Grid(*q_pos.shape, step=q_pos.step, origin=tuple(o + 5 for o in q_pos.origin))
            moved_k = Grid(*k_pos.shape, step=k_pos.step, origin=tuple(o + 5 for o in k_pos.origin))
            assert_close(pair_scores(encoding, q, k, moved_q, moved_k), pair_scores(encoding, q, k, q_pos, k_pos))

    @settings(max_examples=3, deadline=None)
    @given(data=st.data())
    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_moving_points_together_changes_nothing(self, spec, num_axes: int, data: st.DataObject) -> None:
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        encoding = make(spec, num_axes)
        places = torch.randn(2, 5, num_axes, dtype=torch.float64) * 4
        shift = torch.tensor(data.draw(st.lists(st.integers(-50, 50), min_size=num_axes, max_size=num_axes)))
        q, k = torch.randn(2, 2, NUM_HEADS, 5, HEAD_DIM, dtype=torch.float64)
        here, there = Points(places), Points(places + shift)
        assert_close(pair_scores(encoding, q, k, there, there), pair_scores(encoding, q, k, here, here))

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_numbers_are_constant_within_each_prefix_block(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens=2)
        grid = encoding.positions
        bias = encoding.bias(grid, grid)
        if not has_numbers(encoding):
            assert bias is None
            assert getattr(encoding, "prefix_bias", None) is None
            return
        blocks = [bias[:, :2, 2:], bias[:, 2:, :2], bias[:, :2, :2]]
        for row, block in zip(encoding.prefix_bias, blocks, strict=True):
            assert_close(block, row[:, None, None].expand(block.shape))
        bare = Grid(*grid.shape)
        assert_close(bias[:, 2:, 2:], encoding.bias(bare, bare))
        encoding.set_strength(0.5)
        assert_close(encoding.bias(grid, grid), 0.5 * bias)

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_prefix_on_one_side_only(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens=2)
        grid, bare = encoding.positions, Grid(*SHAPES[num_axes])
        whole = encoding.bias(grid, grid)
        if whole is not None:
            assert_close(encoding.bias(grid, bare), whole[:, :, 2:])
            assert_close(encoding.bias(bare, grid), whole[:, 2:])

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_strength_0_is_none(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens=1, strength=0.0)
        grid = encoding.positions
        none = create_encoding("none", NUM_HEADS, HEAD_DIM, grid)
        q, k, v = torch.randn(3, 2, NUM_HEADS, grid.num_tokens, HEAD_DIM, dtype=torch.float64)
        expected = attend(q, k, v, none, grid)
        assert_close(attend(q, k, v, encoding, grid), expected)
        encoding.set_strength(1.0)
        assert (attend(q, k, v, encoding, grid) - expected).abs().max() > 1e-3

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_attention_is_the_softmax_of_these_scores(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens=1)
        grid = encoding.positions
        q, k, v = torch.randn(3, 2, NUM_HEADS, grid.num_tokens, HEAD_DIM, dtype=torch.float64)
        expected = pair_scores(encoding, q, k, grid, grid).softmax(-1) @ v
        for backend in ("explicit", "sdpa", "auto"):
            assert_close(attend(q, k, v, encoding, grid, backend=backend), expected)

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_bias_is_strength_times_at(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, strength=0.5)
        if has_numbers(encoding):
            places = torch.randn(2, 4, num_axes, dtype=torch.float64)
            offsets = places[:, :, None] - places[:, None]
            expected = 0.5 * encoding.at(offsets).permute(0, 3, 1, 2)
            assert_close(encoding.bias(Points(places), Points(places)), expected)
        else:
            with pytest.raises(NotImplementedError, match=f"{type(encoding).__name__}: an encoding of the family"):
                encoding.at(torch.zeros(num_axes))

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_whole_offsets_may_come_as_integers(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, dtype=torch.float32)
        if has_numbers(encoding):
            offsets = torch.randint(-3, 4, (5, num_axes))
            numbers = encoding.at(offsets)
            assert numbers.is_floating_point()
            assert_close(numbers, encoding.at(offsets.float()))
        else:
            assert encoding.bias(encoding.positions, encoding.positions) is None


class TestPointsEqualGrid:
    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_same_places_same_result(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, num_prefix_tokens=2)
        grid = encoding.positions
        x = torch.randn(3, grid.num_tokens, NUM_HEADS * HEAD_DIM, dtype=torch.float64)
        assert_close(encoding.embed(x, grid.points(3)), encoding.embed(x, grid))
        q, k, v = torch.randn(3, 3, NUM_HEADS, grid.num_tokens, HEAD_DIM, dtype=torch.float64)
        expected = attend(q, k, v, encoding, grid)
        for q_pos, k_pos in ((grid.points(3), grid.points(3)), (grid, grid.points(3)), (grid.points(1), grid)):
            assert_close(attend(q, k, v, encoding, q_pos, k_pos), expected)

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_on_another_grid(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes)
        queries = Grid(*SHAPES[num_axes], step=(0.5, 2, 1)[:num_axes], origin=(3, 0.25, -1)[:num_axes])
        keys = queries.pool(2)
        q = torch.randn(2, NUM_HEADS, queries.num_tokens, HEAD_DIM, dtype=torch.float64)
        k, v = torch.randn(2, 2, NUM_HEADS, keys.num_tokens, HEAD_DIM, dtype=torch.float64)
        expected = attend(q, k, v, encoding, queries, keys)
        assert_close(attend(q, k, v, encoding, queries.points(2), keys.points(2)), expected)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_half_is_finite_close_and_keeps_its_dtype(self, spec, num_axes: int, dtype: torch.dtype) -> None:
        half = make(spec, num_axes, num_prefix_tokens=1, dtype=torch.float32).to(dtype)
        full = copy.deepcopy(half).float()
        grid = half.positions
        x = torch.randn(2, grid.num_tokens, NUM_HEADS * HEAD_DIM, dtype=dtype)
        assert half.embed(x, grid).dtype == dtype
        assert_close(half.embed(x, grid).float(), full.embed(x.float(), grid), dtype)
        q, k, v = torch.randn(3, 2, NUM_HEADS, grid.num_tokens, HEAD_DIM, dtype=dtype)
        for backend in ("explicit", "sdpa"):
            out = attend(q, k, v, half, grid, backend=backend)
            assert out.dtype == dtype
            assert out.isfinite().all()
            assert_close(out.float(), attend(q.float(), k.float(), v.float(), full, grid), dtype)

    @pytest.mark.parametrize(("spec", "num_axes"), RELATIVE)
    def test_d3_rotated_halves_stay_halves_with_full_precision_parameters(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, dtype=torch.float32)
        grid = encoding.positions
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(2, NUM_HEADS, grid.num_tokens, HEAD_DIM, dtype=dtype)
            for role in ("query", "key"):
                assert encoding.rotate(x, grid, role).dtype == dtype
            assert attend(x, x, x, encoding, grid).dtype == dtype


class Block(nn.Module):
    """A small module around attend, as a model would hold it."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.qkv = nn.Linear(NUM_HEADS * HEAD_DIM, 3 * NUM_HEADS * HEAD_DIM)
        self.encoding = encoding

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        grid = self.encoding.positions if grid is None else grid
        x = self.encoding.embed(x, grid)
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, self.encoding, grid).transpose(1, 2).flatten(2)


def tokens(grid: Grid, batch: int = 2) -> Tensor:
    return torch.randn(batch, grid.num_tokens, NUM_HEADS * HEAD_DIM)


class TestKept:
    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_state_dict_round_trip(self, spec, num_axes: int) -> None:
        old = make(spec, num_axes, 1, torch.float32, strength=0.25)
        new = make(spec, num_axes, 1, torch.float32)
        x = tokens(old.positions)
        blocks = Block(old), Block(new)
        blocks[1].load_state_dict(blocks[0].state_dict())
        assert new.strength == 0.25
        assert torch.equal(blocks[1](x), blocks[0](x))

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_deepcopy_and_pickle(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1, torch.float32)
        encoding.set_window_size(tuple(size + 2 for size in SHAPES[num_axes]))
        block, x = Block(encoding), tokens(encoding.positions)
        expected = block(x)
        for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            assert torch.equal(twin(x), expected)
            redraw(twin)
        assert torch.equal(block(x), expected)

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_c1_c2_meta_build_then_load(self, spec, num_axes: int) -> None:
        source = make(spec, num_axes, 1, torch.float32, strength=0.5)
        grid = source.positions
        with torch.device("meta"):
            encoding = create_encoding(spec, NUM_HEADS, HEAD_DIM, grid)
        assert all(t.is_meta for t in (*encoding.parameters(), *encoding.buffers()))
        encoding.to_empty(device="cpu")
        with torch.no_grad():
            for t in (*encoding.parameters(), *encoding.buffers()):
                t.fill_(float("nan") if t.is_floating_point() else 1)
        encoding.load_state_dict(source.state_dict())
        encoding.init_non_persistent_buffers()
        x, block = tokens(grid), Block(source)
        expected = block(x)
        block.encoding = encoding
        assert torch.equal(block(x), expected)

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_c1_meta_build_then_reset(self, spec, num_axes: int, nan_memory: None) -> None:
        grid = Grid(*SHAPES[num_axes], num_prefix_tokens=1)
        encoding = create_encoding(spec, NUM_HEADS, HEAD_DIM, grid, device="meta", strength=0.5)
        encoding.to_empty(device="cpu")
        torch.manual_seed(3)
        encoding.reset_parameters()
        torch.manual_seed(3)
        expected = create_encoding(spec, NUM_HEADS, HEAD_DIM, grid, strength=0.5)
        assert encoding.strength == 0.5
        assert encoding.state_dict().keys() == expected.state_dict().keys()
        for name, value in encoding.state_dict().items():
            assert value.isfinite().all(), name
            if name.endswith(("strength", "layout_half", "prefix_bias")):
                assert torch.equal(value, expected.state_dict()[name]), name
            elif value.numel() > 1:
                assert_close(value.float().std(), expected.state_dict()[name].float().std(), torch.bfloat16)

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_nothing_is_left_as_it_was_found_in_memory(self, spec, num_axes: int, nan_memory: None) -> None:
        grid = Grid(*SHAPES[num_axes], num_prefix_tokens=1)
        for dtype in (torch.float32, torch.bfloat16):
            encoding = create_encoding(spec, NUM_HEADS, HEAD_DIM, grid, dtype=dtype)
            assert all(t.isfinite().all() for t in (*encoding.parameters(), *encoding.buffers()))
            assert all(p.dtype == dtype for p in encoding.parameters())
            x = tokens(grid).to(dtype)
            assert Block(encoding).to(dtype)(x).isfinite().all()

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_every_parameter_gets_a_gradient(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 2, torch.float32)
        block = Block(encoding)
        (block(tokens(encoding.positions)) * torch.randn(NUM_HEADS * HEAD_DIM)).sum().backward()
        for name, parameter in encoding.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_no_weight_decay_names_every_parameter(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1)
        assert encoding.no_weight_decay() == {name for name, _ in encoding.named_parameters()}

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_c5_eval_under_inference_mode_then_train(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1, torch.float32)
        block, x = Block(encoding), tokens(encoding.positions)
        block.eval()
        with torch.inference_mode():
            encoding.set_window_size(tuple(size + 1 for size in SHAPES[num_axes]))
            expected = block(x)
        block.train()
        out = block(x)
        assert_close(out, expected)
        out.square().sum().backward()
        assert all(p.grad is not None for p in encoding.parameters())

    @pytest.mark.parametrize(("spec", "num_axes"), EVERY)
    def test_c7_forward_leaves_the_state_alone(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1, torch.float32)
        block = Block(encoding)
        before = {name: (t, t._version, t.clone()) for name, t in (*block.named_buffers(), *block.named_parameters())}
        attributes = {name: set(vars(module)) for name, module in block.named_modules()}
        block(tokens(encoding.positions)).sum().backward()
        after = dict((*block.named_buffers(), *block.named_parameters()))
        assert before.keys() == after.keys()
        for name, (tensor, version, value) in before.items():
            assert after[name] is tensor
            assert tensor._version == version
            assert torch.equal(tensor, value)
        assert attributes == {name: set(vars(module)) for name, module in block.named_modules()}


@pytest.mark.usefixtures("fresh_compiler")
class TestTraced:
    @pytest.mark.parametrize(("spec", "num_axes"), ONE_EACH)  # for a sum, test_compiled_gradients
    def test_c7_c8_compiled_is_eager_on_other_grids(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1, torch.float32)
        block = Block(encoding)
        compiled = torch.compile(block, fullgraph=True, backend="eager")
        for more in (0, 1):
            grid = Grid(*(size + more for size in SHAPES[num_axes]), num_prefix_tokens=1)
            encoding.set_window_size(grid.shape)
            x = tokens(grid)
            assert_close(compiled(x, grid), block(x, grid))

    def test_compiled_gradients(self) -> None:
        encoding = make(["table", "rope_mixed"], 2, 1, torch.float32)
        block, x = Block(encoding), tokens(encoding.positions)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        parameters = list(block.parameters())
        ours = torch.autograd.grad(compiled(x).square().sum(), parameters)
        theirs = torch.autograd.grad(block(x).square().sum(), parameters)
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)

    @pytest.mark.parametrize(("spec", "num_axes"), [*ONE_EACH, SUM])
    def test_exported_with_any_batch(self, spec, num_axes: int) -> None:
        encoding = make(spec, num_axes, 1, torch.float32)
        encoding.set_window_size(tuple(size + 2 for size in SHAPES[num_axes]))
        block = Block(encoding).eval()
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export(block, (tokens(encoding.positions, 2),), dynamic_shapes=({0: batch},))
        for size in (1, 5):
            x = tokens(encoding.positions, size)
            assert_close(program.module()(x), block(x))
        assert all(type(m) is Tensor for m in getattr(encoding, "resize_matrices", None) or ())

    def test_grid_made_inside_a_compiled_function(self) -> None:
        encoding = create_encoding("table", NUM_HEADS, HEAD_DIM, Grid(3, 5))

        def forward(x: Tensor) -> Tensor:
            return attend(x, x, x, encoding, Grid(3, 5), Grid(3, 5))

        x = torch.randn(2, NUM_HEADS, 15, HEAD_DIM)
        assert_close(torch.compile(forward, fullgraph=True, backend="eager")(x), forward(x))

    @pytest.mark.long
    def test_inductor(self) -> None:
        encoding = make(["table", "rope_axial"], 2, 1, torch.float32)
        block = Block(encoding)
        x = tokens(encoding.positions)
        assert_close(torch.compile(block, fullgraph=True)(x), block(x))


def test_there_are_sums_of_sums() -> None:
    encoding = make(SUMS[2], 2, 1)
    assert isinstance(encoding, Combined)
    assert [type(part).__name__ for part in encoding] == ["OffsetTable", "Combined"]
