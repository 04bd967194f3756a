"""Transformer-XL's encoding against its formula pair by pair and transformers' wav2vec2-conformer."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

from relpos2d import Encoding, Grid, Points, attend, create_encoding
from tests.encodings.lines import LINES, assert_pair_by_pair, assert_relative_at_every_length, made, qkv
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close


def wave(offset: float, channels: int, theta: float, layout: str) -> Tensor:
    """r_d of the paper, channel by channel."""
    sines = [math.sin(offset / theta ** (2 * j / channels)) for j in range(channels // 2)]
    cosines = [math.cos(offset / theta ** (2 * j / channels)) for j in range(channels // 2)]
    if layout == "half":
        return torch.tensor(sines + cosines, dtype=torch.float64)
    return torch.tensor([x for pair in zip(sines, cosines, strict=True) for x in pair], dtype=torch.float64)


def vector(encoding: Encoding, h: int, offset: float) -> Tensor:
    rows = slice(h * encoding.head_dim, (h + 1) * encoding.head_dim)
    r = wave(offset, encoding.num_heads * encoding.head_dim, encoding.theta, encoding.layout)
    return encoding.linear_pos.weight[rows] @ r


@pytest.mark.parametrize(("layout", "theta"), [("interleaved", 10000.0), ("half", 20.0)])
@pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
def test_f6_formula_pair_by_pair(q_pos: Grid, k_pos: Grid, layout: str, theta: float) -> None:
    encoding = made("transformer_xl", layout=layout, theta=theta, strength=0.5)
    assert_pair_by_pair(
        encoding,
        q_pos,
        k_pos,
        lambda h, d, q, k: ((q + encoding.pos_bias_v[h]) * vector(encoding, h, d)).sum(),
        everywhere=lambda h, q, k: (encoding.pos_bias_u[h] * k).sum(),
    )


def test_points_of_which_no_two_pairs_are_equally_far_apart() -> None:
    encoding = made("transformer_xl")
    places = torch.randn(2, 5, 1, dtype=torch.float64) * 9
    positions = Points(places)
    q, k, _ = qkv(encoding, 5, 5)
    score = encoding.score(q, k, positions, positions, 1.0)
    for b, h, i, j in [(b, h, i, j) for b in range(2) for h in range(2) for i in range(5) for j in range(5)]:
        offset = float(places[b, i, 0] - places[b, j, 0])
        expected = ((q[b, h, i] + encoding.pos_bias_v[h]) * vector(encoding, h, offset)).sum()
        assert_close(score[b, h, i, j], expected)


def theirs_and_ours(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Encoding]:
    config = Wav2Vec2ConformerConfig(
        hidden_size=12, num_attention_heads=3, attention_dropout=0.0, position_embeddings_type="relative",
        max_source_positions=50, attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2ConformerSelfAttention(config).to(dtype)
    redraw(theirs)
    ours = create_encoding("transformer_xl", 3, 4, Grid(11), dtype=dtype)
    state = {name: value for name, value in theirs.state_dict().items() if "pos" in name}
    assert ours.load_state_dict(state, strict=False).missing_keys == ["strength"]
    return theirs, Wav2Vec2ConformerRelPositionalEmbedding(config).to(dtype), ours


def whole_attention(theirs: nn.Module, ours: Encoding, x: Tensor) -> Tensor:
    q, k, v = (
        linear(x).unflatten(-1, (3, 4)).transpose(1, 2)
        for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    )
    return theirs.linear_out(attend(q, k, v, ours, Grid(x.shape[1])).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, 2, 11, 40])
def test_transformers(length: int) -> None:
    theirs, embedding, ours = theirs_and_ours(torch.float32)
    x = torch.randn(2, length, 12)
    rows = embedding(x)
    assert rows.shape[1] == 2 * length - 1
    assert_close(whole_attention(theirs, ours, x), theirs(x, relative_position_embeddings=rows)[0])


def test_gradients_of_transformers() -> None:
    theirs, _, ours = theirs_and_ours(torch.float64)
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    # their own table is rounded to float32
    rows = torch.stack([wave(10 - row, 12, 10000.0, "interleaved") for row in range(21)])[None]
    out, expected = whole_attention(theirs, ours, x), theirs(x, relative_position_embeddings=rows)[0]
    assert_close(out, expected)
    names = ("pos_bias_u", "pos_bias_v", "linear_pos.weight")
    shared = [x, theirs.linear_q.weight, theirs.linear_k.weight, theirs.linear_v.weight]
    leaves = ([*shared, *map(module.get_parameter, names)] for module in (ours, theirs))
    for mine, other in zip(*map(gradients, (out, expected), leaves), strict=True):
        assert_close(mine, other)


def test_relative_at_every_length() -> None:
    assert_relative_at_every_length(made("transformer_xl"))


def test_nothing_depends_on_the_length() -> None:
    encoding = made("transformer_xl", 2, 3)
    assert {name: tuple(value.shape) for name, value in encoding.state_dict().items()} == {
        "strength": (), "pos_bias_u": (2, 3), "pos_bias_v": (2, 3), "linear_pos.weight": (6, 6),
    }  # fmt: skip


def test_refusals() -> None:
    with refuses("TransformerXL: layout='split' must be one of interleaved, half"):
        create_encoding("transformer_xl", 2, 4, Grid(5), layout="split")
    with refuses(r"TransformerXL: 9 channels \(num_heads \* head_dim\) must be even"):
        create_encoding("transformer_xl", 3, 3, Grid(5))
    with refuses("TransformerXL: theta=0 must be positive and finite"):
        create_encoding("transformer_xl", 2, 4, Grid(5), theta=0)
