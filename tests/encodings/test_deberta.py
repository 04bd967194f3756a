"""DeBERTa's disentangled attention against its formula pair by pair and transformers' DeBERTa-v2."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from relpos2d import Encoding, Grid, attend, create_encoding
from tests.encodings.lines import LINES, assert_pair_by_pair, assert_relative_at_every_length, made, mixed, qkv
from tests.oracles import gradients, redraw
from tests.refusals import refuses
from tests.tolerances import assert_close

BUCKETS: dict[str, Any] = {"num_buckets": 6, "max_distance": 9}


def bucket(offset: int, num_buckets: int, max_distance: int) -> int:
    """Row of a whole offset, by the paper's formula (its appendix on buckets)."""
    middle, distance = num_buckets // 2, abs(offset)
    if distance > middle:
        far = math.log(distance / middle) / math.log((max_distance - 1) / middle)
        distance = middle + math.ceil(round(far * (middle - 1), 9))
    return min(max(num_buckets + (distance if offset > 0 else -distance), 0), 2 * num_buckets - 1)


def projected(linear: nn.Linear, row: Tensor, h: int, head_dim: int) -> Tensor:
    rows = slice(h * head_dim, (h + 1) * head_dim)
    return linear.weight[rows] @ row + linear.bias[rows]


def normed(encoding: Encoding, row: Tensor) -> Tensor:
    if encoding.norm is None:
        return row
    centred = row - row.mean()
    return centred / (centred.square().mean() + encoding.norm.eps).sqrt() * encoding.norm.weight + encoding.norm.bias


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_projections": True},
        {"content_to_position": False},
        {"position_to_content": False, "norm_embeddings": True},
        {"share_projections": True, "norm_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("q_pos", "k_pos"), LINES)
def test_formula_pair_by_pair(q_pos: Grid, k_pos: Grid, options: dict[str, Any]) -> None:
    encoding = made("deberta", strength=0.5, **BUCKETS, **options)
    shared = options.get("share_projections", False)
    project = (nn.Linear(8, 8).double(), nn.Linear(8, 8).double()) if shared else (None, None)
    key = project[1] or encoding.pos_key_proj
    query = project[0] or encoding.pos_query_proj

    def number(h: int, d: float, q: Tensor, k: Tensor) -> Tensor:
        def meeting(side: Tensor, linear: nn.Linear) -> Tensor:
            def row(whole: int) -> Tensor:
                return normed(encoding, encoding.rel_embeddings.weight[bucket(whole, **BUCKETS)])

            return (side * mixed(lambda whole: projected(linear, row(whole), h, 4), d)).sum()

        to_position = meeting(q, key) if encoding.content_to_position else 0.0
        return to_position + (meeting(k, query) if encoding.position_to_content else 0.0)

    assert_pair_by_pair(
        encoding, q_pos, k_pos, number,
        project=project if shared else None, leaves=[p for linear in project if linear for p in linear.parameters()],
    )  # fmt: skip


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(256, 512), (4, 4), (6, 9), (32, 128), (16, 1000)])
def test_buckets_of_transformers(num_buckets: int, max_distance: int) -> None:
    offsets = torch.arange(-3000, 3001)
    theirs = make_log_bucket_position(offsets, num_buckets, max_distance).long() + num_buckets
    encoding = create_encoding("deberta", 2, 4, Grid(5), num_buckets=num_buckets, max_distance=max_distance)
    for dtype in (torch.float32, torch.float64):
        ours = encoding._row(offsets.to(dtype).unsqueeze(-1))
        assert torch.equal(ours.long(), theirs.clamp(0, 2 * num_buckets - 1))
    assert [bucket(d, num_buckets, max_distance) for d in offsets.tolist()] == ours.tolist()


def configured(**options: Any) -> DebertaV2Config:
    return DebertaV2Config(
        hidden_size=12, num_attention_heads=3, num_hidden_layers=1, intermediate_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, relative_attention=True, position_buckets=6, max_relative_positions=9,
        layer_norm_eps=1e-7, **options,
    )  # fmt: skip


