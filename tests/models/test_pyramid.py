"""Feature pyramids: what reaches the detector, at which stride, and that padding reaches nothing."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork

from relpos2d import list_encodings
from relpos2d.backbones.swin import hidden_padding
from relpos2d.models.pyramid import split_padding
from tests.models.detectors import SWIN, SWINV2, VIT, detector
from tests.tolerances import assert_close

BACKBONES = {"swin": SWIN, "swinv2": SWINV2, "vit": VIT}
ENCODINGS = [info.name for info in list_encodings() if info.axes is None or 2 in info.axes]


def batch(model: Any, *images: Tensor) -> Tensor:
    return model.transform.batch_images(list(images), model.transform.size_divisible)


def valid(model: Any, x: Tensor, height: int, width: int) -> dict[str, Tensor]:
    """The maps of the first image, where it is."""
    maps = model.backbone(x)
    return {
        name: maps[name][0, :, : -(-height // stride), : -(-width // stride)]
        for name, stride in model.backbone.strides.items()
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("backbone", ["swin", "swinv2"])
def test_a_padded_image_has_the_maps_of_the_image_alone(backbone: str, encoding: str) -> None:
    torch.manual_seed(1)
    model = detector("retinanet", BACKBONES[backbone], encoding, out_indices=(0, 1)).double().eval()
    for parameter in model.backbone.parameters():
        parameter.data.normal_(std=0.2)
    image = torch.randn(3, 37, 50, dtype=torch.float64)
    with torch.no_grad():
        alone = valid(model, batch(model, image), 37, 50)
        beside = valid(model, batch(model, image, torch.randn(3, 75, 83, dtype=torch.float64)), 37, 50)
        longer = valid(model, batch(model, image, torch.randn(3, 20, 130, dtype=torch.float64)), 37, 50)
    for name, expected in alone.items():
        assert expected.std() > 1e-6
        assert_close(beside[name], expected)
        assert_close(longer[name], expected)


def test_shifted_windows_are_shifted_in_small_images_too() -> None:
    """An image of less than a window has the shift of a large one: what a token sees does not depend on the size of the image."""
    model = detector("retinanet", SWIN, "table")
    blocks = [b for m in model.backbone.modules() if hasattr(m, "blocks") for b in m.blocks]
    assert [block.shift_size for block in blocks] == [(0, 0), (2, 2), (0, 0), (2, 2)]
    assert {block.window_size for block in blocks} == {(4, 4)}


@pytest.mark.parametrize("backbone", list(BACKBONES))
def test_maps_are_channels_first_at_the_stated_strides(backbone: str) -> None:
    model = detector("retinanet", BACKBONES[backbone], "rope_axial").eval()
    x = batch(model, torch.rand(3, 61, 90))
    assert x.shape == (1, 4, 64, 96)
    for name, found in model.backbone(x).items():
        stride = model.backbone.strides[name]
        assert found.shape == (1, 16, -(-64 // stride), -(-96 // stride)), name
    assert model.backbone.strides == ({"p3": 8, "p4": 16, "p5": 32} if backbone != "vit" else model.backbone.strides)


def test_without_padding_it_is_torchvisions_fpn() -> None:
    model = detector("retinanet", SWIN, "table", out_indices=(0, 1)).eval()
    pyramid = model.backbone.pyramid
    x = torch.rand(2, 3, 64, 96)
    theirs = FeaturePyramidNetwork([24, 48], 16).eval()
    theirs.load_state_dict(pyramid.fpn.state_dict())
    stages = [norm(y).permute(0, 3, 1, 2) for norm, y in zip(pyramid.norms, pyramid.body(x), strict=True)]
    expected = theirs({"p2": stages[0], "p3": stages[1]})
    for name, found in pyramid(x).items():
        assert_close(found, expected[name])
        assert torch.equal(pyramid(batch(model, *x))[name], found)


def test_gradients_do_not_come_from_padding() -> None:
    model = detector("retinanet", SWIN, "table").double()
    x = batch(model, torch.randn(3, 40, 40, dtype=torch.float64), torch.randn(3, 64, 96, dtype=torch.float64))
    x.requires_grad_()
    sum((found[0] ** 2).sum() for found in model.backbone(x).values()).backward()
    assert x.grad is not None
    assert x.grad[0, :3, :40, :40].abs().min() > 0
    assert x.grad[1].abs().max() == x.grad[0, :3, 40:].abs().max() == x.grad[0, :3, :, 40:].abs().max() == 0


@pytest.mark.parametrize("backbone", ["swin", "swinv2"])
def test_checkpointing_with_two_sizes_in_one_backward(backbone: str) -> None:
    """Each stage's padding is that of its own forward pass, also when that is computed again."""
    gradients = []
    for grad_checkpointing in (False, True):
        model = detector("retinanet", BACKBONES[backbone], "cpb", grad_checkpointing=grad_checkpointing).double()
        torch.manual_seed(2)
        first = batch(model, *(torch.randn(3, *size, dtype=torch.float64) for size in ((33, 64), (20, 20))))
        second = batch(model, *(torch.randn(3, *size, dtype=torch.float64) for size in ((64, 40), (50, 90))))
        total = sum((y**2).mean() for y in (*model.backbone(first).values(), *model.backbone(second).values()))
        total.backward()
        gradients.append([p.grad for p in model.backbone.pyramid.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain)


def test_what_is_padding_is_forgotten_after_the_forward_pass() -> None:
    """The same backbone used by others afterwards, and as it was after an error in the middle."""
    model = detector("retinanet", SWIN, "table").eval()
    body = model.backbone.pyramid.body
    x = torch.rand(1, 3, 64, 64)
    before = body(x)
    with pytest.raises(AssertionError, match="should be divisible by patch size"):
        model.backbone(torch.zeros(1, 4, 64, 63))
    model.backbone(batch(model, torch.rand(3, 20, 20)))
    for found, expected in zip(body(x), before, strict=True):
        assert torch.equal(found, expected)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), pickled):
        assert torch.equal(other.backbone(x)["p3"], model.backbone(x)["p3"])


