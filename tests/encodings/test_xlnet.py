"""XLNet's encoding against its formula pair by pair and transformers' XLNetRelativeAttention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import XLNetConfig, XLNetModel
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from relpos2d import Encoding, Grid, Points, attend, create_encoding
from tests.encodings.lines import LINES, assert_pair_by_pair, assert_relative_at_every_length, made, qkv
from tests.encodings.test_transformer_xl import wave
from tests.oracles import gradients, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

PARTS = ("r_s_bias", "seg_embed")


def vector(encoding: Encoding, h: int, offset: float) -> Tensor:
    limit = encoding.max_distance or float("inf")
    r = wave(min(max(offset, -limit), limit), encoding.num_heads * encoding.head_dim, encoding.theta, "half")
    return r @ encoding.r[:, h]


@pytest.mark.parametrize("max_distance", [None, 2])
@pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
def test_formula_pair_by_pair(q_pos: Grid, k_pos: Grid, max_distance: int | None) -> None:
    encoding = made("xlnet", max_distance=max_distance, strength=0.5)
    assert_pair_by_pair(
        encoding,
        q_pos,
        k_pos,
        lambda h, d, q, k: ((q + encoding.r_r_bias[h]) * vector(encoding, h, d)).sum(),
        everywhere=lambda h, q, k: (encoding.r_w_bias[h] * k).sum(),
    )


def points(length: int, types: list[list[int]] | None, prefix: int = 0, origin: int = 0) -> Points:
    places = Grid(length, origin=origin).coords(dtype=torch.float64).expand(2, -1, -1)
    return Points(places, num_prefix_tokens=prefix, token_types=None if types is None else torch.tensor(types))


@pytest.mark.parametrize("prefix", [0, 1])
def test_parts_pair_by_pair(prefix: int) -> None:
    encoding = made("xlnet", token_types=True, strength=0.5)
    types = [[0, 0, 1], [3, 1, 1]], [[0, 1, 1, 0, 2], [3, 3, 1, 1, 0]]
    q_pos, k_pos = points(3, types[0], prefix, origin=2), points(5, types[1])
    q, k, v = qkv(encoding, 3 + prefix, 5)

    def number(b: int, h: int, i: int, j: int) -> Tensor:
        total = (encoding.r_w_bias[h] * k[b, h, j]).sum()
        if i >= prefix:
            other = int(types[0][b][i - prefix] != types[1][b][j])
            offset = 2 + i - prefix - j
            total = total + ((q[b, h, i] + encoding.r_r_bias[h]) * vector(encoding, h, offset)).sum()
            total = total + ((q[b, h, i] + encoding.r_s_bias[h]) * encoding.seg_embed[other, h]).sum()
        return 0.7 * 0.5 * total

    expected = pair_attention(q, k, v, 0.7, number)
    out = attend(q, k, v, encoding, q_pos, k_pos, scale=0.7)
    assert_close(out, expected)
    leaves = [q, k, v, *encoding.parameters()]
    for ours, theirs in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(ours, theirs)
    blocks, explanation = attend(q, k, v, encoding, q_pos, k_pos, scale=0.7, memory_limit=3000, explain=True)
    assert explanation.way == "blocks"
    assert_close(blocks, expected)


def test_parts_need_types_on_both_sides() -> None:
    encoding = made("xlnet", token_types=True)
    types = [[0, 0, 1, 1], [0, 1, 1, 1]]
    q, k, v = qkv(encoding, 4, 4)
    bare = attend(q, k, v, encoding, Grid(4))
    known, unknown = points(4, types), points(4, None)
    for q_pos, k_pos in ((known, unknown), (unknown, known), (known, Grid(4)), (unknown, unknown)):
        assert_close(attend(q, k, v, encoding, q_pos, k_pos), bare)
    assert (attend(q, k, v, encoding, known, known) - bare).abs().max() > 1e-3
    without = made("xlnet")
    without.load_state_dict(encoding.state_dict(), strict=False)
    assert_close(attend(q, k, v, without, known, known), bare)
    # one part alone adds the same to all keys of a query
    assert_close(attend(q, k, v, encoding, *[points(4, [[1] * 4] * 2)] * 2), bare)
    encoding.set_strength(0.0)
    none = create_encoding("none", 2, 4, Grid(4))
    assert_close(attend(q, k, v, encoding, known, known), attend(q, k, v, none, Grid(4)))


class TestTransformers:
    def modules(self, dtype: torch.dtype, token_types: bool, **options: Any) -> tuple[nn.Module, Encoding, XLNetConfig]:
        config = XLNetConfig(
            d_model=12, n_head=3, d_inner=8, n_layer=1, dropout=0.0, vocab_size=5, attn_type="bi", **options
        )
        theirs = XLNetRelativeAttention(config).to(dtype)
        redraw(theirs)
        clamp = options.get("clamp_len", -1)
        ours = create_encoding(
            "xlnet", 3, 4, Grid(9), token_types=token_types, max_distance=None if clamp < 1 else clamp, dtype=dtype
        )
        names = ("r_w_bias", "r_r_bias", "r", *(PARTS if token_types else ()))
        loaded = ours.load_state_dict({name: theirs.get_parameter(name) for name in names}, strict=False)
        assert loaded.missing_keys == ["strength"]
        return theirs, ours, config

    def whole(self, theirs: nn.Module, ours: Encoding, x: Tensor, memory: Tensor, types: Tensor | None) -> Tensor:
        both = torch.cat((memory, x), dim=1)
        q = torch.einsum("bic,chd->bhid", x, theirs.q)
        k, v = (torch.einsum("bjc,chd->bhjd", both, w) for w in (theirs.k, theirs.v))
        past, length = memory.shape[1], x.shape[1]
        q_pos: Any = Grid(length, origin=past)
        k_pos: Any = Grid(past + length)
        if types is not None:
            q_pos, k_pos = q_pos.points(len(x)), k_pos.points(len(x))
            q_pos = Points(q_pos.places, token_types=types[:, past:])
            k_pos = Points(k_pos.places, token_types=types)
        out = attend(q, k, v, ours, q_pos, k_pos)
        return theirs.layer_norm(torch.einsum("bhid,chd->bic", out, theirs.o) + x)

    @pytest.mark.parametrize("options", [{}, {"clamp_len": 4}], ids=str)
    @pytest.mark.parametrize("past", [0, 3])
    @pytest.mark.parametrize("with_types", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_agrees(self, with_types: bool, past: int, options: dict[str, Any], dtype: torch.dtype) -> None:
        theirs, ours, config = self.modules(dtype, with_types, **options)
        x = torch.randn(2, 9, 12, dtype=dtype, requires_grad=True)
        memory = torch.randn(2, past, 12, dtype=dtype)
        types = torch.tensor([[0] * (past + 4) + [1] * 4 + [2], [0] * (past + 7) + [1] * 2]) if with_types else None
        if dtype == torch.float32:
            r = XLNetModel(config).relative_positional_encoding(9, past + 9, bsz=2)
        else:  # their own table is rounded to float32
            limit = options.get("clamp_len", 99)
            offsets = [min(max(d, -limit), limit) for d in range(past + 9, -9, -1)]
            r = torch.stack([wave(d, 12, 10000.0, "half") for d in offsets])[:, None].expand(-1, 2, -1)
        different = None
        if types is not None:
            different = (types[:, past:, None] != types[:, None, :]).permute(1, 2, 0).long()
            different = nn.functional.one_hot(different, 2).to(dtype)
        expected = theirs(
            x.transpose(0, 1), None, None, None, r, different, mems=memory.transpose(0, 1) if past else None
        )[0].transpose(0, 1)
        out = self.whole(theirs, ours, x, memory, types)
        assert_close(out, expected)
        if dtype == torch.float64:
            names = ["r_w_bias", "r_r_bias", "r", *(PARTS if with_types else ())]
            shared = [x, theirs.q, theirs.k, theirs.v]
            leaves = ([*shared, *map(module.get_parameter, names)] for module in (ours, theirs))
            for mine, other in zip(*map(gradients, (out, expected), leaves), strict=True):
                assert_close(mine, other)


@pytest.mark.parametrize("max_distance", [None, 3])
def test_relative_at_every_length(max_distance: int | None) -> None:
    assert_relative_at_every_length(made("xlnet", max_distance=max_distance))


def test_parameters() -> None:
    expected = {"r_w_bias": (2, 3), "r_r_bias": (2, 3), "r": (6, 2, 3)}
    assert {name: tuple(p.shape) for name, p in made("xlnet", 2, 3).named_parameters()} == expected
    expected |= {"r_s_bias": (2, 3), "seg_embed": (2, 2, 3)}
    assert {name: tuple(p.shape) for name, p in made("xlnet", 2, 3, token_types=True).named_parameters()} == expected


def test_refusals() -> None:
    with refuses(r"XLNet: 9 channels \(num_heads \* head_dim\) must be even"):
        create_encoding("xlnet", 3, 3, Grid(5))
    with refuses("XLNet: max_distance=0 must be at least 1, or None for no limit"):
        create_encoding("xlnet", 2, 4, Grid(5), max_distance=0)
    with refuses("XLNet: theta=-1 must be positive and finite"):
        create_encoding("xlnet", 2, 4, Grid(5), theta=-1)
