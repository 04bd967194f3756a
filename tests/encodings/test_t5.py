"""The buckets of T5 against its formula pair by pair and transformers."""

import math

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from relpos2d import Grid, Points, attend, check, create_encoding
from relpos2d.encodings.t5 import BucketedBias
from tests.oracles import gradients, multilinear, pair_attention, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

NUM_HEADS = 3
#: no start of a band is a whole number here, so that double and single precision agree
ODD = {"num_buckets": 12, "max_distance": 20}


def t5(length: int = 7, dtype=torch.float64, **options) -> BucketedBias:
    encoding = BucketedBias(NUM_HEADS, 4, Grid(length), dtype=dtype, **options)
    redraw(encoding)
    return encoding


def bucket(offset: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Counted as the paper's code describes it, from query minus key."""
    behind, first = -offset, 0
    if bidirectional:
        num_buckets //= 2
        if behind > 0:
            first = num_buckets
        distance = abs(behind)
    else:
        distance = max(-behind, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (num_buckets - exact)), num_buckets - 1)


def theirs(num_buckets: int, max_distance: int, bidirectional: bool) -> T5Attention:
    config = T5Config(
        d_model=12, d_kv=4, num_heads=NUM_HEADS, is_decoder=not bidirectional, dropout_rate=0.0,
        relative_attention_num_buckets=num_buckets, relative_attention_max_distance=max_distance,
    )  # fmt: skip
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    redraw(attention)
    return attention


class TestFormula:
    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize(
        ("queries", "places_q", "keys", "places_k"),
        [
            (Grid(5), range(5), Grid(9), range(9)),
            (Grid(4, origin=29), range(29, 33), Grid(33), range(33)),  # behind a cache, beyond the last band
            (Grid(3, origin=0.25), (0.25, 1.25, 2.25), Grid(4, step=1.5), (0, 1.5, 3, 4.5)),
        ],
    )
    def test_pair_by_pair(self, bidirectional: bool, queries: Grid, places_q, keys: Grid, places_k) -> None:
        encoding = t5(**ODD, bidirectional=bidirectional)
        rows = encoding.relative_attention_bias.weight
        q, k, v = (
            torch.randn(2, NUM_HEADS, n, 4, dtype=torch.float64, requires_grad=True)
            for n in (len(places_q), len(places_k), len(places_k))
        )

        def number(b: int, h: int, i: int, j: int) -> Tensor:
            def row(offset: tuple[int, ...]) -> Tensor:
                return rows[bucket(offset[0], **ODD, bidirectional=bidirectional), h]

            return multilinear(row, (places_q[i] - places_k[j],))

        expected = pair_attention(q, k, v, 0.5, number)
        out = attend(q, k, v, encoding, queries, keys)
        assert_close(out, expected)
        inputs = [q, k, v, rows]
        for ours, oracle in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
            assert_close(ours, oracle)

    def test_points_are_the_grid(self) -> None:
        encoding, queries, keys = t5(**ODD), Grid(3, origin=20.5), Grid(5, step=0.5)
        expected = encoding.bias(queries, keys).expand(2, -1, -1, -1)
        assert_close(encoding.bias(queries.points(2), keys.points(2)), expected)
        places = torch.tensor([[[0.25], [7.0]], [[3.5], [-40.0]]], dtype=torch.float64)
        assert_close(encoding.bias(Points(places), Points(places))[1, :, 0, 1], encoding.at(torch.tensor([43.5])))

    def test_without_direction_all_that_comes_is_offset_0(self) -> None:
        encoding = t5(bidirectional=False)
        bias = encoding.bias(Grid(9), Grid(9))
        ahead = torch.ones(9, 9).triu(1).bool()
        assert_close(bias[:, ahead], bias[:, 0, :1].expand(-1, 36))
        assert (bias[:, 1, 0] - bias[:, 0, 0]).abs().min() > 1e-3