@pytest.mark.parametrize("length", [2, 7, 33])
@pytest.mark.parametrize(
    "options",
    [
        {"share_att_key": True, "pos_att_type": ["c2p", "p2c"]},
        {"share_att_key": False, "pos_att_type": ["c2p", "p2c"]},
        {"share_att_key": False, "pos_att_type": ["c2p"]},
        {"share_att_key": True, "pos_att_type": ["p2c"], "norm_rel_ebd": "layer_norm"},
        {"share_att_key": False, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"},
    ],
    ids=str,
)
def test_transformers(options: dict[str, Any], length: int) -> None:
    encoder = DebertaV2Encoder(configured(**options)).double()
    redraw(encoder)
    theirs = encoder.layer[0].attention.self
    assert isinstance(theirs, DisentangledSelfAttention)
    has_norm = options.get("norm_rel_ebd") == "layer_norm"
    ours = create_encoding(
        "deberta", 3, 4, Grid(7), dtype=torch.float64, **BUCKETS, norm_embeddings=has_norm,
        share_projections=options["share_att_key"], content_to_position="c2p" in options["pos_att_type"],
        position_to_content="p2c" in options["pos_att_type"],
    )  # fmt: skip
    state = {name: value for name, value in theirs.state_dict().items() if name.startswith("pos_")}
    state["rel_embeddings.weight"] = encoder.rel_embeddings.weight
    if has_norm:
        state |= {f"norm.{name}": value for name, value in encoder.LayerNorm.state_dict().items()}
    assert ours.load_state_dict({**state, "strength": torch.tensor(1.0)})

    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    expected, _ = theirs(
        x, torch.ones(2, 1, length, length, dtype=torch.bool), rel_embeddings=encoder.get_rel_embedding()
    )
    linears = theirs.query_proj, theirs.key_proj, theirs.value_proj
    q, k, v = (linear(x).unflatten(-1, (3, 4)).transpose(1, 2) for linear in linears)
    scale = ours.reference_scale(4)
    out = attend(q, k, v, ours, Grid(length), scale=scale, project=linears[:2]).transpose(1, 2).flatten(2)
    # they take the square root of the scale in float32
    assert_close(out, expected, torch.float32)

    parameters = dict(theirs.named_parameters(), **{"rel_embeddings.weight": encoder.rel_embeddings.weight})
    if has_norm:
        parameters |= {f"norm.{name}": value for name, value in encoder.LayerNorm.named_parameters()}
    shared = [x, *(p for linear in linears[:2] for p in linear.parameters()), linears[2].weight]
    mine = gradients(out, [*shared, *(p for _, p in ours.named_parameters())])
    other = gradients(expected, [*shared, *(parameters[name] for name, _ in ours.named_parameters())])
    for a, b in zip(mine, other, strict=True):
        assert_close(a, b, torch.float32)


def test_reference_scale() -> None:
    for options, products in (({}, 3), ({"content_to_position": False}, 2), ({"position_to_content": False}, 2)):
        assert create_encoding("deberta", 2, 5, Grid(5), **options).reference_scale(5) == (5 * products) ** -0.5


@pytest.mark.parametrize("num_buckets", [6, 64])
def test_relative_at_every_length(num_buckets: int) -> None:
    """With few buckets products are picked, with many they are shifted."""
    assert_relative_at_every_length(made("deberta", num_buckets=num_buckets, max_distance=64))


def test_picked_equals_shifted() -> None:
    encoding = made("deberta", num_buckets=16, max_distance=20, norm_embeddings=True)
    for q_pos, k_pos in ((Grid(7), Grid(5)), (Grid(3, origin=9.5), Grid(12))):
        q, k, _ = qkv(encoding, q_pos.num_tokens, k_pos.num_tokens)
        picked = encoding.score(q, k, q_pos.points(2), k_pos.points(2), 0.7)
        assert_close(encoding.score(q, k, q_pos, k_pos, 0.7), picked)


class Attention(nn.Module):
    """What a host does with it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.encoding = create_encoding("deberta", 2, 4, Grid(8), num_buckets=8, max_distance=12, **options)
        redraw(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), x))
        out = attend(q, k, v, self.encoding, Grid(x.shape[1]), project=(self.q_proj, self.k_proj))
        return out.transpose(1, 2).flatten(2)


@pytest.mark.traced
@pytest.mark.usefixtures("fresh_compiler")
def test_f10_exported_at_length_8_and_run_at_32() -> None:
    module = Attention(share_projections=True).eval()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(module, (torch.randn(2, 8, 8),), dynamic_shapes=({1: length},))
    for size in (8, 32, 5):
        x = torch.randn(2, size, 8)
        assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [5, 40])
def test_d8_large_values_have_finite_scores(length: int, dtype: torch.dtype) -> None:
    encoding = create_encoding("deberta", 2, 64, Grid(length), num_buckets=8, max_distance=12, share_projections=True)
    encoding = encoding.to(dtype)
    with torch.no_grad():
        encoding.rel_embeddings.weight.fill_(1.0)
    q, k = torch.full((2, 1, 2, length, 64), 60.0, dtype=dtype)

    def large(x: Tensor) -> Tensor:
        return torch.full_like(x, 60.0)

    # a product is 64 * 60 * 60, more than half precision holds
    scale = encoding.reference_scale(64)
    score = encoding.score(q, k, Grid(length), Grid(length), scale, (large, large))
    assert score.dtype == dtype
    assert score.isfinite().all()
    assert_close(score.float(), torch.full_like(score, 2 * 64 * 3600 * scale, dtype=torch.float32), dtype)


def test_parameters() -> None:
    sizes = {name: tuple(p.shape) for name, p in made("deberta", norm_embeddings=True, **BUCKETS).named_parameters()}
    assert sizes == {
        "rel_embeddings.weight": (12, 8), "norm.weight": (8,), "norm.bias": (8,), "pos_key_proj.weight": (8, 8),
        "pos_key_proj.bias": (8,), "pos_query_proj.weight": (8, 8), "pos_query_proj.bias": (8,),
    }  # fmt: skip
    assert [name for name, _ in made("deberta", share_projections=True).named_parameters()] == ["rel_embeddings.weight"]
    alone = made("deberta", position_to_content=False)
    assert alone.pos_query_proj is None


def test_f2_refusals() -> None:
    with refuses("Deberta: num_buckets=256 must not be more than max_distance=128"):
        create_encoding("deberta", 2, 4, Grid(5), max_distance=128)
    for num_buckets in (2, 7):
        with refuses(f"Deberta: num_buckets={num_buckets} must be even and at least 4"):
            create_encoding("deberta", 2, 4, Grid(5), num_buckets=num_buckets)
    with refuses("Deberta: content_to_position or position_to_content must be True, else nothing is left"):
        create_encoding("deberta", 2, 4, Grid(5), content_to_position=False, position_to_content=False)
    with refuses(r"give them: project=\(q_proj, k_proj\)"):
        encoding = made("deberta", share_projections=True)
        attend(*qkv(encoding, 5, 5), encoding, Grid(5))
