"""Swin V1 and V2: windows, shifts, padding and the absolute encodings of their patches."""

from typing import Any

import pytest
import timm
import torch

import relpos2d
from relpos2d import swap
from tests.backbones.builders import NATIVE, SMALL, WINDOWED, build, images, swapped
from tests.backbones.window_oracle import window_attention
from tests.oracles import gradients
from tests.tolerances import assert_close


@pytest.fixture(scope="module", params=WINDOWED)
def masked(request: pytest.FixtureRequest) -> Any:
    """A float64 model with windows of 7 (8) that takes any image and hides padding."""
    family = request.param
    return swapped(family, NATIVE[family], dtype=torch.float64, dynamic_img_size=True, mask_padding=True)


#: smaller than a window, smaller than the shift, not divisible on one side or on both
FEATURE_SIZES = [(5, 9), (9, 16), (11, 3), (2, 10), (1, 1), (3, 2), (1, 12)]


@pytest.mark.parametrize("size", FEATURE_SIZES)
@pytest.mark.parametrize("shifted", [False, True])
def test_padding_never_changes_a_valid_token(masked: Any, size: tuple[int, int], shifted: bool) -> None:
    block = masked.layers[0].blocks[int(shifted)]
    assert any(block.shift_size) == shifted
    x = torch.randn(2, *size, 24, dtype=torch.float64)
    expected = torch.stack([window_attention(block, image) for image in x])
    assert_close(block._attn(x), expected, torch.float32)


@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_of_masked_windows(masked: Any, shifted: bool) -> None:
    block = masked.layers[0].blocks[int(shifted)]
    x = torch.randn(1, 6, 9, 24, dtype=torch.float64, requires_grad=True)
    parameters = [x, *block.attn.parameters()]
    actual = gradients(block._attn(x), parameters)
    expected = gradients(window_attention(block, x[0])[None], parameters)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("family", WINDOWED)
def test_without_padding_the_mask_changes_nothing(family: str) -> None:
    size = (224, 448) if family == "swin" else (256, 512)
    plain = swap(build(family, img_size=size), NATIVE[family])
    masked = swap(build(family, img_size=size), NATIVE[family], mask_padding=True)
    assert torch.equal(masked(images(*size, batch=1)), plain(images(*size, batch=1)))


@pytest.mark.parametrize("family", WINDOWED)
def test_masked_padding_differs_from_timm_and_is_finite(family: str) -> None:
    plain = swap(build(family, img_size=(60, 92)), NATIVE[family])
    masked = swap(build(family, img_size=(60, 92)), NATIVE[family], mask_padding=True)
    out = masked(images(60, 92))
    assert out.isfinite().all()
    assert (out - plain(images(60, 92))).abs().max() > 1e-4


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("encoding", ["rope_mixed", "alibi", ["table", "rope_axial"]])
def test_masked_padding_with_every_kind_of_encoding(family: str, encoding: Any) -> None:
    """The shifts of a larger, empty surrounding make no difference to what the tokens of an image see of one another."""
    model = swapped(family, encoding, dtype=torch.float64, dynamic_img_size=True, mask_padding=True)
    block = model.layers[0].blocks[0]
    window = block.window_size
    x = torch.randn(1, window[0] - 2, window[1] - 3, 24, dtype=torch.float64)
    # the same tokens as a window of their own, without any padding
    alone = swapped(family, encoding, dtype=torch.float64, dynamic_img_size=True)
    other = alone.layers[0].blocks[0]
    q = block._attn(x)
    encoding_module = other.attn.encoding
    grid = relpos2d.Grid(*x.shape[1:3])
    other.attn.window_size = grid.shape
    expected = other.attn(x.flatten(1, 2)).reshape(x.shape)
    assert encoding_module.positions.shape == window
    assert_close(q, expected)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_of_a_small_image_is_the_image(family: str) -> None:
    model = swapped(family, "table", img_size=(32, 64))
    assert model.layers[0].blocks[0].attn.encoding.window_size == ((7, 7) if family == "swin" else (8, 8))
    assert model.layers[3].blocks[0].attn.encoding.window_size == (1, 2)
    assert model(images(32, 64)).isfinite().all()


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("encoding", ["sincos", "learned"])
def test_absolute_encodings_are_added_to_the_patches(family: str, encoding: str) -> None:
    plain = build(family, img_size=(64, 96), dtype=torch.float64)
    model = swap(build(family, img_size=(64, 96), dtype=torch.float64), [NATIVE[family], encoding])
    image = images(64, 96, dtype=torch.float64)
    added = model.patch_embed(image) - plain.patch_embed(image)
    vectors = model.patch_embed.encoding.embed(torch.zeros(1, 16 * 24, 24, dtype=torch.float64), relpos2d.Grid(16, 24))
    assert added.shape == (2, 16, 24, 24)
    assert added[0].std() > 1e-3
    assert_close(added, vectors.reshape(1, 16, 24, 24).expand(2, -1, -1, -1), torch.float32)
    model.set_input_size((96, 160))
    assert model.patch_embed.encoding.window_size == (24, 40) if encoding == "learned" else True
    assert model(images(96, 160, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("family", WINDOWED)
def test_reset_draws_the_temperature_and_the_biases_anew(family: str) -> None:
    model = swapped(family, "rope_mixed", img_size=(32, 64))
    model.init_weights(needs_reset=True)
    attention = model.layers[0].blocks[0].attn
    assert attention.encoding.freqs.norm(dim=0).max() <= 1 + 1e-5
    if family == "swinv2":
        name, sizes = SMALL[family]
        fresh = timm.create_model(name, img_size=(32, 64), **sizes).layers[0].blocks[0].attn
        for parameter in ("logit_scale", "q_bias", "v_bias"):
            assert torch.equal(getattr(attention, parameter), getattr(fresh, parameter)), parameter
