"""RoPE of sequences against turning pair by pair, transformers and rotary-embedding-torch, in both layouts and all scalings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTJConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.gptj.modeling_gptj import GPTJAttention, GPTJRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from relpos2d import Combined, Encoding, Grid, Points, attend, check, convert_rotary_layout, create_encoding
from relpos2d.scaling import KINDS
from tests.oracles import gradients, pair_attention, turn
from tests.public import RotaryEmbedding
from tests.refusals import refuses
from tests.tolerances import assert_close

HEADS, HEAD_DIM = 3, 12
LAYOUTS = ["interleaved", "half"]

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"kind": "linear", "factor": 3.0},
    "ntk": {"kind": "ntk", "factor": 3.0},
    "dynamic_ntk": {"kind": "dynamic_ntk", "factor": 2.0, "original_length": 16},
    "yarn": {"kind": "yarn", "factor": 4.0, "original_length": 64},
    "longrope": {
        "kind": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "original_length": 16,
        "factor": 4.0,
    },
    "llama3": {"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_length": 64},
    "xpos": {"kind": "xpos", "scale_base": 20.0},
}
#: what changes when the sequence grows, by definition
KNOW_LENGTH = {"dynamic_ntk", "longrope"}


def make(kind: str = "none", positions: Grid = Grid(7), *, head_dim: int = HEAD_DIM, **options: Any) -> Any:  # noqa: B008
    options = {"theta": 50.0, "dtype": torch.float64, "scaling": SCALINGS[kind], **options}
    return create_encoding("rope", HEADS, head_dim, positions, **options)


def scores(encoding: Encoding, q: Tensor, k: Tensor, q_pos: Grid | Points, k_pos: Grid | Points) -> Tensor:
    turned_q, turned_k = encoding.rotate_both(q, k, q_pos, k_pos)
    return turned_q @ turned_k.transpose(-1, -2)


def same_everywhere(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 1, HEADS, 1, HEAD_DIM, dtype=torch.float64)
    return q.expand(-1, -1, num_queries, -1), k.expand(-1, -1, num_keys, -1)


def turns_of_the_papers(
    scaling: dict[str, Any] | None, num_pairs: int, theta: float, place: float, role: str, length: float
) -> tuple[list[float], list[float]]:
    """Angle and magnitude of each pair, by the formulas of the papers."""
    given = scaling or {}
    kind, d = given.get("kind"), 2 * num_pairs
    magnitudes, angles = [1.0] * num_pairs, []
    if kind == "ntk":
        theta *= given["factor"] ** (d / (d - 2))
    if kind == "dynamic_ntk" and length > given["original_length"]:
        theta *= (given["factor"] * length / given["original_length"] - given["factor"] + 1) ** (d / (d - 2))
    for j in range(num_pairs):
        frequency = theta ** (-2 * j / d)
        if kind == "linear":
            frequency /= given["factor"]
        if kind == "longrope":
            frequency /= given["long_factor" if length > given["original_length"] else "short_factor"][j]
            magnitudes[j] = math.sqrt(1 + math.log(given["factor"]) / math.log(given["original_length"]))
        if kind == "yarn":
            first, last = (
                d * math.log(given["original_length"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (32, 1)
            )
            low, high = max(math.floor(first), 0), min(math.ceil(last), d - 1)
            kept = 1 - min(max((j - low) / (high - low), 0.0), 1.0)
            frequency = (1 - kept) * frequency / given["factor"] + kept * frequency
            magnitudes[j] = 0.1 * math.log(given["factor"]) + 1
        if kind == "llama3":
            wavelength, old = 2 * math.pi / frequency, given["original_length"]
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            if wavelength > old / low:
                frequency /= given["factor"]
            elif wavelength >= old / high:
                smooth = (old / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / given["factor"] + smooth * frequency
        if kind == "xpos":
            zeta = (2 * j / d + 0.4) / 1.4
            magnitudes[j] = zeta ** ((place if role == "query" else -place) / given["scale_base"])
        angles.append(place * frequency)
    return angles, magnitudes


#: (places of queries, of keys): continued from a cache, on both sides of a length of 16, with prefix tokens, between whole places
PLACES = [
    (Grid(2, origin=5), Grid(7)),
    (Grid(2, origin=19, num_prefix_tokens=1), Grid(5, origin=16, num_prefix_tokens=2)),
    (Grid(3, step=0.5, origin=-2), Grid(4, step=1.5)),
]


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("layout", "rotary_dim"), [("interleaved", 12), ("half", 8)])
def test_attention_is_that_of_pairs_turned_one_by_one(
    layout: str, rotary_dim: int, scaling: str, places: tuple[Grid, Grid]
) -> None:
    if scaling == "longrope" and rotary_dim < HEAD_DIM:
        pytest.skip("its factors are for six pairs")
    q_pos, k_pos = places
    encoding = make(scaling, q_pos, layout=layout, rotary_dim=rotary_dim)
    q = torch.randn(1, HEADS, q_pos.num_tokens, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, HEADS, k_pos.num_tokens, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in "kv")
    length = 1 + max(float(p.origin[0] + p.step[0] * (p.shape[0] - 1)) for p in places)

    def turned(x: Tensor, pos: Grid, role: str) -> Tensor:
        out = x.clone()
        for token in range(pos.num_prefix_tokens, pos.num_tokens):
            place = float(pos.origin[0] + pos.step[0] * (token - pos.num_prefix_tokens))
            angles, once = turns_of_the_papers(SCALINGS[scaling], rotary_dim // 2, 50.0, place, role, length)
            both = [m for m in once for _ in range(2)] if layout == "interleaved" else once * 2
            for b in range(len(x)):
                for h in range(HEADS):
                    part = turn(x[b, h, token, :rotary_dim], angles, layout)
                    out[b, h, token, :rotary_dim] = part * torch.tensor(both, dtype=x.dtype)
        return out

    expected = pair_attention(turned(q, q_pos, "query"), turned(k, k_pos, "key"), v, HEAD_DIM**-0.5)
    out = attend(q, k, v, encoding, q_pos, k_pos)
    assert_close(out, expected)
    for ours, theirs in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        assert_close(ours, theirs)


# Public implementations --------------------------------------------------------------------------------------------------


# with attn_implementation="sdpa", since the other one makes its weights in float32, also of float64


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def llama(hidden: int, heads: int) -> tuple[nn.Module, nn.Module, dict[str, Any], Callable[[Any, Tensor], tuple]]:
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    config = LlamaConfig(
        hidden_size=hidden, num_attention_heads=heads, rope_parameters=parameters, attn_implementation="sdpa"
    )
    options = {"layout": "half", "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 16}}

    def project(host: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, nn.Module]:
        q, k, v = (split_heads(proj(x), heads) for proj in (host.q_proj, host.k_proj, host.v_proj))
        return q, k, v, host.o_proj

    return LlamaAttention(config, 0), LlamaRotaryEmbedding(config), options, project


def gpt_neox(hidden: int, heads: int) -> tuple[nn.Module, nn.Module, dict[str, Any], Callable[[Any, Tensor], tuple]]:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(
        hidden_size=hidden, num_attention_heads=heads, rope_parameters=parameters, attn_implementation="sdpa"
    )

    def project(host: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, nn.Module]:
        q, k, v = split_heads(host.query_key_value(x), heads).chunk(3, dim=-1)
        return q, k, v, host.dense

    options = {"layout": "half", "rotary_dim": hidden // heads // 4}
    return GPTNeoXAttention(config, 0), GPTNeoXRotaryEmbedding(config), options, project


def gpt_j(hidden: int, heads: int) -> tuple[nn.Module, nn.Module, dict[str, Any], Callable[[Any, Tensor], tuple]]:
    config = GPTJConfig(n_embd=hidden, n_head=heads, rotary_dim=8, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "sdpa"

    def project(host: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, nn.Module]:
        q, k, v = (split_heads(proj(x), heads) for proj in (host.q_proj, host.k_proj, host.v_proj))
        return q, k, v, host.out_proj

    return GPTJAttention(config, 0), GPTJRotaryEmbedding(config), {"rotary_dim": 8}, project


@pytest.mark.parametrize("build", [llama, gpt_neox, gpt_j])
def test_e1_attention_of_transformers(build: Callable) -> None:
    hidden, heads, length = 64, 4, 33
    host, rotary, options, project = build(hidden, heads)
    host.eval()
    encoding = create_encoding("rope", heads, hidden // heads, Grid(length), **options)
    seen = torch.full((length, length), -math.inf).triu(1)[None, None]
    ids = torch.arange(length)[None]

    def both(x: Tensor, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, out = project(host, x)
        ours = out(attend(q, k, v, encoding, Grid(length), is_causal=True).transpose(1, 2).flatten(2))
        return ours, host(x, position_embeddings=embeddings, attention_mask=seen.to(x.dtype))[0]

    x = torch.randn(2, length, hidden)
    assert_close(*both(x, rotary(x, ids)))
    # they make their angles in float32 even then, so that those of float64 come from the formula
    x, host = x.double().requires_grad_(), host.double()
    num_pairs = options.get("rotary_dim", hidden // heads) // 2
    turns = [turns_of_the_papers(options.get("scaling"), num_pairs, 10000.0, p, "query", length) for p in range(length)]
    angles, magnitudes = torch.tensor(turns, dtype=torch.float64)[:, :, None].unbind(1)
    cos, sin = (t.transpose(0, 1) for t in (angles.cos() * magnitudes, angles.sin() * magnitudes))
    halves = tuple(torch.cat((t, t), dim=-1) for t in (cos, sin))
    ours, theirs = both(x, (sin, cos) if build is gpt_j else halves)
    assert_close(ours, theirs)
    inputs = [x, *host.parameters()]
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert_close(mine, other)


def test_rotary_embedding_torch() -> None:
    x = torch.randn(2, HEADS, 33, HEAD_DIM)
    ours = create_encoding("rope", HEADS, HEAD_DIM, Grid(33))
    assert_close(ours.rotate(x, Grid(33)), RotaryEmbedding(HEAD_DIM).rotate_queries_or_keys(x))
    partly = create_encoding("rope", HEADS, HEAD_DIM, Grid(33), rotary_dim=8)
    assert_close(partly.rotate(x, Grid(33)), RotaryEmbedding(8).rotate_queries_or_keys(x))


def test_xpos_of_rotary_embedding_torch() -> None:
    theirs = RotaryEmbedding(HEAD_DIM, use_xpos=True, xpos_scale_base=64)
    ours = create_encoding("rope", HEADS, HEAD_DIM, Grid(33), scaling={"kind": "xpos", "scale_base": 64})
    q, k = torch.randn(2, 2, HEADS, 33, HEAD_DIM)
    expected_q, expected_k = theirs.rotate_queries_and_keys(q, k)
    assert_close(scores(ours, q, k, Grid(33), Grid(33)), expected_q @ expected_k.transpose(-1, -2))
    centred = Grid(33, origin=-16)  # they measure magnitudes from the middle, which changes no score
    assert_close(scores(ours, q, k, centred, centred), scores(ours, q, k, Grid(33), Grid(33)))


@pytest.mark.parametrize("rotary_dim", [4, 12])
@pytest.mark.parametrize(("source", "target"), [LAYOUTS, LAYOUTS[::-1]])
@pytest.mark.parametrize("scaling", ["none", "yarn", "xpos"])
def test_e1_e2_layouts_agree_after_permuting_channels(scaling: str, source: str, target: str, rotary_dim: int) -> None:
    x = torch.randn(2, 7, HEADS * HEAD_DIM, dtype=torch.float64)
    weights = torch.randn(2, HEADS * HEAD_DIM, HEADS * HEAD_DIM, dtype=torch.float64)

    def of(layout: str, weights: Any) -> Tensor:
        encoding = make(scaling, layout=layout, rotary_dim=rotary_dim)
        q, k = (split_heads(x @ weight.T, HEADS) for weight in weights)
        return scores(encoding, q, k, Grid(7), Grid(7))

    converted = [convert_rotary_layout(w, HEADS, source=source, target=target, rotary_dim=rotary_dim) for w in weights]
    assert_close(of(target, converted), of(source, weights))
    assert (of(target, weights) - of(source, weights)).abs().max() > 0.1
    back = [convert_rotary_layout(w, HEADS, source=target, target=source, rotary_dim=rotary_dim) for w in converted]
    assert torch.equal(torch.stack(back), weights)


def test_e1_layout_travels_with_the_weights() -> None:
    with pytest.raises(RuntimeError, match="have layout='half', the module has 'interleaved'"):
        make().load_state_dict(make(layout="half").state_dict())
    assert list(make("yarn").state_dict()) == ["strength", "layout_half"]


def test_e2_conversion_of_a_part_of_the_channels_by_value() -> None:
    rows = torch.arange(12)  # two heads of 6 channels, of which 4 are turned
    half = convert_rotary_layout(rows, 2, source="interleaved", target="half", rotary_dim=4)
    assert half.tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    for wrong in (0, 3, 8):
        with pytest.raises(ValueError, match=f"rotary_dim={wrong} must be even and between 2 and the 6 channels"):
            convert_rotary_layout(rows, 2, source="interleaved", target="half", rotary_dim=wrong)


# Relative ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [2, 7, 33])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scores_feel_the_offset_alone(scaling: str, length: int, layout: str) -> None:
    encoding = make(scaling, layout=layout)
    check(encoding, Grid(length))
    check(encoding, Grid(length, num_prefix_tokens=1))
    q, k = same_everywhere(length, length)
    by_offset = scores(encoding, q, k, Grid(length), Grid(length))[0]
    for diagonal in range(1 - length, length):
        values = by_offset.diagonal(diagonal, -2, -1)
        assert_close(values, values[:, :1].expand_as(values))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_e3_moving_both_changes_no_score(scaling: str) -> None:
    encoding = make(scaling)
    q, k = torch.randn(2, 1, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    here = scores(encoding, q, k, Grid(7), Grid(7))
    near = scores(encoding, q, k, Grid(7, origin=9), Grid(7, origin=9))  # the last is the 16th place
    far = scores(encoding, q, k, Grid(7, origin=200.5), Grid(7, origin=200.5))
    assert_close(near, here)
    if scaling in KNOW_LENGTH:  # relative on either side of the switch only
        assert (far - here).abs().max() > 0.01
        if scaling == "longrope":
            assert_close(far, scores(encoding, q, k, Grid(7, origin=10), Grid(7, origin=10)))
    else:
        assert_close(far, here)
    assert (scores(encoding, q, k, Grid(7, origin=1), Grid(7)) - here).abs().max() > 0.1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_one_token_more_leaves_the_others_as_they_were(scaling: str) -> None:
    assert not list(make(scaling, Grid(9)).parameters())
    for length in (9, 15, 16, 17):
        encoding, q = make(scaling, Grid(length)), torch.randn(1, HEADS, length + 1, HEAD_DIM, dtype=torch.float64)
        long = scores(encoding, q, q, Grid(length + 1), Grid(length + 1))[..., :length, :length]
        short = scores(encoding, q[:, :, :length], q[:, :, :length], Grid(length), Grid(length))
        changes = {"dynamic_ntk": length >= 16, "longrope": length == 16}.get(scaling, False)
        if changes:
            assert (long - short).abs().max() > 1e-3, length
        else:
            assert_close(long, short)


def test_the_kinds_that_know_the_length_are_these() -> None:
    assert {kind for kind, cls in KINDS.items() if cls.knows_length} == KNOW_LENGTH
    assert set(SCALINGS) - {"none"} == set(KINDS)
    for scaling in SCALINGS:
        assert make(scaling).knows_length == (scaling in KNOW_LENGTH)
        assert make(scaling).turns_alike == (scaling != "xpos")
        summed = Combined(make(), make(scaling))
        assert summed.knows_length == (scaling in KNOW_LENGTH)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_f4_step_by_step_is_the_whole(scaling: str) -> None:
    if scaling in KNOW_LENGTH:
        pytest.skip("differs by definition")
    encoding, n = make(scaling), 21
    q, k, v = torch.randn(3, 2, HEADS, n, HEAD_DIM, dtype=torch.float64)
    whole = attend(q, k, v, encoding, Grid(n), is_causal=True)
    for past in range(n):
        seen = slice(0, past + 1)
        step = attend(
            q[:, :, past : past + 1], k[:, :, seen], v[:, :, seen], encoding, Grid(1, origin=past), Grid(past + 1),
            is_causal=True,
        )  # fmt: skip
        assert_close(step, whole[:, :, past : past + 1])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_batch_of_unequal_lengths_gives_what_each_gives_alone(scaling: str) -> None:
    encoding = make(scaling)
    lengths = [20, 9]
    q, k, v = torch.randn(3, 2, HEADS, 20, HEAD_DIM, dtype=torch.float64)
    valid = torch.arange(20) < torch.tensor(lengths)[:, None]
    places = torch.arange(20.0).expand(2, -1)[..., None]
    together = attend(q, k, v, encoding, Points(places, valid))
    for b, n in enumerate(lengths):
        alone = attend(*(x[b : b + 1, :, :n] for x in (q, k, v)), encoding, Grid(n))
        assert_close(together[b : b + 1, :, :n], alone)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_length_is_that_of_queries_and_keys_together(scaling: str) -> None:
    encoding = make(scaling)
    q, k = (
        torch.randn(1, HEADS, 3, HEAD_DIM, dtype=torch.float64),
        torch.randn(2, HEADS, 24, HEAD_DIM, dtype=torch.float64),
    )
    expected = scores(encoding, q.expand(2, -1, -1, -1), k, Grid(3, origin=5), Grid(24))
    for q_pos, k_pos in [
        (Grid(3, origin=5), Grid(24).points(2)),
        (Grid(3, origin=5).points(2), Grid(24)),
        (Grid(3, origin=5).points(1), Grid(24).points(2)),
    ]:
        assert_close(scores(encoding, q.expand(2, -1, -1, -1), k, q_pos, k_pos), expected)
    swapped = scores(encoding, k, q.expand(2, -1, -1, -1), Grid(24), Grid(3, origin=5))
    if scaling != "xpos":
        assert_close(swapped.transpose(-1, -2), expected)


def test_xpos_fades_with_the_distance_in_the_past_and_grows_towards_the_future() -> None:
    encoding = make("xpos", theta=1e9)
    x = torch.zeros(1, HEADS, 33, HEAD_DIM, dtype=torch.float64)
    x[..., -2:] = 1.0  # the last pair hardly turns
    to_key = scores(encoding, x, x, Grid(33), Grid(33))[0, 0, :, 20]
    expected = [2 * ((5 / 6 + 0.4) / 1.4) ** ((query - 20) / 20.0) for query in range(33)]
    assert_close(to_key.float(), torch.tensor(expected))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_half_strength_is_half_the_angle_and_the_root_of_the_magnitude(scaling: str) -> None:
    encoding = make(scaling, strength=0.5)
    x = torch.randn(1, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    for role in ("query", "key"):
        once = encoding.rotate(x, Grid(7, num_prefix_tokens=0), role)
        encoding.set_strength(1.0)
        whole = encoding.rotate(x, Grid(7), role)
        encoding.set_strength(0.5)
        assert_close(encoding.rotate(once, Grid(7), role), whole)
    encoding.set_strength(0.0)
    assert_close(encoding.rotate(x, Grid(7)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_e4_e7_prefix_tokens_stay_as_they_are_and_the_first_other_has_its_own_place(scaling: str, layout: str) -> None:
    grid = Grid(5, num_prefix_tokens=2, origin=1)
    encoding = make(scaling, grid, layout=layout)
    x = torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    for role in ("query", "key"):
        out = encoding.rotate(x, grid, role)
        assert torch.equal(out[:, :, :2], x[:, :, :2])
        assert_close(out[:, :, 2:], encoding.rotate(x[:, :, 2:], Grid(5, origin=1), role))
        assert (out - x)[:, :, 2].abs().max() > 0.1


# Precision ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d2_d3_d4_places_beyond_256_stay_apart_and_the_dtype_stays(dtype: torch.dtype, scaling: str) -> None:
    grid = Grid(520, origin=-260)  # on both sides of 0, as xPos in float16 wants it
    options = {"theta": 10000.0, "dtype": torch.float32}
    if scaling == "xpos":
        options["scaling"] = {"kind": "xpos"}
    full, cast = make(scaling, grid, **options), make(scaling, grid, **options).to(dtype)
    assert torch.equal(cast.inv_freq, full.inv_freq)
    x = torch.ones(1, HEADS, 520, HEAD_DIM, dtype=dtype)
    q, k = cast.rotate_both(x, x, grid, grid)
    assert q.dtype == k.dtype == dtype
    for role, out in (("query", q), ("key", k)):
        assert out.isfinite().all()
        assert torch.equal(cast.rotate(x, grid, role), out)
        expected = full.rotate(x.float(), grid, role)
        assert_close(out.float(), expected, dtype)
        assert (out[0, 0, 257 + 260] - out[0, 0, 256 + 260]).abs().max() > 1e-3 * out[0, 0, 256 + 260].abs().max()
    assert attend(x, x, x, cast, grid).dtype == dtype


@pytest.mark.parametrize("scaling", SCALINGS)
def test_c2_frequencies_after_to_empty_are_the_formula_bit_for_bit(scaling: str) -> None:
    source = make(scaling, dtype=torch.float32)
    with torch.device("meta"):
        encoding = make(scaling, dtype=torch.float32)
        assert encoding.rotate(torch.empty(1, HEADS, 7, HEAD_DIM), Grid(7)).shape == (1, HEADS, 7, HEAD_DIM)
    encoding.to_empty(device="cpu")
    encoding.load_state_dict(source.state_dict())
    assert torch.equal(encoding.inv_freq, source.inv_freq)
    assert encoding.inv_freq.dtype == torch.float32
    x = torch.randn(1, HEADS, 40, HEAD_DIM)
    assert torch.equal(encoding.rotate(x, Grid(40)), source.rotate(x, Grid(40)))
    if scaling == "none":
        assert_close(source.inv_freq, torch.tensor([50.0 ** (-j / 6) for j in range(6)]))


# Traced ------------------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return scores(self.encoding, q, k, Grid(q.shape[2], origin=12), Grid(k.shape[2]))


@pytest.mark.traced
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("scaling", "lengths"),
    [
        pytest.param("yarn", [12], marks=pytest.mark.long),
        pytest.param("xpos", [12], marks=pytest.mark.long),
        ("dynamic_ntk", [12, 21]),
    ],
)
def test_c7_c8_compiled_is_eager_also_at_another_length(scaling: str, lengths: list[int]) -> None:
    turned = Turned(make(scaling, dtype=torch.float32))
    compiled = torch.compile(turned, backend="eager", fullgraph=True)
    for length in lengths:
        q, k = torch.randn(2, HEADS, 2, HEAD_DIM), torch.randn(2, HEADS, length, HEAD_DIM)
        assert_close(compiled(q, k), turned(q, k))


@pytest.mark.traced
@pytest.mark.parametrize(
    ("scaling", "layout"), [pytest.param("yarn", "interleaved", marks=pytest.mark.long), ("xpos", "half")]
)
def test_exported_with_any_batch_in_real_arithmetic(scaling: str, layout: str) -> None:
    turned = Turned(make(scaling, layout=layout, dtype=torch.float32))
    q, k = torch.randn(2, HEADS, 5, HEAD_DIM), torch.randn(2, HEADS, 17, HEAD_DIM)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(turned, (q, k), dynamic_shapes=({0: batch}, {0: batch}), strict=False)
    for size in (1, 5):
        q, k = torch.randn(size, HEADS, 5, HEAD_DIM), torch.randn(size, HEADS, 17, HEAD_DIM)
        assert_close(program.module()(q, k), turned(q, k))
    made = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert len(made) > 10
    assert not any(tensor.is_complex() for tensor in made)


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "positions", "options", "text"),
    [
        (7, Grid(9), {}, "Rope: head_dim=7 must be a multiple of 2"),
        (8, Grid(9), {"rotary_dim": 3}, "Rope: rotary_dim=3 must be a multiple of 2"),
        (8, Grid(9), {"rotary_dim": 10}, "Rope: rotary_dim=10 must be between 1 and head_dim=8"),
        (8, Grid(9), {"rotary_dim": 0}, "Rope: rotary_dim=0 must be between 1 and head_dim=8"),
        (8, Grid(9), {"theta": 0.0}, "Rope: theta=0.0 must be positive and finite"),
        (8, Grid(9), {"theta": math.nan}, "Rope: theta=nan must be positive and finite"),
        (8, Grid(9), {"layout": "neox"}, "Rope: layout='neox' must be one of interleaved, half"),
        (8, Grid(9), {"scaling": {"kind": "yarm"}}, "scaling: kind='yarm' is unknown; did you mean 'yarn'"),
        (8, Grid(9), {"scaling": "yarn"}, "scaling='yarn' must be a mapping with a kind"),
        (8, Grid(9), {"rotary": 4}, "has no option 'rotary'; did you mean 'rotary_dim'"),
        (8, Grid(4, 6), {}, "Rope: has no meaning on 2 axes"),
    ],
)
def test_refuses(head_dim: int, positions: Grid, options: dict, text: str) -> None:
    with refuses(text):
        create_encoding("rope", 2, head_dim, positions, **options)


def test_an_odd_head_may_be_turned_in_part() -> None:
    encoding = make(head_dim=7, rotary_dim=6)
    x = torch.randn(1, HEADS, 7, 7, dtype=torch.float64)
    out = encoding.rotate(x, Grid(7))
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert_close(out[..., :6], make(head_dim=6).rotate(x[..., :6], Grid(7)))


def test_repr_tells_what_it_does() -> None:
    text = repr(make("yarn", layout="half", rotary_dim=8))
    assert "layout='half', rotary_dim=8, theta=50.0, scaling=YarnScaling(factor=4.0, original_length=64" in text


@pytest.mark.parametrize("on_grids", [True, False])
def test_blocks_of_queries_know_the_length_of_all(on_grids: bool) -> None:
    scaling = {"kind": "dynamic_ntk", "factor": 4.0, "original_length": 3}
    encoding = create_encoding(
        ["rope", {"name": "rope", "scaling": scaling}, "shaw"], 2, 4, Grid(3), dtype=torch.float64
    )
    queries, keys = Grid(6, origin=4), Grid(5)
    q = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 4, dtype=torch.float64)
    places = (queries, keys) if on_grids else (queries.points(2), keys.points(2))
    expected = attend(q, k, v, encoding, *places, backend="explicit")
    out, told = attend(q, k, v, encoding, *places, backend="explicit", memory_limit=4000, explain=True)
    assert told.way == "blocks"
    assert_close(out, expected)