def test_a_convolutional_backbone_for_comparison() -> None:
    model = detector("retinanet", "resnet10t", "none", out_channels=8).eval()
    assert model.backbone.strides == {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128}
    maps = model.backbone(batch(model, torch.rand(3, 40, 50)))
    assert {name: found.shape for name, found in maps.items()} == {
        "p3": (1, 8, 8, 8),
        "p4": (1, 8, 4, 4),
        "p5": (1, 8, 2, 2),
        "p6": (1, 8, 1, 1),
        "p7": (1, 8, 1, 1),
    }


def test_the_last_channel_says_where_images_are() -> None:
    x = F.pad(torch.ones(1, 4, 2, 3), (0, 1, 0, 2))
    pixels, where = split_padding(x)
    assert pixels.shape == (1, 3, 4, 4)
    assert where is not None
    assert where.sum() == 6
    assert split_padding(torch.ones(1, 4, 2, 3))[1] is None
    assert split_padding(torch.ones(1, 3, 2, 3))[1] is None


@pytest.mark.parametrize("backbone", ["swin", "swinv2"])
def test_g3_whatever_padding_holds_an_odd_grid_is_merged_as_if_alone(backbone: str) -> None:
    """9x13 tokens: alone timm pads them with zeros to be merged, in a batch their neighbours are padding of NaN."""
    body = detector("retinanet", BACKBONES[backbone], "table", out_indices=(0, 1)).double().eval().backbone.pyramid.body
    image = torch.randn(1, 3, 36, 52, dtype=torch.float64)
    beside = F.pad(image, (0, 28, 0, 20), value=float("nan"))
    valid = F.pad(torch.ones(1, 36, 52, dtype=torch.bool), (0, 28, 0, 20))
    with torch.no_grad():
        alone = body(image)
        with hidden_padding(body, valid):
            found = body(beside)
    for expected, larger in zip(alone, found, strict=True):
        assert_close(larger[:, : expected.shape[1], : expected.shape[2]], expected)