class TestTransformers:
    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize(
        ("num_buckets", "max_distance"),
        [(32, 128), (4, 4), (12, 20), (64, 64), (32, 2048), (128, 512), (8, 5000), (254, 4711)],
    )
    def test_f2_every_bucket(self, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
        offsets = torch.arange(-5000, 5001)
        encoding = t5(num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
        expected = T5Attention._relative_position_bucket(-offsets, bidirectional, num_buckets, max_distance)
        assert torch.equal(encoding.buckets(offsets), expected)
        assert torch.equal(encoding.buckets(offsets.double()), expected)

    @pytest.mark.parametrize("bidirectional", [True, False])
    @pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (6, 9)])
    def test_f4_bias_and_its_gradient(self, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
        reference = theirs(num_buckets, max_distance, bidirectional).double()
        ours = t5(num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
        ours.relative_attention_bias.load_state_dict(reference.relative_attention_bias.state_dict())
        for num_queries, num_keys, past in ((7, 7, 0), (3, 11, 0), (4, 150, 146), (1, 9, 8)):
            expected = reference.compute_bias(num_queries, num_keys, past_seen_tokens=past)[0]
            bias = ours.bias(Grid(num_queries, origin=past), Grid(num_keys))
            assert torch.equal(bias, expected)
            (gradient,) = gradients(bias, [ours.relative_attention_bias.weight])
            (their_gradient,) = gradients(expected, [reference.relative_attention_bias.weight])
            assert_close(gradient, their_gradient)

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_attention(self, bidirectional: bool) -> None:
        reference = theirs(8, 10, bidirectional).eval()
        ours = t5(dtype=torch.float32, num_buckets=8, max_distance=10, bidirectional=bidirectional)
        ours.relative_attention_bias.load_state_dict(reference.relative_attention_bias.state_dict())
        x = torch.randn(2, 13, 12)
        q, k, v = (
            layer(x).unflatten(-1, (NUM_HEADS, 4)).transpose(1, 2) for layer in (reference.q, reference.k, reference.v)
        )
        assert ours.reference_scale(4) == 1.0
        out = attend(q, k, v, ours, Grid(13), scale=ours.reference_scale(4), is_causal=not bidirectional)
        mask = None if bidirectional else torch.full((13, 13), -torch.inf).triu(1)[None, None]
        assert_close(reference.o(out.transpose(1, 2).flatten(2)), reference(x, mask=mask)[0])


class TestSizes:
    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_relative_on_every_length(self, bidirectional: bool) -> None:
        for length in (2, 7, 33):
            encoding = t5(length, num_buckets=6, max_distance=8, bidirectional=bidirectional)
            assert encoding.relative_attention_bias.weight.shape == (6, NUM_HEADS)
            check(encoding, Grid(length))

    def test_one_token_more_changes_nothing(self) -> None:
        encoding = t5()
        assert torch.equal(encoding.bias(Grid(201), Grid(201))[:, :200, :200], encoding.bias(Grid(200), Grid(200)))

    def test_parameters(self) -> None:
        encoding = create_encoding("t5", 16, 64, Grid(9))
        assert [name for name, _ in encoding.named_parameters()] == ["relative_attention_bias.weight"]
        assert 0.8 / 32 < encoding.relative_attention_bias.weight.std() < 1.2 / 32
        assert "num_buckets=32, max_distance=128, bidirectional=True" in repr(encoding)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_d2_half_parameters_tell_far_neighbours_apart(self, dtype: torch.dtype) -> None:
        encoding = t5(dtype=dtype, num_buckets=640, max_distance=640, bidirectional=False)
        bias = encoding.bias(Grid(1, origin=300), Grid(301))[:, 0]
        assert_close(bias.flip(1), encoding.relative_attention_bias.weight[:301].T.float())
        q = torch.randn(1, NUM_HEADS, 301, 4, dtype=dtype)
        assert attend(q, q, q, encoding, Grid(301)).dtype == dtype

    def test_refusals(self) -> None:
        with refuses("BucketedBias: num_buckets=32 must be at most max_distance=31"):
            t5(num_buckets=32, max_distance=31)
        for num_buckets in (0, 2, 7, -4):
            with refuses(f"num_buckets={num_buckets} must be even and at least 4 with bidirectional=True"):
                t5(num_buckets=num_buckets)
        with refuses("num_buckets=0 must be even and at least 2 with bidirectional=False"):
            t5(num_buckets=0, bidirectional=False)
        with refuses(r"BucketedBias: has no meaning on 2 axes \(Grid\(3, 5\)\), allowed: 1"):
            create_encoding("t5", 3, 4, Grid(3, 5))
