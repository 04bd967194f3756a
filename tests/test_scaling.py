"""Length scalings against transformers and rotary-embedding-torch, at their switches, and what they refuse."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relpos2d import Grid, create_encoding
from relpos2d.scaling import KINDS, LinearScaling, Scaling, YarnScaling, make_scaling, scaling_from_transformers
from tests.public import RotaryEmbedding
from tests.refusals import refuses
from tests.tolerances import assert_close

HEAD_DIM, ORIGINAL, LONGEST, THETA = 16, 64, 256, 5000.0

#: rope_parameters of transformers
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn of all fields": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn of DeepSeek": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "yarn by the lengths": {"factor": None, "original_max_position_embeddings": ORIGINAL},
    "yarn whose ramp is a step": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 1e6,
        "beta_slow": 1e5,
    },
    "longrope": {
        "short_factor": [1.0 + 0.1 * j for j in range(8)],
        "long_factor": [2.0 + j for j in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope with its own attention": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + j for j in range(8)],
        "attention_factor": 1.2,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope that lengthens nothing": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + j for j in range(8)],
        "factor": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
@pytest.mark.parametrize("case", PARAMETERS)
def test_transformers(case: str, length: int, partial: float) -> None:
    rope_type = case.split()[0]
    rotary_dim = int(HEAD_DIM * partial)
    parameters = {"rope_type": rope_type, "rope_theta": THETA, "partial_rotary_factor": partial, **PARAMETERS[case]}
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = parameters[name][: rotary_dim // 2]
    longest = ORIGINAL if rope_type == "dynamic" else LONGEST
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=length)
    scaling = scaling_from_transformers(parameters, longest)
    encoding = create_encoding(
        "rope", 1, HEAD_DIM, Grid(length), theta=THETA, rotary_dim=rotary_dim, layout="half", scaling=scaling
    )
    angles, logarithms = encoding.turns(torch.ones(1, 1), "key", torch.tensor(float(length)))
    torch.testing.assert_close(angles[0, 0], inv_freq, rtol=2e-6, atol=0)
    if logarithms is None:
        assert magnitude == 1
    else:
        assert_close(logarithms.exp(), torch.full((1, 1, rotary_dim // 2), float(magnitude)))
    if length <= ORIGINAL:
        torch.testing.assert_close(encoding.inv_freq, inv_freq, rtol=2e-6, atol=0)


def test_ntk_is_that_of_rotary_embedding_torch() -> None:
    theirs = RotaryEmbedding(HEAD_DIM, theta=10000, theta_rescale_factor=4.0)
    ours = create_encoding("rope", 1, HEAD_DIM, Grid(7), scaling={"kind": "ntk", "factor": 4.0})
    torch.testing.assert_close(ours.inv_freq, theirs.freqs.detach(), rtol=2e-6, atol=0)


def test_linear_is_that_of_rotary_embedding_torch() -> None:
    theirs = RotaryEmbedding(HEAD_DIM, interpolate_factor=4.0)
    x = torch.randn(1, 2, 7, HEAD_DIM)
    ours = create_encoding("rope", 2, HEAD_DIM, Grid(7), scaling={"kind": "linear", "factor": 4.0})
    assert_close(ours.rotate(x, Grid(7)), theirs.rotate_queries_or_keys(x))


def test_ntk_by_value() -> None:
    plain = torch.tensor([1.0, 0.1, 0.01])
    assert_close(
        make_scaling({"kind": "ntk", "factor": 4}).inv_freq(plain, 1000.0, None), torch.tensor([1.0, 0.05, 0.0025])
    )


def test_dynamic_ntk_by_value_for_each_sample() -> None:
    scaling = make_scaling({"kind": "dynamic_ntk", "factor": 2.0, "original_length": 100})
    plain = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    got = scaling.inv_freq(plain, 1000.0, torch.tensor([5.0, 100.0, 250.0]))
    expected = [[1.0, 0.1, 0.01], [1.0, 0.1, 0.01], [1.0, 0.05, 0.0025]]  # 2 * 2.5 - 1 = 4
    assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_xpos_by_value() -> None:
    scaling = make_scaling({"kind": "xpos", "scale_base": 8.0})
    coords = torch.tensor([[0.0], [8.0], [-4.0]], dtype=torch.float64)
    rates = torch.tensor([0.4 / 1.4, 0.9 / 1.4], dtype=torch.float64)
    expected = torch.stack((rates**0, rates, rates**-0.5))
    assert_close(scaling.log_magnitude(coords, "query", 2).exp(), expected)
    assert_close(scaling.log_magnitude(coords, "key", 2).exp(), 1 / expected)


@pytest.mark.parametrize("given", [None, {"rope_type": "default"}, {"rope_theta": 1e4, "type": "default"}, {}])
def test_plain_rope_of_transformers_has_no_scaling(given: dict | None) -> None:
    assert scaling_from_transformers(given) is None


def test_configs_of_transformers() -> None:
    old = scaling_from_transformers({"type": "linear", "factor": 2.0})
    assert old == LinearScaling(2.0) == scaling_from_transformers({"rope_type": "linear", "factor": 2.0}, 4096)
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": None}
    assert scaling_from_transformers(yarn, 2048) == YarnScaling(4.0, 2048)
    one_scale = scaling_from_transformers({**yarn, "mscale_all_dim": 1.0}, 2048)  # transformers wants both
    assert one_scale == YarnScaling(4.0, 2048)
    dynamic = scaling_from_transformers({"rope_type": "dynamic", "factor": 2.0}, 2048)
    assert dynamic == KINDS["dynamic_ntk"](2.0, 2048)


@pytest.mark.parametrize("length", [ORIGINAL - 1, 4 * ORIGINAL])
@pytest.mark.parametrize(
    "given", [{"rope_type": "default"}, {"type": "linear", "factor": 2}, {"type": "dynamic", "factor": 3.0}]
)
def test_an_original_length_that_transformers_does_not_read(given: dict, length: int) -> None:
    with_length = {**given, "original_max_position_embeddings": 7}
    scaling = scaling_from_transformers(with_length, ORIGINAL)
    assert scaling == scaling_from_transformers(given, ORIGINAL)
    if scaling is None:
        return
    rope_type = given["type"]
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **with_length},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=length)
    plain = THETA ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    found = scaling.inv_freq(plain, THETA, torch.tensor(float(length)))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rope_type": "yarm"}, "rope_type 'yarm' is unknown; did you mean 'yarn'"),
        ({"rope_type": "llama"}, "did you mean 'llama3'"),
        ({"rope_type": "mrope"}, "rope_type 'mrope' is unknown; .*known: default, linear, dynamic"),
        ({"type": "proportional"}, "^type 'proportional' is unknown"),
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is unknown"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_type 'default' has no entry 'mrope_section'"),
        (
            {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0},
            "'linear' has no entry 'low_freq_factor'; .*: factor$",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "^rope_type 'dynamic': needs max_length$"),
        (
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
            "^type 'dynamic': needs max_length$",
        ),
        ({"type": "dynamic", "original_length": 8}, "type 'dynamic' has no entry 'original_length'; entries: factor$"),
        (
            {"rope_type": "yarn", "original_max_positions": 8},
            "rope_type 'yarn' has no entry 'original_max_positions'; did you mean 'original_max_position_embeddings'",
        ),
        ({"rope_type": "linear"}, "rope_type 'linear': needs factor$"),
        ({"rope_type": "yarn"}, "rope_type 'yarn': needs factor, original_max_position_embeddings or max_length$"),
    ],
)
def test_e1_unknown_rope_types_and_entries_are_errors(given: dict, text: str) -> None:
    with refuses(text):
        scaling_from_transformers(given)


TYPE_YARN = {"type": "yarn", "factor": 2.0}
LONG_ENTRIES = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
ENTRY = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("given", "max_length", "text"),
    [
        ({"rope_type": "dynamic", "factor": 0.5}, 8, "rope_type 'dynamic': factor=0.5 must be a number of at least 1"),
        ({"rope_type": "dynamic", "factor": 2.0}, 0, "rope_type 'dynamic': max_length=0 must be a whole number"),
        ({"rope_type": "dynamic", "factor": 2.0}, True, "rope_type 'dynamic': max_length=True must be a whole number"),
        ({**TYPE_YARN, ENTRY: 0}, 8, f"^type 'yarn': {ENTRY}=0 must be a whole number of at least 1"),
        ({"type": "yarn", ENTRY: 0}, 8, f"^type 'yarn': {ENTRY}=0 must be a whole number of at least 1"),
        ({**TYPE_YARN, ENTRY: "8"}, 8, f"^type 'yarn': {ENTRY}='8' must be a whole number of at least 1"),
        ({"type": "yarn", ENTRY: 16}, 8, f"^type 'yarn': max_length / {ENTRY}=0.5 must be a number of at least 1"),
        ({**TYPE_YARN, "mscale": "1"}, 8, "^type 'yarn': mscale='1' must be a number of at least 0"),
        ({"type": "yarn", "factor": -1, "mscale": 1, "mscale_all_dim": 1}, 8, "^type 'yarn': factor=-1 must be"),
        ({**LONG_ENTRIES, ENTRY: 1}, 8, f"rope_type 'longrope': {ENTRY}=1 must be a whole number of at least 2"),
        ({**LONG_ENTRIES, "short_factor": 1}, 8, "rope_type 'longrope': short_factor=1 must hold positive numbers"),
        (LONG_ENTRIES, None, f"rope_type 'longrope': needs {ENTRY} or max_length"),
    ],
)
def test_values_are_refused_by_the_names_that_were_given(given: dict, max_length: Any, text: str) -> None:
    with refuses(text):
        scaling_from_transformers(given, max_length)


YARN = {"kind": "yarn", "factor": 4.0, "original_length": 64}
LONG = {"kind": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_length": 64}
LLAMA3 = {"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_length": 64}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("yarn", "scaling='yarn' must be a mapping with a kind; kinds: linear, ntk, dynamic_ntk, yarn, longrope"),
        ({"factor": 2.0}, "scaling=.*factor.* needs a kind; kinds: linear"),
        ({"kind": "yarm"}, "scaling: kind='yarm' is unknown; did you mean 'yarn'"),
        ({"kind": "dynamic"}, "did you mean 'dynamic_ntk'"),
        ({"kind": ["yarn"]}, "scaling: kind=.'yarn'. is unknown"),
        (
            {"kind": "linear", "faktor": 2.0},
            "scaling linear: has no field 'faktor'; did you mean 'factor'. fields: factor",
        ),
        ({"kind": "ntk", "factor": 2.0, "beta_fast": 3}, "scaling ntk: has no field 'beta_fast'; .*fields: factor"),
        ({"kind": "linear", "kinds": 2.0}, "scaling linear: has no field 'kinds'"),
        ({"kind": "yarn", "beta_fast": 32}, "scaling yarn: needs factor, original_length"),
        ({"kind": "linear", "factor": 0.5}, "scaling linear: factor=0.5 must be a number of at least 1"),
        ({"kind": "ntk", "factor": "4"}, "scaling ntk: factor='4' must be a number of at least 1"),
        ({"kind": "ntk", "factor": math.inf}, "scaling ntk: factor=inf must be a number"),
        ({"kind": "linear", "factor": True}, "scaling linear: factor=True must be a number"),
        ({"kind": "dynamic_ntk", "factor": 2, "original_length": 2.5}, "original_length=2.5 must be a whole number"),
        ({**YARN, "original_length": 0}, "scaling yarn: original_length=0 must be a whole number of at least 1"),
        ({**YARN, "beta_fast": 1, "beta_slow": 32}, "scaling yarn: beta_fast=1 must be a number above 32"),
        ({**YARN, "beta_slow": 0}, "scaling yarn: beta_slow=0 must be a number above 0"),
        ({**YARN, "attention_factor": 0.0}, "scaling yarn: attention_factor=0.0 must be a number above 0"),
        ({**YARN, "truncate": 1}, "scaling yarn: truncate=1 must be true or false"),
        ({**LONG}, r"scaling longrope: give factor \(how much longer sequences become\), or attention_factor"),
        ({**LONG, "factor": 2.0, "long_factor": []}, r"longrope: long_factor=\[\] must hold positive numbers"),
        ({**LONG, "factor": 2.0, "short_factor": [0.0]}, r"longrope: short_factor=\[0.0\] must hold positive numbers"),
        ({**LONG, "factor": 2.0, "short_factor": 1.0}, r"longrope: short_factor=1.0 must hold positive numbers"),
        ({**LONG, "factor": 0.0}, "scaling longrope: factor=0.0 must be a number of at least 1"),
        ({**LONG, "attention_factor": -1}, "scaling longrope: attention_factor=-1 must be a number above 0"),
        ({**LONG, "factor": 2.0, "original_length": 1}, "original_length=1 must be a whole number of at least 2"),
        ({**LLAMA3, "high_freq_factor": 1}, "scaling llama3: high_freq_factor=1 must be a number above 1"),
        ({**LLAMA3, "low_freq_factor": 0}, "scaling llama3: low_freq_factor=0 must be a number above 0"),
        ({"kind": "xpos", "scale_base": 0}, "scaling xpos: scale_base=0 must be a number above 0"),
    ],
)
def test_refuses(given: Any, text: str) -> None:
    with refuses(text):
        make_scaling(given)


@pytest.mark.parametrize(
    ("scaling", "options", "text"),
    [
        ({"kind": "ntk", "factor": 2}, {"rotary_dim": 2}, "scaling ntk: needs at least 2 pairs of channels"),
        (
            {"kind": "dynamic_ntk", "factor": 2, "original_length": 8},
            {"rotary_dim": 2},
            "dynamic_ntk: needs at least 2 pairs of channels, the encoding turns 1",
        ),
        (YARN, {"theta": 1.0}, "scaling yarn: needs theta above 1, the encoding has theta=1.0"),
        ({**LONG, "factor": 2.0}, {}, "longrope: short_factor has 1 numbers, the encoding turns 4 pairs"),
        (
            {**LONG, "factor": 2.0, "short_factor": [1.0] * 4},
            {},
            "longrope: long_factor has 1 numbers, the encoding turns 4 pairs",
        ),
    ],
)
def test_refuses_an_encoding_that_does_not_fit(scaling: dict, options: dict, text: str) -> None:
    with refuses(text):
        create_encoding("rope", 2, 8, Grid(9), scaling=scaling, **options)


def test_kinds_are_told_apart_and_can_be_keys() -> None:
    assert make_scaling(YARN) == make_scaling(make_scaling(YARN)) != make_scaling({**YARN, "factor": 2.0})
    assert len({make_scaling(given) for given in (YARN, dict(YARN), LLAMA3, {**LONG, "factor": 2})}) == 3
    assert all(issubclass(cls, Scaling) and cls.kind == kind and cls.__doc__ for kind, cls in KINDS.items())
