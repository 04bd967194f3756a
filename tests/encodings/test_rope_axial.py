"""Axial RoPE against turning pair by pair, timm and rotary-embedding-torch, in both layouts."""

import math

import pytest
import torch
from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat
from torch import Tensor

from relpos2d import Grid, Points, attend, convert_rotary_layout, create_encoding
from relpos2d.encoding import RotaryEncoding
from tests.oracles import gradients, grid_places, turn
from tests.public import RotaryEmbedding, apply_rotary_emb
from tests.tolerances import assert_close


def turned(x: Tensor, grid: Grid, theta: float, layout: str, strength: float = 1.0) -> Tensor:
    num_pairs = x.shape[-1] // (2 * grid.num_axes)
    places = grid_places(grid.shape, [float(s) for s in grid.step], [float(o) for o in grid.origin])
    out = []
    for sample in x.flatten(0, 1):
        rows = list(sample[: grid.num_prefix_tokens])
        for token, place in zip(sample[grid.num_prefix_tokens :], places, strict=True):
            angles = [strength * p * theta ** (-j / num_pairs) for p in place for j in range(num_pairs)]
            rows.append(turn(token, angles, layout))
        out.append(torch.stack(rows))
    return torch.stack(out).reshape(x.shape)


GRIDS = [
    Grid(7),
    Grid(4, 6),
    Grid(5, 3, num_prefix_tokens=5),
    Grid(2, 3, 2, num_prefix_tokens=1),
    Grid(4, 3, step=(0.5, 2), origin=(-3, 0.25)),
]


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("grid", GRIDS)
def test_turns_each_pair_by_its_angle(grid: Grid, layout: str) -> None:
    encoding = create_encoding("rope_axial", 3, 12, grid, theta=50.0, layout=layout, dtype=torch.float64)
    x = torch.randn(2, 3, grid.num_tokens, 12, dtype=torch.float64, requires_grad=True)
    expected = turned(x, grid, 50.0, layout)
    for role in ("query", "key"):
        out = encoding.rotate(x, grid, role)
        assert_close(out, expected)
        assert_close(gradients(out, [x])[0], gradients(expected, [x])[0])
    encoding.set_strength(0.5)
    assert_close(encoding.rotate(x, grid), turned(x, grid, 50.0, layout, 0.5))
    assert_close(encoding.rotate(x, grid, strength=0.25), turned(x, grid, 50.0, layout, 0.125))


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (7, 7)])
def test_a1_timm_rotary_cat(shape: tuple[int, int]) -> None:
    theirs = RotaryEmbeddingCat(16, temperature=100.0, in_pixels=False, feat_shape=list(shape), grid_indexing="ij")
    x = torch.randn(2, 3, math.prod(shape), 16)
    ours = create_encoding("rope_axial", 3, 16, Grid(*shape), theta=100.0)
    assert_close(ours.rotate(x, Grid(*shape)), apply_rot_embed_cat(x, theirs.get_embed()))


def test_timm_rotary_cat_half() -> None:
    theirs = RotaryEmbeddingCat(
        16, temperature=100.0, in_pixels=False, feat_shape=[4, 6], grid_indexing="ij", rotate_half=True
    )
    x = torch.randn(2, 3, 24, 16)
    ours = create_encoding("rope_axial", 3, 16, Grid(4, 6), layout="half")
    assert_close(ours.rotate(x, Grid(4, 6)), apply_rot_embed_cat(x, theirs.get_embed(), half=True))


