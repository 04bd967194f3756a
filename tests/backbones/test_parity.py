"""A swap for the native encoding leaves timm's model as it was: outputs and gradients of every parameter."""

from typing import Any

import pytest
import torch

from relpos2d import swap
from tests.backbones.builders import (
    ENCODINGS,
    NATIVE,
    VITS,
    WINDOWED,
    build,
    draw,
    images,
    native_name,
    timm_warnings,
)
from tests.oracles import gradients
from tests.tolerances import assert_close

SIZES = {"swin": [(224, 224), (160, 288), (32, 32)], "swinv2": [(256, 256), (160, 288), (32, 32)]}
CASES = [(family, size) for family in WINDOWED for size in SIZES[family]]


def pair(family: str, encoding: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    """timm's model, and the same one swapped."""
    return build(family, dtype=dtype, **kwargs), swap(build(family, dtype=dtype, **kwargs), encoding)


def assert_same_function(timm_model: Any, model: Any, image: torch.Tensor) -> None:
    expected, actual = timm_model(image), model(image)
    assert expected.std() > 1e-2
    assert_close(actual, expected)


def assert_same_gradients(timm_model: Any, model: Any, image: torch.Tensor) -> None:
    theirs = dict(timm_model.named_parameters())
    ours = {native_name(name): parameter for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    expected = gradients(timm_model(image), list(theirs.values()))
    actual = gradients(model(image), [ours[name] for name in theirs])
    for name, mine, other in zip(theirs, actual, expected, strict=True):
        error = (mine - other).norm() / other.norm().clamp(min=1e-30)
        assert error < 1e-10, (name, float(error))


@pytest.mark.parametrize(("family", "size"), CASES)
def test_swin_outputs(family: str, size: tuple[int, int]) -> None:
    timm_model, model = pair(family, NATIVE[family], img_size=size)
    shifts = {any(block.shift_size) for block in model.modules() if hasattr(block, "shift_size")}
    assert shifts == ({False, True} if size != (32, 32) else {False, True} if family == "swin" else {False})
    assert_same_function(timm_model, model, images(*size))


@pytest.mark.parametrize(("family", "size"), [c for c in CASES if c[1] != (256, 256) and c[1] != (224, 224)])
def test_swin_gradients(family: str, size: tuple[int, int]) -> None:
    timm_model, model = pair(family, NATIVE[family], torch.float64, img_size=size)
    assert_same_gradients(timm_model, model, images(*size, dtype=torch.float64))


@pytest.mark.parametrize("family", WINDOWED)
def test_swin_gradients_at_its_own_size(family: str) -> None:
    side = SIZES[family][0][0]
    timm_model, model = pair(family, NATIVE[family], torch.float64)
    assert_same_gradients(timm_model, model, images(side, side, batch=1, dtype=torch.float64))


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("size", [(96, 160), (40, 72)])
def test_swin_with_any_image_size(family: str, size: tuple[int, int]) -> None:
    timm_model, model = pair(family, NATIVE[family], dynamic_img_size=True)
    assert_same_function(timm_model, model, images(*size))


def test_swin_with_its_own_head_dim_and_no_qkv_bias() -> None:
    timm_model, model = pair("swin", "table", img_size=(96, 160), head_dim=12, qkv_bias=False)
    assert model.layers[0].blocks[0].attn.encoding.head_dim == 12
    assert_same_function(timm_model, model, images(96, 160))


def test_swinv2_with_a_pretrained_window_and_no_qkv_bias() -> None:
    options = {"pretrained_window_sizes": (12, 12, 12, 6), "qkv_bias": False, "img_size": (96, 160)}
    timm_model, model = pair("swinv2", "cpb", **options)
    assert model.layers[3].blocks[0].attn.encoding.pretrained_window_size == (6, 6)
    assert_same_function(timm_model, model, images(96, 160))


def test_swinv2_with_separate_qkv_bias() -> None:
    timm_model, model = pair("swinv2", "cpb", img_size=(96, 160))
    for module in (*timm_model.modules(), *model.modules()):
        if hasattr(module, "qkv_bias_separate"):
            module.qkv_bias_separate = True
    assert_same_function(timm_model, model, images(96, 160))


@pytest.mark.parametrize("family", WINDOWED)
def test_the_swapped_attention_runs(family: str) -> None:
    model = swap(build(family, img_size=(96, 160)), NATIVE[family])
    image = images(96, 160)
    before = model(image)
    for block in (model.layers[0].blocks[0], model.layers[0].blocks[1], model.layers[3].blocks[0]):
        encoding = block.attn.encoding
        parameters = list(encoding.parameters())
        kept = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(torch.randn_like(parameter))
        assert (model(image) - before).abs().max() > 1e-4  # exactly 0 if it did not run
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)
    assert torch.equal(model(image), before)


@pytest.mark.parametrize("family", VITS)
def test_vit_without_encoding(family: str) -> None:
    timm_model, model = pair(family, "none")
    assert_same_function(timm_model, model, images(224, 224))
    timm_model, model = pair(family, "none", torch.float64, img_size=(96, 160))
    assert_same_gradients(timm_model, model, images(96, 160, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "init_values": 0.5, "reg_tokens": 4},
        {"class_token": False, "global_pool": "avg"},
        {"pre_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
        {"no_embed_class": True, "reg_tokens": 2},
        {"pos_embed": "none", "reg_tokens": 1},
        {"global_pool": "map", "class_token": False},
    ],
)
def test_vit_options(options: dict[str, Any]) -> None:
    timm_model, model = pair("vit", "none", torch.float64, img_size=(96, 160), **options)
    assert_same_gradients(timm_model, model, images(96, 160, dtype=torch.float64))


@pytest.mark.parametrize("family", ["vit", "deit3"])
def test_vit_with_learned_positions_of_its_own(family: str) -> None:
    timm_model, model = pair(family, "learned", torch.float64, img_size=(96, 160))
    assert "encoding.pos_embed" in dict(model.named_parameters())
    assert_same_gradients(timm_model, model, images(96, 160, dtype=torch.float64))


@pytest.mark.parametrize("size", [(96, 160), (224, 224), (272, 144)])
def test_vit_with_any_image_size(size: tuple[int, int]) -> None:
    timm_model, model = pair("vit", "none", dynamic_img_size=True)
    assert_same_function(timm_model, model, images(*size))


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("size", [(160, 288), (320, 192), (64, 64)])
def test_resizing_equals_timm_and_going_back_is_exact(family: str, size: tuple[int, int]) -> None:
    timm_model, model = pair(family, NATIVE[family])
    own = SIZES[family][0]
    first = model(images(*own))
    with timm_warnings():
        timm_model.set_input_size(size)
    model.set_input_size(size)
    assert_same_function(timm_model, model, images(*size))
    model.set_input_size(own)
    assert torch.equal(model(images(*own)), first)


@pytest.mark.parametrize("family", WINDOWED)
def test_resizing_the_window_alone(family: str) -> None:
    timm_model, model = pair(family, NATIVE[family], img_size=(96, 160))
    first = model(images(96, 160))
    window = timm_model.layers[0].blocks[0].window_size[0]
    for new in ((5, 9), 3):
        timm_model, _ = pair(family, NATIVE[family], img_size=(96, 160))
        with timm_warnings():
            timm_model.set_input_size(window_size=new)
        model.set_input_size(window_size=new)
        assert_same_function(timm_model, model, images(96, 160))
    model.set_input_size(window_size=window)
    assert torch.equal(model(images(96, 160)), first)


@pytest.mark.parametrize("family", VITS)
def test_resizing_a_vit(family: str) -> None:
    timm_model, model = pair(family, "none")
    timm_model.set_input_size((160, 288))
    model.set_input_size((160, 288))
    assert_same_function(timm_model, model, images(160, 288))


def test_resizing_learned_positions_equals_timm_and_going_back_is_exact() -> None:
    timm_model, model = pair("vit", "learned")
    first = model(images(224, 224))
    timm_model.set_input_size((160, 288))
    model.set_input_size((160, 288))
    assert_same_function(timm_model, model, images(160, 288))
    model.set_input_size((224, 224))
    assert torch.equal(model(images(224, 224)), first)


@pytest.mark.parametrize("family", [*VITS, *WINDOWED])
@pytest.mark.parametrize("encoding", [*ENCODINGS, ["sincos", "rope_axial", "table"], ["learned", "cpb"]])
def test_timm_weights_load_strictly(family: str, encoding: Any) -> None:
    timm_model = build(family, img_size=(64, 96), seed=1)
    model = swap(build(family, img_size=(64, 96), seed=2), encoding)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(timm_model.state_dict(), strict=True)
    theirs = dict(timm_model.named_parameters())
    loaded = 0
    for name, parameter in model.named_parameters():
        source = theirs.get(native_name(name))
        parts = theirs.get(name.replace("encoding.parts.0.", "").replace("encoding.parts.1.", ""))
        source = parts if source is None else source
        loaded += source is not None
        assert torch.equal(parameter, own[name] if source is None else source), name
    positions = sum("pos_embed" in n or "relative_position_bias_table" in n or "cpb_mlp" in n for n in theirs)
    assert loaded >= len(theirs) - positions

    copy = swap(build(family, img_size=(64, 96), seed=3), encoding)
    draw(copy, seed=4)
    copy.load_state_dict(model.state_dict(), strict=True)
    image = images(64, 96)
    assert torch.equal(copy(image), model(image))
