"""Shaw's vectors against their formula pair by pair and transformers' wav2vec2-bert and SeamlessM4T v2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SeamlessM4Tv2Config, Wav2Vec2BertConfig
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2ConformerSelfAttention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

from relpos2d import Grid, attend, create_encoding
from tests.encodings.lines import LINES, assert_pair_by_pair, assert_relative_at_every_length, made, mixed, qkv
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close


@pytest.mark.parametrize("max_distance", [2, (4, 1), (0, 3), 40])
@pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
def test_formula_pair_by_pair(q_pos: Grid, k_pos: Grid, max_distance: Any) -> None:
    encoding = made("shaw", max_distance=max_distance, values=True, strength=0.5)
    past, future = max_distance if isinstance(max_distance, tuple) else (max_distance, max_distance)

    def row(table: nn.Embedding, offset: float) -> Tensor:
        def whole(d: int) -> Tensor:
            if d >= past:  # keys far in the past
                return table.weight[0]
            return table.weight[past + future] if -d >= future else table.weight[past - d]

        return mixed(whole, offset)

    assert_pair_by_pair(
        encoding,
        q_pos,
        k_pos,
        lambda h, d, q, k: (q * row(encoding.distance_embedding, d)).sum(),
        value=lambda d: row(encoding.value_embedding, d),
    )


def of_their_module(cls: type[nn.Module], config: Any) -> nn.Module:
    module = cls(config)
    redraw(module)
    return module


def wav2vec2_bert(past: int, future: int) -> nn.Module:
    config = Wav2Vec2BertConfig(
        hidden_size=12, num_attention_heads=3, attention_dropout=0.0, position_embeddings_type="relative_key",
        left_max_position_embeddings=past, right_max_position_embeddings=future, attn_implementation="eager",
    )  # fmt: skip
    return of_their_module(Wav2Vec2BertSelfAttention, config)


def seamless(past: int, future: int) -> nn.Module:
    config = SeamlessM4Tv2Config(
        hidden_size=12, speech_encoder_attention_heads=3, speech_encoder_dropout=0.0,
        position_embeddings_type="relative_key", left_max_position_embeddings=past,
        right_max_position_embeddings=future, attn_implementation="eager",
    )  # fmt: skip
    return of_their_module(SeamlessM4Tv2ConformerSelfAttention, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("past", "future"), [(64, 8), (3, 2)])
@pytest.mark.parametrize("new", [wav2vec2_bert, seamless])
def test_transformers(new: Any, past: int, future: int, dtype: torch.dtype) -> None:
    theirs = new(past, future).to(dtype)
    ours = create_encoding("shaw", 3, 4, Grid(11), max_distance=(past, future), dtype=dtype)
    ours.load_state_dict({"distance_embedding.weight": theirs.distance_embedding.weight}, strict=False)
    x = torch.randn(2, 11, 12, dtype=dtype, requires_grad=True)
    q, k, v = (
        linear(x).unflatten(-1, (3, 4)).transpose(1, 2)
        for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    )
    out = theirs.linear_out(attend(q, k, v, ours, Grid(11)).transpose(1, 2).flatten(2))
    expected, _ = theirs(x)
    assert_close(out, expected)
    if dtype == torch.float64:
        shared = [x, theirs.linear_q.weight, theirs.linear_k.weight, theirs.linear_v.weight]
        for mine, other in zip(
            gradients(out, [*shared, ours.distance_embedding.weight]),
            gradients(expected, [*shared, theirs.distance_embedding.weight]),
            strict=True,
        ):
            assert_close(mine, other)


@pytest.mark.parametrize("max_distance", [3, (64, 8)])
def test_relative_at_every_length(max_distance: Any) -> None:
    assert_relative_at_every_length(made("shaw", max_distance=max_distance))


def test_beyond_the_distance_nothing_changes() -> None:
    encoding = made("shaw", max_distance=(3, 2))
    q, k, _ = qkv(encoding, 1, 9)
    row = encoding.score(q, k, Grid(1, origin=4), Grid(9), 1.0)[0, :, 0]
    assert torch.equal(row[:, :2], row[:, :1].expand(-1, 2))
    assert torch.equal(row[:, 6:], row[:, 6:7].expand(-1, 3))
    assert (row[:, 1:7].diff() != 0).all()


@pytest.mark.parametrize("positions", [Grid(9, num_prefix_tokens=1), Grid(9, num_prefix_tokens=1).points(2)], ids=str)
def test_vectors_of_values_in_blocks(positions: Any) -> None:
    encoding = made("shaw", max_distance=3, values=True)
    q, k, v = qkv(encoding, 10, 10)
    leaves = [q, k, v, *encoding.parameters()]
    expected = attend(q, k, v, encoding, positions)
    out, explanation = attend(q, k, v, encoding, positions, memory_limit=8000, explain=True)
    assert (explanation.backend, explanation.way) == ("explicit", "blocks")
    assert explanation.num_rows < 9
    assert_close(out, expected)
    for mine, other in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(mine, other)
    with refuses("backend 'sdpa' has no weights to give to Shaw, use 'explicit'"):
        attend(q, k, v, encoding, positions, backend="sdpa")


def test_parameters() -> None:
    sizes = {name: tuple(p.shape) for name, p in made("shaw", max_distance=(64, 8), values=True).named_parameters()}
    assert sizes == {"distance_embedding.weight": (73, 4), "value_embedding.weight": (73, 4)}
    assert [name for name, _ in made("shaw").named_parameters()] == ["distance_embedding.weight"]


@pytest.mark.parametrize("max_distance", [-1, (3, -1), (1, 2, 3), 2.5, (2.5, 1)])
def test_refuses_distances(max_distance: Any) -> None:
    with refuses(
        r"Shaw: max_distance=.* must be a whole number of at least 0, or one for the past and one for the future"
    ):
        create_encoding("shaw", 2, 4, Grid(5), max_distance=max_distance)


def test_needs_one_axis() -> None:
    with refuses(r"Shaw: has no meaning on 2 axes \(Grid\(3, 4\)\), allowed: 1"):
        create_encoding("shaw", 2, 4, Grid(3, 4))