@pytest.mark.parametrize("shape", [(9,), (4, 6), (2, 3, 5)])
def test_rotary_embedding_torch(shape: tuple[int, ...]) -> None:
    theirs = RotaryEmbedding(12 // len(shape), freqs_for="lang", theta=100)
    freqs = theirs.get_axial_freqs(*shape)
    x = torch.randn(2, 3, *shape, 12)
    ours = create_encoding("rope_axial", 3, 12, Grid(*shape), theta=100.0)
    expected = apply_rotary_emb(freqs, x).flatten(2, -2)
    assert_close(ours.rotate(x.flatten(2, -2), Grid(*shape)), expected)


class TestOrientation:
    """An angle along one axis only turns exactly the channels of that axis, by the coordinate of that axis."""

    @pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3)])
    def test_by_value(self, height: int, width: int, axis: int, num_prefix_tokens: int) -> None:
        grid = Grid(height, width, num_prefix_tokens=num_prefix_tokens)
        encoding = create_encoding("rope_axial", 1, 4, grid)
        x = torch.zeros(1, 1, grid.num_tokens, 4)
        x[..., 2 * axis] = 1.0  # the first pair sees y, the second x
        out = encoding.rotate(x, grid)[0, 0]
        for i in range(grid.num_tokens):
            t = i - num_prefix_tokens
            coordinate = 0 if t < 0 else (t // width, t % width)[axis]
            expected = [0.0, 0.0, 0.0, 0.0]
            expected[2 * axis : 2 * axis + 2] = [math.cos(coordinate), math.sin(coordinate)]
            assert_close(out[i], torch.tensor(expected))


@pytest.mark.parametrize("num_prefix_tokens", [1, 4])
@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_e4_e7_prefix_tokens_stay_and_the_first_patch_has_its_own_place(name: str, num_prefix_tokens: int) -> None:
    grid = Grid(3, 5, num_prefix_tokens=num_prefix_tokens, origin=1)
    encoding = create_encoding(name, 2, 8, grid)
    x = torch.randn(2, 2, grid.num_tokens, 8)
    out = encoding.rotate(x, grid)
    assert out.shape == x.shape
    assert torch.equal(out[:, :, :num_prefix_tokens], x[:, :, :num_prefix_tokens])
    bare = Grid(3, 5, origin=1)
    assert_close(out[:, :, num_prefix_tokens:], encoding.rotate(x[:, :, num_prefix_tokens:], bare))
    assert (out - x)[:, :, num_prefix_tokens].abs().max() > 0.1
    assert_close(out.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_e3_moving_everything_changes_no_score(name: str, layout: str) -> None:
    encoding = create_encoding(name, 2, 8, Grid(4, 6), layout=layout, dtype=torch.float64)
    q, k = torch.randn(2, 1, 2, 24, 8, dtype=torch.float64)

    def scores(origin: tuple[float, float]) -> Tensor:
        grid = Grid(4, 6, origin=origin)
        return encoding.rotate(q, grid, "query") @ encoding.rotate(k, grid, "key").transpose(-1, -2)

    assert_close(scores((7, -3.5)), scores((0, 0)))
    shifted = encoding.rotate(q, Grid(4, 6, origin=1)) @ encoding.rotate(k, Grid(4, 6)).transpose(-1, -2)
    assert (shifted - scores((0, 0))).abs().max() > 0.1


class TestLayout:
    @pytest.mark.parametrize("grid", [Grid(7), Grid(4, 6), Grid(2, 3, 2)])
    @pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
    def test_e1_e2_layouts_agree_after_permuting_channels(self, name: str, grid: Grid) -> None:
        interleaved = create_encoding(name, 3, 12, grid, dtype=torch.float64)
        half = create_encoding(name, 3, 12, grid, layout="half", dtype=torch.float64)
        if name == "rope_mixed":
            half.freqs.data.copy_(interleaved.freqs)
        x = torch.randn(2, grid.num_tokens, 36, dtype=torch.float64)
        weights = torch.randn(2, 36, 36, dtype=torch.float64)  # of q and k
        converted = [convert_rotary_layout(w, 3, source="interleaved", target="half") for w in weights]

        def scores(encoding: RotaryEncoding, q_weight: Tensor, k_weight: Tensor) -> Tensor:
            q, k = ((x @ w.T).unflatten(-1, (3, 12)).transpose(1, 2) for w in (q_weight, k_weight))
            return encoding.rotate(q, grid) @ encoding.rotate(k, grid, "key").transpose(-1, -2)

        expected = scores(interleaved, *weights)
        assert_close(scores(half, *converted), expected)
        assert (scores(half, *weights) - expected).abs().max() > 0.1

    def test_e2_conversion_by_value(self) -> None:
        rows = torch.arange(12)  # two heads of 6 channels
        half = convert_rotary_layout(rows, 2, source="interleaved", target="half")
        assert half.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
        assert torch.equal(convert_rotary_layout(half, 2, source="half", target="interleaved"), rows)
        same = convert_rotary_layout(rows, 2, source="half", target="half")
        assert torch.equal(same, rows)
        assert same is not rows
        matrix = torch.randn(12, 5)
        assert torch.equal(convert_rotary_layout(matrix, 2, source="interleaved", target="half"), matrix[half])

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (
                ((12,), 2, "interleaved", "other"),
                "convert_rotary_layout: layout='other' must be one of interleaved, half",
            ),
            (((12,), 2, "neox", "half"), "convert_rotary_layout: layout='neox' must be one of interleaved, half"),
            (((12,), 4, "interleaved", "half"), r"12 channels must be a multiple of 2 \* num_heads=8"),
            (((12,), 0, "interleaved", "half"), r"12 channels must be a multiple of 2 \* num_heads=0"),
        ],
    )
    def test_conversion_refuses(self, arguments: tuple, text: str) -> None:
        shape, num_heads, source, target = arguments
        with pytest.raises(ValueError, match=text):
            convert_rotary_layout(torch.zeros(shape), num_heads, source=source, target=target)

    @pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
    def test_e1_layout_travels_with_the_weights(self, name: str) -> None:
        interleaved = create_encoding(name, 2, 8, Grid(4, 6))
        half = create_encoding(name, 2, 8, Grid(4, 6), layout="half")
        for source, target, text in (
            (half, interleaved, "have layout='half', the module has 'interleaved'"),
            (interleaved, half, "have layout='interleaved', the module has 'half'"),
        ):
            with pytest.raises(RuntimeError, match=text):
                target.load_state_dict(source.state_dict())
            again = create_encoding(name, 2, 8, Grid(4, 6), layout=source.layout)
            again.load_state_dict(source.state_dict())
        holder = torch.nn.ModuleDict({"encoding": interleaved})
        with pytest.raises(RuntimeError, match=r"the weights encoding\.\* have layout='half'"):
            holder.load_state_dict({f"encoding.{key}": value for key, value in half.state_dict().items()})

    def test_e1_weights_that_tell_no_layout_are_left_to_the_loader(self) -> None:
        encoding = create_encoding("rope_axial", 2, 8, Grid(4, 6), layout="half")
        with pytest.raises(RuntimeError, match=r"Missing key.*layout_half"):
            encoding.load_state_dict({"strength": torch.tensor(1.0)})
        assert encoding.load_state_dict({"strength": torch.tensor(0.5)}, strict=False).missing_keys == ["layout_half"]

    @pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
    def test_e1_unknown_layout(self, name: str) -> None:
        with pytest.raises(ValueError, match="layout='neox' must be one of interleaved, half"):
            create_encoding(name, 2, 8, Grid(4, 6), layout="neox")

    def test_repr_tells_layout(self) -> None:
        assert repr(create_encoding("rope_axial", 2, 8, Grid(4, 6), layout="half")).endswith("layout='half')")


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
    def test_d2_d3_places_beyond_256_stay_apart_and_the_dtype_stays(self, name: str, dtype: torch.dtype) -> None:
        grid = Grid(300)
        full = create_encoding(name, 1, 4, grid, theta=10000.0)
        cast = create_encoding(name, 1, 4, grid, theta=10000.0)
        cast.load_state_dict(full.state_dict())
        cast = cast.to(dtype)
        if name == "rope_mixed":  # the only thing a cast may round: learned frequencies
            full.freqs.data.copy_(cast.freqs)
        x = torch.ones(1, 1, 300, 4, dtype=dtype)
        out = cast.rotate(x, grid)
        assert out.dtype == dtype
        assert (out[0, 0, 256] - out[0, 0, 257]).abs().max() > 0.1
        assert_close(out.float(), full.rotate(x.float(), grid), dtype)

    def test_d2_frequencies_survive_a_cast_bit_for_bit(self) -> None:
        encoding = create_encoding("rope_axial", 1, 32, Grid(4, 6))
        before = encoding.inv_freq
        assert torch.equal(encoding.to(torch.bfloat16).inv_freq, before)

    def test_d2_number_encodings_keep_far_offsets_apart(self) -> None:
        encoding = create_encoding("alibi", 1, 4, Grid(300)).to(torch.bfloat16)
        bias = encoding.bias(Grid(300), Grid(300))
        assert len(bias[0, 0].unique()) == 300


