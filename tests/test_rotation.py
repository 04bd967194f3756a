"""Turning in few passes against the plain formula, and what is kept between calls against encodings made anew."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos2d import Combined, Grid, Points, create_encoding
from relpos2d.encoding import RotaryEncoding
from relpos2d.rotation import Rotation, turn
from tests.oracles import gradients, redraw
from tests.tolerances import assert_close

LAYOUTS = ["interleaved", "half"]
NAMES = ["rope_axial", "rope_mixed"]
GRID = Grid(3, 5)


def make(name: str, layout: str = "interleaved", positions: Grid = GRID, **options: Any) -> Any:
    encoding = create_encoding(name, 3, 12, positions, layout=layout, **options)
    redraw(encoding)
    return encoding


def plainly(encoding: Any, x: Tensor, pos: Grid | Points, strength: float = 1.0) -> Tensor:
    angles = encoding.angles(pos.coords(dtype=x.dtype)) * encoding.strength.to(x.dtype) * strength
    p = pos.num_prefix_tokens
    return torch.cat((x[..., :p, :], turn(x[..., p:, :], angles, encoding.layout)), dim=-2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """Counts how often an encoding is asked for its angles."""

    def count(encoding: Any) -> list[int]:
        cls, calls = type(encoding), [0]
        angles = cls.angles

        def counting(self: Any, coords: Tensor) -> Tensor:
            calls[0] += 1
            return angles(self, coords)

        monkeypatch.setattr(cls, "angles", counting)
        return calls

    return count


#: 2 samples, 3 heads, n tokens, 12 channels, laid out as models and callers do
MEMORY: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda n: torch.randn(2, 3, n, 12, dtype=torch.float64),
    "out of a projection": lambda n: torch.randn(2, n, 3, 3, 12, dtype=torch.float64).permute(2, 0, 3, 1, 4)[1],
    "from an odd place": lambda n: torch.randn(2 * 3 * n * 12 + 1, dtype=torch.float64)[1:].view(2, 3, n, 12),
    "rows of odd length": lambda n: torch.randn(2, 3, n, 13, dtype=torch.float64)[..., :12],
    "every other channel": lambda n: torch.randn(2, 3, n, 24, dtype=torch.float64)[..., ::2],
    "channels first": lambda n: torch.randn(2, 3, 12, n, dtype=torch.float64).transpose(-1, -2),
    "one for all heads": lambda n: torch.randn(2, 1, n, 12, dtype=torch.float64).expand(2, 3, n, 12),
    "no samples": lambda n: torch.randn(0, 3, n, 12, dtype=torch.float64),
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_any_memory_layout_turns_by_the_formula(name: str, layout: str, memory: str) -> None:
    grid = Grid(3, 5, num_prefix_tokens=2, step=0.5, origin=(-1, 0.25))
    encoding = make(name, layout, grid, dtype=torch.float64)
    x = MEMORY[memory](grid.num_tokens).requires_grad_()
    before = x.detach().clone()
    inputs = [x, *encoding.parameters()]
    out, expected = encoding.rotate(x, grid), plainly(encoding, x, grid)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)
    with torch.no_grad():
        assert_close(encoding.rotate(x, grid), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_points_turn_by_the_formula(name: str, layout: str, num_samples: int) -> None:
    encoding = make(name, layout, dtype=torch.float64)
    places = torch.randn(num_samples, 7, 2, dtype=torch.float64, requires_grad=True)
    points = Points(places, num_prefix_tokens=1)
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64, requires_grad=True)
    inputs = [x, places, *encoding.parameters()]
    out, expected = encoding.rotate(x, points), plainly(encoding, x, points)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_sample_at_the_places_of_two(layout: str) -> None:
    angles = torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    out, expected = Rotation(angles, layout)(x), turn(x, angles, layout)
    assert out.shape == (2, 4, 5, 6)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, [x, angles]), gradients(expected, [x, angles]), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_second_derivatives(layout: str, heads: int) -> None:
    angles = torch.randn(heads, 3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def turned(x: Tensor, angles: Tensor) -> Tensor:
        return Rotation(angles, layout)(x)

    assert torch.autograd.gradcheck(turned, (x, angles))
    assert torch.autograd.gradgradcheck(turned, (x, angles))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_magnitudes_by_the_formula(layout: str, heads: int, batch: tuple[int, ...]) -> None:
    angles = torch.randn(*batch, heads, 5, 3, dtype=torch.float64, requires_grad=True)
    magnitudes = torch.randn(*batch, 1, 5, 3, dtype=torch.float64).exp()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    rotation = Rotation(angles, layout, magnitudes)
    assert rotation.factors is not None
    out, expected = rotation(x), turn(x, angles, layout, magnitudes)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, [x, angles]), gradients(expected, [x, angles]), strict=True):
        assert_close(ours, theirs)
    with torch.no_grad():
        assert_close(rotation(x), expected)
    pairs = x.unflatten(-1, (3, 2) if layout == "interleaved" else (2, 3))
    turned = out.unflatten(-1, (3, 2) if layout == "interleaved" else (2, 3))
    dim = -1 if layout == "interleaved" else -2
    assert_close(turned.norm(dim=dim), (pairs.norm(dim=dim) * magnitudes).expand_as(turned.norm(dim=dim)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_second_derivatives_with_magnitudes(layout: str) -> None:
    angles = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    magnitudes = torch.randn(1, 3, 2, dtype=torch.float64).exp()
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def turned(x: Tensor, angles: Tensor) -> Tensor:
        return Rotation(angles, layout, magnitudes)(x)

    assert torch.autograd.gradcheck(turned, (x, angles))
    assert torch.autograd.gradgradcheck(turned, (x, angles))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_magnitudes_that_want_a_gradient_get_it(layout: str) -> None:
    angles, logarithms = torch.randn(2, 1, 3, 2, dtype=torch.float64).requires_grad_()
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    inputs = [angles, logarithms, x]
    out, expected = Rotation(angles, layout, logarithms.exp())(x), turn(x, angles, layout, logarithms.exp())
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first jvp
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms_of_functions_follow_the_formula(layout: str) -> None:
    encoding = make("rope_mixed", layout, dtype=torch.float64)
    x, tangent = torch.randn(2, 2, 3, 15, 12, dtype=torch.float64)

    def energy(x: Tensor) -> Tensor:
        return encoding.rotate(x, GRID).pow(3).sum()

    assert_close(torch.func.grad(energy)(x), gradients_of(energy, x))
    expected = plainly(encoding, x, GRID)
    with torch.no_grad():
        assert_close(torch.func.vmap(lambda x: encoding.rotate(x[None], GRID)[0])(x), expected)
    out, moved = torch.func.jvp(lambda x: encoding.rotate(x, GRID), (x,), (tangent,))[:2]
    assert_close(out, expected)
    assert_close(moved, plainly(encoding, tangent, GRID))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        moved = torch.autograd.forward_ad.unpack_dual(encoding.rotate(dual, GRID)).tangent
        assert_close(moved, plainly(encoding, tangent, GRID))


def gradients_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype: torch.dtype, name: str, layout: str) -> None:
    encoding = make(name, layout)
    x = torch.randn(2, 3, 15, 12, dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    out, expected = encoding.rotate(x, GRID), plainly(encoding, exact, GRID)
    assert out.dtype == dtype
    assert_close(out.double(), expected, dtype)
    for ours, theirs in zip(
        gradients(out, [x, *encoding.parameters()]), gradients(expected, [exact, *encoding.parameters()]), strict=True
    ):
        assert_close(ours.double(), theirs.double(), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_the_angles_precise(name: str) -> None:
    encoding = make(name)
    far = Grid(3, 5, origin=(257, 300))
    x = torch.randn(2, 3, 15, 12)
    expected = plainly(encoding, x, far)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(encoding.rotate(x, far), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_that_learns_nothing_saves_nothing_of_the_size_of_x(layout: str) -> None:
    x = torch.randn(16, 3, 15, 12, requires_grad=True)

    def saved_bytes(name: str) -> int:
        saved = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        encoding = make(name, layout)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = encoding.rotate(x, GRID)
        saved.pop(out.data_ptr(), None)  # what attention keeps in any case
        return sum(saved.values())

    assert saved_bytes("rope_axial") < x.nbytes / 10
    assert saved_bytes("rope_mixed") < x.nbytes / 2


class OwnRotate(RotaryEncoding):
    def angles(self, coords: Tensor) -> Tensor:
        return coords[..., None, :, :1].expand(*coords.shape[:-2], 1, -1, self.head_dim // 2)

    def rotate(self, x, pos, role="query", *, strength=1.0):
        return super().rotate(x, pos, role, strength=strength if role == "query" else 0.5 * strength)


class Told(RotaryEncoding):
    """Turns the first six channels by the place, other for queries and keys, and by the length; and lengthens them."""

    keeps = True
    knows_length = True
    turns_alike = False

    def __init__(self, num_heads: int, head_dim: int, positions: Grid, **options: Any) -> None:
        super().__init__(num_heads, head_dim, positions, rotary_dim=6, **options)
        self.calls: list[tuple[str, list[float]]] = []

    def turns(self, coords: Tensor, role: str, length: Tensor | None) -> tuple[Tensor, Tensor]:
        assert length is not None
        self.calls.append((role, length.reshape(-1).tolist()))
        sign = 1 if role == "query" else -1
        rates = torch.tensor([0.3, 0.2, 0.1], dtype=coords.dtype)
        angles = coords * rates * (length.to(coords.dtype)[..., None, None] / 10)
        return angles.unsqueeze(-3), (sign * 0.1 * coords * rates).unsqueeze(-3)

    def plainly(self, x: Tensor, places: list[float], role: str, length: float, strength: float = 1.0) -> Tensor:
        """Of tokens with these places, all samples alike."""
        sign = 1 if role == "query" else -1
        rates = torch.tensor([0.3, 0.2, 0.1], dtype=x.dtype)
        products = torch.tensor(places, dtype=x.dtype)[:, None] * rates * strength
        turned = turn(x[..., :6], products * length / 10, self.layout, (sign * 0.1 * products).exp())
        return torch.cat((turned, x[..., 6:]), dim=-1)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestTold:
    """Encodings that know role, length, magnitudes and the channels they turn."""

    def test_each_side_by_the_formula_and_by_the_length_of_both(self, layout: str) -> None:
        encoding = Told(3, 8, Grid(4), layout=layout, strength=0.5, dtype=torch.float64)
        q_pos, k_pos = Grid(2, origin=3), Grid(7, num_prefix_tokens=1)
        q, k = torch.randn(2, 3, 2, 8, dtype=torch.float64), torch.randn(2, 3, 8, 8, dtype=torch.float64)
        turned_q, turned_k = encoding.rotate_both(q, k, q_pos, k_pos)
        assert encoding.calls == [("query", [7.0]), ("key", [7.0])]
        assert_close(turned_q, encoding.plainly(q, [3, 4], "query", 7, 0.5))
        assert torch.equal(turned_k[:, :, :1], k[:, :, :1])
        assert_close(turned_k[:, :, 1:], encoding.plainly(k[:, :, 1:], list(range(7)), "key", 7, 0.5))
        assert_close(encoding.rotate(q, q_pos, strength=0.5), encoding.plainly(q, [3, 4], "query", 5, 0.25))

    def test_each_sample_has_its_length(self, layout: str) -> None:
        encoding = Told(3, 8, Grid(4), layout=layout, dtype=torch.float64)
        places = torch.tensor([[[0.0], [2.0], [1.0]], [[7.0], [8.0], [9.0]]], dtype=torch.float64)
        valid = torch.tensor([[True, True, True], [True, True, False]])
        points = Points(places, valid)
        x = torch.randn(2, 3, 3, 8, dtype=torch.float64)
        both = encoding.rotate_both(x, x[:, :, :1], points, Grid(1, origin=4))
        assert encoding.calls[0] == ("query", [5.0, 9.0])
        for b, (given, length) in enumerate([([0, 2, 1], 5), ([7, 8, 0], 9)]):
            assert_close(both[0][b], encoding.plainly(x[b], given, "query", length))
            assert_close(both[1][b], encoding.plainly(x[b, :, :1], [4], "key", length))

    def test_what_is_kept_knows_them_all(self, layout: str) -> None:
        encoding = Told(3, 8, Grid(4), layout=layout, dtype=torch.float64)
        x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
        long = torch.randn(2, 3, 9, 8, dtype=torch.float64)
        with torch.no_grad():
            for strength in (1.0, 0.5, torch.tensor(0.5), torch.tensor(0.25)):
                for length, other in ((4, Grid(4)), (9, Grid(9)), (4, Grid(4))):
                    keys = x if length == 4 else long
                    for _ in range(2):
                        q, k = encoding.rotate_both(x, keys, Grid(4), other, strength=strength)
                        amount = float(strength)
                        assert_close(q, encoding.plainly(x, [0, 1, 2, 3], "query", length, amount))
                        assert_close(k, encoding.plainly(keys, list(range(length)), "key", length, amount))
        # of each pair of calls the second had both sides from the first, no call any from another strength or length
        assert len(encoding.calls) == 4 * 3 * 2
        encoding.set_strength(0.5)
        with torch.no_grad():
            assert_close(encoding.rotate(x, Grid(4)), encoding.plainly(x, [0, 1, 2, 3], "query", 4, 0.5))

    def test_in_a_sum_whose_strength_changes(self, layout: str) -> None:
        part = Told(3, 8, Grid(4), layout=layout, dtype=torch.float64)
        encoding = Combined(part, strength=0.5)
        assert encoding.knows_length
        x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
        with torch.no_grad():
            for strength in (0.5, 0.25):
                encoding.set_strength(strength)
                q, k = encoding.rotate_both(x, x, Grid(4), Grid(4))
                assert_close(q, part.plainly(x, [0, 1, 2, 3], "query", 4, strength))
                assert_close(k, part.plainly(x, [0, 1, 2, 3], "key", 4, strength))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_d4_both_sides_keep_their_dtype(self, layout: str, dtype: torch.dtype) -> None:
        encoding = Told(3, 8, Grid(4), layout=layout)
        x = torch.randn(2, 3, 4, 8).to(dtype)
        for out, role in zip(encoding.rotate_both(x, x, Grid(4), Grid(4)), ("query", "key"), strict=True):
            assert out.dtype == dtype
            assert_close(out.float(), encoding.plainly(x.float(), [0, 1, 2, 3], role, 4), dtype)

    def test_points_that_learn_move_angles_and_magnitudes(self, layout: str) -> None:
        encoding = Told(3, 8, Grid(4), layout=layout, dtype=torch.float64)
        places = torch.tensor([[[0.5], [2.0], [1.0]]], dtype=torch.float64)
        x = torch.randn(1, 3, 3, 8, dtype=torch.float64)

        def turned(places: Tensor) -> Tensor:
            return encoding.rotate(x, Points(places), "key")

        assert torch.autograd.gradcheck(turned, (places.requires_grad_(),))


class TestBoth:
    @pytest.mark.parametrize("make_encoding", [
        lambda: make("rope_axial"),
        lambda: make("rope_mixed", "half"),
        lambda: OwnRotate(3, 12, GRID),
        lambda: Combined(make("rope_mixed"), OwnRotate(3, 12, GRID), make("rope_axial", "half"), strength=0.5),
        lambda: create_encoding("none", 3, 12, GRID),
    ])  # fmt: skip
    def test_is_each_by_itself(self, make_encoding: Callable[[], Any]) -> None:
        encoding, coarse = make_encoding(), GRID.pool(2)
        for k_pos in (GRID, coarse, GRID.points(2)):
            q, k = torch.randn(2, 3, 15, 12), torch.randn(2, 3, k_pos.num_tokens, 12)
            both = encoding.rotate_both(q, k, GRID, k_pos, strength=0.5)
            assert_close(both[0], encoding.rotate(q, GRID, "query", strength=0.5))
            assert_close(both[1], encoding.rotate(k, k_pos, "key", strength=0.5))

    @pytest.mark.parametrize("wrong", ["q", "k"])
    def test_refuses_either(self, wrong: str) -> None:
        sizes = {"q": 15, "k": 15, wrong: 14}
        q, k = (torch.randn(1, 3, n, 12) for n in sizes.values())
        with pytest.raises(ValueError, match=r"AxialRope: x has 14 tokens of 12 channels, the positions Grid\(3, 5\)"):
            make("rope_axial").rotate_both(q, k, GRID, GRID)

    def test_same_places_ask_once_for_their_angles(self, counted: Callable[[Any], list[int]]) -> None:
        encoding = make("rope_mixed")
        calls = counted(encoding)
        q, k = torch.randn(2, 1, 3, 15, 12)
        points = GRID.points()
        for number, (q_pos, k_pos) in enumerate([(GRID, Grid(3, 5)), (points, points)], start=1):
            encoding.rotate_both(q, k, q_pos, k_pos)
            assert calls == [number]
        encoding.rotate_both(q, k, GRID, Grid(3, 5, origin=1))
        assert calls == [4]


def step_with_fused_adamw(encoding: Any) -> None:
    encoding.freqs.grad = torch.ones_like(encoding.freqs)
    torch.optim.AdamW(encoding.parameters(), lr=0.1, fused=True).step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "strength": lambda e: e.set_strength(0.5),
    "strength through data": lambda e: e.strength.data.fill_(0.25),
    "weights loaded": lambda e: e.load_state_dict(make(e.name).state_dict()),
    "reset": lambda e: (e.set_strength(0.5), e.reset_parameters()),
    "theta": lambda e: setattr(e, "theta", 3.0),
    "layout": lambda e: setattr(e, "layout", "half"),
    "cast": lambda e: e.bfloat16(),
    "parameters": lambda e: redraw(e),
    "parameters through data": lambda e: [p.data.mul_(2) for p in e.parameters()],
    "a fused optimiser": lambda e: step_with_fused_adamw(e) if e.name == "rope_mixed" else None,
    "training and back": lambda e: e.train().eval(),
}


class TestKept:
    """Without gradients the same places are turned by what was made before; whatever changes, the result is that of a new one."""

    @pytest.mark.parametrize("name", NAMES)
    def test_made_once(self, name: str, counted: Callable[[Any], list[int]]) -> None:
        encoding, (q, k) = make(name), torch.randn(2, 2, 3, 15, 12)
        calls = counted(encoding)
        coarse = GRID.pool(2)
        with torch.no_grad():
            first = encoding.rotate(q, GRID)
            assert torch.equal(encoding.rotate(q, Grid(3, 5)), first)
            encoding.rotate_both(q, k[:, :, : coarse.num_tokens], GRID, coarse)
            encoding.rotate_both(q, k[:, :, : coarse.num_tokens], GRID, coarse)
            assert calls == [2]
            encoding.rotate(q, GRID, strength=0.5)
            encoding.rotate(q, GRID, strength=torch.tensor(0.5))
            encoding.rotate(q.double(), GRID)
            assert calls == [5]
        assert len(encoding._kept) == 2

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("name", NAMES)
    def test_never_stale(self, name: str, change: str) -> None:
        encoding, x = make(name).eval(), torch.randn(2, 3, 15, 12)
        with torch.no_grad():
            encoding.rotate(x, GRID)
            assert encoding._kept
        CHANGES[change](encoding)
        with torch.no_grad():
            assert_close(encoding.rotate(x, GRID), plainly(encoding, x, GRID))
            assert_close(encoding.rotate(x, GRID, strength=0.5), plainly(encoding, x, GRID, 0.5))

    def test_nothing_that_learns(self, counted: Callable[[Any], list[int]]) -> None:
        encoding, x = make("rope_mixed"), torch.randn(2, 3, 15, 12)
        calls = counted(encoding)
        for _ in range(2):
            encoding.rotate(x, GRID).sum().backward()
        assert calls == [2]
        assert encoding._kept == ()
        encoding.requires_grad_(False)
        encoding.rotate(x, GRID)
        encoding.rotate(x, GRID)
        assert calls == [3]

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", NAMES)
    def test_c5_training_after_inference_mode(self, name: str, layout: str) -> None:
        encoding, x = make(name, layout), torch.randn(2, 3, 15, 12, requires_grad=True)
        with torch.inference_mode():
            encoding.rotate(x, GRID)
        assert encoding._kept
        inputs = [x, *encoding.parameters()]
        ours, theirs = gradients(encoding.rotate(x, GRID), inputs), gradients(plainly(encoding, x, GRID), inputs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other)

    def test_copies_and_files_do_not_carry_it(self) -> None:
        encoding = make("rope_axial")
        names = list(encoding.state_dict())
        x = torch.randn(2, 3, 15, 12)
        size = len(pickle.dumps(encoding))
        out = encoding.rotate(x, GRID)
        assert encoding._kept
        assert len(pickle.dumps(encoding)) == size
        for other in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
            assert other._kept == ()
            assert torch.equal(other.rotate(x, GRID), out)
        assert list(encoding.state_dict()) == names == ["strength", "layout_half"]

    def test_not_what_is_large(self) -> None:
        large = Grid(100, 96)
        encoding = create_encoding("rope_mixed", 2, 32, large, layout="half")
        with torch.no_grad():
            encoding.rotate(torch.randn(1, 2, large.num_tokens, 32), large)
        assert encoding._kept == ()


class Both(nn.Module):
    def __init__(self, encoding: Any) -> None:
        super().__init__()
        self.encoding: Any = encoding

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoding.rotate_both(q, k, GRID, GRID)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_in_real_arithmetic(layout: str) -> None:
    both = Both(make("rope_axial", layout))
    q, k = torch.randn(2, 2, 3, 15, 12)
    expected = both(q, k)
    program = torch.export.export(both, (q, k), strict=False)
    for ours, theirs in zip(program.module()(q, k), expected, strict=True):
        assert_close(ours, theirs)
    made = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert len(made) > 10
    assert not any(tensor.is_complex() for tensor in made)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_into_one_graph() -> None:
    both = Both(make("rope_mixed"))
    q, k = torch.randn(2, 2, 3, 15, 12)
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(q, k), both(q, k), strict=True):
        assert_close(ours, theirs)


def test_on_the_meta_device() -> None:
    encoding = make("rope_axial", "half", device="meta")
    assert encoding.rotate(torch.empty(2, 3, 15, 12, device="meta"), GRID).shape == (2, 3, 15, 12)
