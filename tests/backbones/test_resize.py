"""Other image sizes, and what is said of them."""

import copy
from typing import Any

import pytest
import torch

from relpos2d import swap
from relpos2d.backbones.resize import set_image_size
from tests.backbones.builders import build, images
from tests.tolerances import assert_close

SUM = ["learned", {"name": "table", "resize": "clamp"}, "cpb", "rope_axial", "none"]


@pytest.mark.parametrize(
    ("family", "encoding", "options", "lines"),
    [
        ("vit", "rope_mixed", {}, ["rope_mixed: a formula, evaluated at the new places (2 times)"]),
        ("vit", "none", {}, ["pos_embed: 3x5 -> 4x7, resampled as timm does"]),
        ("vit", "table", {}, ["table of offsets: 5x9 -> 7x13, resize=timm (2 times)"]),
        (
            "vit",
            SUM,
            {},
            [
                "table of offsets: 5x9 -> 7x13, resize=clamp (2 times)",
                "cpb: a formula, evaluated at the new places (2 times)",
                "rope_axial: a formula, evaluated at the new places (2 times)",
                "learned: 3x5 -> 4x7, resampled as timm does",
            ],
        ),
    ],
    ids=str,
)
def test_a_vit_and_its_report(family: str, encoding: Any, options: dict[str, Any], lines: list[str]) -> None:
    absolute = "keep" if encoding == "none" else "remove"
    model = swap(build(family, img_size=(48, 80)), encoding, absolute=absolute)
    theirs = copy.deepcopy(model)
    theirs.set_input_size(img_size=(64, 112))
    assert set_image_size(model, 64, 112) == ["image: 48x80 -> 64x112", "patches: 3x5 -> 4x7", *lines]
    with torch.no_grad():
        assert_close(model(images(64, 112)), theirs(images(64, 112)))


def test_windows_of_a_swin_and_its_report() -> None:
    model = swap(build("swin", img_size=(96, 128), window_size=5), ["table", "sincos"])
    assert set_image_size(model, 128, 160) == [
        "image: 96x128 -> 128x160",
        "patches: 24x32 -> 32x40",
        "window: 5x5 -> 6x6 (5 times)",
        "window: 3x4 -> 4x5",
        "sincos: a formula, evaluated at the new places",
        "table of offsets: 9x9 -> 11x11, resize=timm (5 times)",
        "table of offsets: 5x7 -> 7x9, resize=timm",
    ]


def test_the_same_size_leaves_the_model_alone() -> None:
    model = swap(build("swin", img_size=(96, 128)), "table")
    before = [module.window_size for module in model.modules() if hasattr(module, "window_size")]
    assert set_image_size(model, 96, 128) == []
    assert [module.window_size for module in model.modules() if hasattr(module, "window_size")] == before


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_a_size_that_patches_do_not_divide(family: str) -> None:
    model = swap(build(family, img_size=(64, 96)), "table")
    patch = model.patch_embed.patch_size[0]
    with pytest.raises(
        ValueError, match=rf"image size 64x98: must be a multiple of the model's patches, {patch}x{patch} pixels"
    ):
        set_image_size(model, 64, 98)
    assert model(images(64, 96)).shape == (2, 5)  # as it was