def test_c2_frequencies_after_to_empty_are_the_formula_bit_for_bit() -> None:
    expected = create_encoding("rope_axial", 1, 16, Grid(4, 6)).inv_freq
    assert_close(expected, torch.tensor([100.0 ** (-j / 4) for j in range(4)]))
    with torch.device("meta"):
        encoding = create_encoding("rope_axial", 1, 16, Grid(4, 6))
    encoding.to_empty(device="cpu")
    encoding.load_state_dict(create_encoding("rope_axial", 1, 16, Grid(4, 6)).state_dict())
    assert torch.equal(encoding.inv_freq, expected)
    assert encoding.inv_freq.dtype == torch.float32


def test_float64_inputs_get_float64_angles() -> None:
    x = torch.randn(1, 1, 24, 8, dtype=torch.float64)
    out = create_encoding("rope_axial", 1, 8, Grid(4, 6)).rotate(x, Grid(4, 6))
    assert_close(out, turned(x, Grid(4, 6), 100.0, "interleaved"))


def test_points_of_each_sample() -> None:
    encoding = create_encoding("rope_axial", 1, 8, Grid(4, 6))
    places = torch.randn(2, 5, 2)
    x = torch.randn(2, 1, 5, 8)
    out = encoding.rotate(x, Points(places))
    for b in range(2):
        assert_close(out[b : b + 1], encoding.rotate(x[b : b + 1], Points(places[b : b + 1])))
    assert (out[:1] - encoding.rotate(x[:1], Points(places[1:]))).abs().max() > 0.1


