"""Half precision: finite, close to float32, dtype kept; and autocast."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.backbones.builders import RELATIVE, VITS, WINDOWED, images, swapped
from tests.tolerances import TOLERANCES

FAMILIES = (*VITS, *WINDOWED)
HALF = [torch.bfloat16, torch.float16]
IMAGE = (60, 92)
KINDS: list[Any] = [*RELATIVE, "sincos", "learned", ["table", "rope_axial", "sincos"]]


def model_of(family: str, encoding: Any) -> Any:
    size = (64, 96) if family in VITS else IMAGE
    model = swapped(family, encoding, img_size=size, **({"mask_padding": True} if family in WINDOWED else {}))
    with torch.no_grad():  # weights of a usual size: with large ones the noise of bfloat16 is all that is left
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "encoding" not in name:
                parameter.mul_(0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
    return model


def image_of(family: str) -> torch.Tensor:
    return images(64, 96) if family in VITS else images(*IMAGE)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.isfinite().all()
    return float((actual.detach().float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", KINDS, ids=str)
def test_half_precision(family: str, encoding: Any) -> None:
    model, image = model_of(family, encoding), image_of(family)
    with torch.no_grad():
        expected = model(image)
    for dtype in HALF:
        model = model.to(dtype)
        out = model(image.to(dtype))
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCES[dtype][0] * 2
        out.float().square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
            assert parameter.grad.isfinite().all(), name
        model.zero_grad()
        model = model.float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ["table", "cpb", "rope_mixed", "alibi"])
@pytest.mark.parametrize("dtype", HALF)
def test_autocast(family: str, encoding: str, dtype: torch.dtype) -> None:
    model, image = model_of(family, encoding), image_of(family)
    with torch.no_grad():
        expected = model(image)
    dtypes: set[torch.dtype] = set()

    def remember(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        dtypes.add(output.dtype)

    for module in model.modules():
        if hasattr(module, "encoding") and hasattr(module, "qkv"):
            module.register_forward_hook(remember)
    with torch.autocast("cpu", dtype=dtype):
        out = model(image)
    assert dtypes == {dtype}
    assert relative_error(out, expected) < TOLERANCES[dtype][0] * 2
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", HALF)
def test_the_shifted_window_mask_holds_in_half_precision(dtype: torch.dtype) -> None:
    """What lies beyond the seam of a shift has no share, whatever it holds."""
    model = swapped("swin", "table", img_size=(112, 112)).to(dtype)
    block = model.layers[0].blocks[1]
    assert any(block.shift_size)
    x = torch.randn(1, 28, 28, 24).to(dtype)
    other = x.clone()
    other[:, :3] = other[:, :3] * 2 + 1
    before, after = block._attn(x), block._attn(other)
    # the last rows share their windows with the first ones only after the shift, and must not see them
    assert torch.equal(before[:, -4:], after[:, -4:])
    assert not torch.equal(before[:, :3], after[:, :3])