def test_scores_of_attention_are_those_of_the_turned_vectors() -> None:
    grid = Grid(4, 6, num_prefix_tokens=1)
    encoding = create_encoding("rope_axial", 2, 8, grid, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 2, 25, 8, dtype=torch.float64)
    scores = turned(q, grid, 100.0, "interleaved") @ turned(k, grid, 100.0, "interleaved").transpose(-1, -2) * 8**-0.5
    assert_close(attend(q, k, v, encoding, grid), scores.softmax(-1) @ v)


@pytest.mark.parametrize(
    ("head_dim", "grid", "options", "text"),
    [
        (30, Grid(4, 6), {}, "AxialRope: head_dim=30 must be a multiple of 4"),
        (7, Grid(9), {}, "AxialRope: head_dim=7 must be a multiple of 2"),
        (8, Grid(2, 3, 4), {}, "AxialRope: head_dim=8 must be a multiple of 6"),
        (8, Grid(4, 6), {"theta": 0.0}, "AxialRope: theta=0.0 must be positive"),
        (8, Grid(4, 6), {"theta": -1.0}, "AxialRope: theta=-1.0 must be positive"),
        (8, Grid(4, 6), {"theta": math.nan}, "AxialRope: theta=nan must be positive"),
        (8, Grid(4, 6), {"theta": math.inf}, "AxialRope: theta=inf must be positive and finite"),
    ],
)
def test_refuses(head_dim: int, grid: Grid, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create_encoding("rope_axial", 2, head_dim, grid, **options)


def test_theta_below_one_is_allowed() -> None:
    assert create_encoding("rope_axial", 2, 8, Grid(9), theta=0.5).inv_freq[1] > 1
