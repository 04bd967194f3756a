"""A plain ViT as a detection backbone: against a loop over windows, with padding, and with every encoding of two axes."""

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from relpos2d import Grid, swap
from relpos2d.models.plain_vit import SimpleFeaturePyramid
from tests.backbones.builders import ENCODINGS, VITS, build, draw, images, swapped
from tests.oracles import gradients
from tests.refusals import refuses
from tests.tolerances import assert_close

SUM = ["table", "cpb", "rope_mixed", "learned"]
WINDOW = (2, 3)
#: 4 x 6 patches of 16 pixels, not all of them full
IMAGE = (50, 90)


def pyramid(encoding: Any, family: str = "vit", seed: int = 1, **kwargs: Any) -> Any:
    """In float64, every parameter drawn; 3 x 5 patches are what the ViT knew before."""
    options = {"window_size": WINDOW, "global_blocks": [1], "out_channels": 8}
    options |= {key: kwargs.pop(key) for key in ("window_size", "global_blocks", "image_grid") if key in kwargs}
    vit = swapped(family, encoding, img_size=(48, 80), dtype=torch.float64, **kwargs)
    model = SimpleFeaturePyramid(vit, **options)
    draw(model, seed)
    return model.eval()


def beside_larger(image: Tensor, height: int, width: int) -> Tensor:
    """A batch whose second image is the given one, its padding full of NaN."""
    batch = torch.full((2, 4, height, width), torch.nan, dtype=image.dtype)
    batch[0] = images(height, width, batch=1, seed=3, dtype=image.dtype).repeat(1, 2, 1, 1)[0, :4]
    batch[:, 3] = 0
    batch[0, 3] = 1
    batch[1, :3, : image.shape[2], : image.shape[3]] = image[0]
    batch[1, 3, : image.shape[2], : image.shape[3]] = 1
    return batch


def by_hand(model: Any, image: Tensor) -> dict[str, Tensor]:
    """What the model should give for one image (1, 3, height, width), window by window and convolution by convolution.

    Tokens of a window that is not full are at the places of its upper left part.
    """
    body, (height, width) = model.body, image.shape[2:]
    x = F.pad(image, (0, -width % 16, 0, -height % 16))
    x = body.patch_embed.proj(x)[0].permute(1, 2, 0)
    rows, columns, _ = x.shape
    grid = Grid(rows, columns)
    if body.encoding is not None:
        body.encoding.set_window_size((rows, columns))
        x = body.encoding.embed(x.reshape(1, rows * columns, -1), grid).reshape(x.shape)
    for index, block in enumerate(body.blocks):
        size = (rows, columns) if index in model.global_blocks else model.window_size
        block.attn.encoding.set_window_size(size)
        out = torch.empty_like(x)
        for top in range(0, rows, size[0]):
            for left in range(0, columns, size[1]):
                bottom, right = min(top + size[0], rows), min(left + size[1], columns)
                part = block.norm1(x[top:bottom, left:right])
                seen = Grid(*part.shape[:2])
                out[top:bottom, left:right] = block.attn(part.reshape(1, seen.num_tokens, -1), seen).reshape(part.shape)
        x = x + block.ls1(out)
        x = x + block.ls2(block.mlp(block.norm2(x)))
    last = x.permute(2, 0, 1)[None]
    maps = {}
    for name, stride in model.strides.items():
        level = model.levels[name]
        y = level.up(last)
        if stride == 32:
            y = F.max_pool2d(last, kernel_size=2, ceil_mode=True)
        y = y[..., : -(-height // stride), : -(-width // stride)]
        maps[name] = level.mixed_norm(F.conv2d(level.norm(level.project(y)), level.mix.weight, padding=1))
    return maps


@pytest.mark.parametrize("encoding", [*ENCODINGS, SUM])
def test_equals_a_loop_over_windows_alone_and_beside_a_larger_image(encoding: Any) -> None:
    """And every parameter learns, the same from both sides."""
    model = pyramid(encoding, absolute="remove")
    image = images(*IMAGE, batch=1, dtype=torch.float64)
    alone, batched = model(image), model(beside_larger(image, 96, 128))
    expected = by_hand(model, image)
    assert list(alone) == list(model.strides) == ["p2", "p3", "p4", "p5"]
    for name, stride in model.strides.items():
        height, width = -(-IMAGE[0] // stride), -(-IMAGE[1] // stride)
        assert alone[name].shape == (1, 8, height, width)
        assert_close(alone[name], expected[name])
        assert batched[name].shape == (2, 8, 96 // stride, 128 // stride)
        assert_close(batched[name][1:, :, :height, :width], alone[name])
        assert batched[name].isfinite().all()
        assert not batched[name][1, :, height:].any()
        assert not batched[name][1, :, :, width:].any()
    parameters = list(model.parameters())
    of_model, by_loop = (
        gradients(torch.cat([y.flatten() for y in maps.values()]), parameters) for maps in (alone, expected)
    )
    for mine, theirs, (name, _) in zip(of_model, by_loop, model.named_parameters(), strict=True):
        assert mine.any(), name
        assert_close(mine, theirs)


@pytest.mark.parametrize("size", [(16, 16), (1, 70), (33, 64), (96, 17)])
def test_images_of_few_and_of_odd_patches(size: tuple[int, int]) -> None:
    model = pyramid(["table", "learned"])
    image = images(*size, batch=1, dtype=torch.float64)
    alone, batched = model(image), model(beside_larger(image, 128, 96))
    for name, expected in by_hand(model, image).items():
        assert_close(alone[name], expected)
        assert_close(batched[name][1:, :, : expected.shape[2], : expected.shape[3]], expected)


@pytest.mark.parametrize("encoding", [SUM, "table"])
def test_padded_by_its_own_hand(encoding: Any) -> None:
    """An image in a frame of a multiple of 32 that says what is padding is the image alone, in float32 too."""
    model = pyramid(encoding).float()
    image = images(*IMAGE, batch=1)
    framed = F.pad(torch.cat((image, torch.ones(1, 1, *IMAGE)), dim=1), (0, 6, 0, 14))
    for mine, theirs in zip(model(framed).values(), model(image).values(), strict=True):
        torch.testing.assert_close(mine[:, :, : theirs.shape[2], : theirs.shape[3]], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", VITS)
@pytest.mark.parametrize("absolute", ["keep", "fade", "remove"])
def test_each_kind_of_vit(family: str, absolute: str) -> None:
    """With prefix tokens or a norm before the blocks, and an embedding that is kept, on its way out or gone."""
    model = pyramid("rope_mixed", family, absolute=absolute, pre_norm=family == "vit")
    if absolute == "fade":
        model.body.absolute_strength.fill_(0.25)
    image = images(48, 80, batch=1, dtype=torch.float64)
    seen: list[Tensor] = []
    model.body.blocks[0].norm1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(image)
    whole = swapped(
        family, "rope_mixed", img_size=(48, 80), dtype=torch.float64, absolute=absolute, pre_norm=family == "vit"
    )
    missing = whole.load_state_dict(model.body.state_dict(), strict=False).missing_keys
    assert not [key for key in missing if key.startswith(("blocks", "pos_embed", "patch_embed", "norm_pre"))]
    tokens = whole.norm_pre(whole._pos_embed(whole.patch_embed(image)))[:, whole.num_prefix_tokens :]
    assert_close(seen[0][0, :3, :5].flatten(0, 1), tokens[0])


@pytest.mark.parametrize("family", VITS)
def test_an_embedding_is_resampled_as_timm_does(family: str) -> None:
    body = (model := pyramid("none", family)).body
    num_prefix = 0 if body.no_embed_class else body.num_prefix_tokens
    for shape in ((3, 5), (4, 6), (9, 2), (61, 5)):
        expected = resample_abs_pos_embed(body.pos_embed, list(shape), [3, 5], num_prefix)[0, num_prefix:]
        assert_close(model._pos_embed(shape), expected, torch.float32)
    assert torch.equal(model._pos_embed((3, 5)), body.pos_embed[0, num_prefix:])


@pytest.mark.parametrize("encoding", [["table", "learned"], "rope_mixed"])
def test_a_fixed_grid(encoding: Any) -> None:
    """All images read at one size: a smaller image sees the upper left of it, a table is resized once."""
    model, free = pyramid(encoding, image_grid=(4, 6), absolute="remove"), pyramid(encoding, absolute="remove")
    whole, small = (images(*size, batch=1, dtype=torch.float64) for size in ((64, 96), (32, 48)))
    for mine, theirs in zip(model(whole).values(), free(whole).values(), strict=True):
        assert_close(mine, theirs)
    differs = any((a - b).abs().max() > 1e-6 for a, b in zip(model(small).values(), free(small).values(), strict=True))
    assert differs == (encoding != "rope_mixed")
    assert all(y.isfinite().all() for y in model(images(96, 160, dtype=torch.float64)).values())


def test_a_fixed_grid_and_an_embedding() -> None:
    """It is cut where an image is smaller, and goes on as at its edge where one is larger."""
    model = pyramid("none", image_grid=(4, 6))
    embedded = model._pos_embed((4, 6)).unflatten(0, (4, 6))
    assert_close(model._pos_embed((2, 8)).unflatten(0, (2, 8))[:, :6], embedded[:2])
    assert torch.equal(model._pos_embed((5, 8)).unflatten(0, (5, 8))[4, 5:], embedded[3, 5].expand(3, -1))


@pytest.mark.parametrize("encoding", ["table", ["cpb", "learned"]])
def test_checkpointing_with_two_sizes_in_one_step(encoding: Any) -> None:
    """What a block does again in the backward pass is what it did, though it has seen another size since."""
    model = pyramid(encoding).train()
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        first = model(images(*IMAGE, dtype=torch.float64))
        second = model(beside_larger(images(40, 33, batch=1, dtype=torch.float64), 64, 96))
        total = sum(y.square().mean() for maps in (first, second) for y in maps.values())
        results.append(gradients(total, list(model.parameters())))
    for plain, again in zip(*results, strict=True):
        assert_close(again, plain)


def test_paths_are_dropped_image_by_image() -> None:
    model = pyramid("table", drop_path_rate=0.5)
    image = images(*IMAGE, batch=1, dtype=torch.float64).expand(6, -1, -1, -1)
    assert torch.equal(model(image)["p4"][0], model(image)["p4"][5])
    torch.manual_seed(0)
    dropped = model.train()(image)["p4"]
    assert len(torch.unique(dropped.flatten(1).round(decimals=6), dim=0)) == 2


@pytest.mark.parametrize("patch_size", [8, 16, 32])
def test_strides(patch_size: int) -> None:
    vit = swap(build("vit", img_size=64, patch_size=patch_size, embed_dim=24), "rope_axial")
    model = SimpleFeaturePyramid(vit, 12, window_size=3, global_blocks=1)
    maps = model(images(64, 96))
    assert isinstance(maps, OrderedDict)
    assert model.strides == {"p2": 4, "p3": 8, "p4": 16, "p5": 32}
    assert model.out_channels == 12
    for name, stride in model.strides.items():
        assert maps[name].shape == (2, 12, 64 // stride, 96 // stride)


def test_global_blocks_and_stages() -> None:
    def made(depth: int, global_blocks: Any) -> SimpleFeaturePyramid:
        vit = build("vit", img_size=32, embed_dim=12, depth=depth)
        return SimpleFeaturePyramid(swap(vit, "table"), 4, global_blocks=global_blocks)

    assert made(12, 4).global_blocks == (2, 5, 8, 11)
    assert made(7, 3).global_blocks == (1, 3, 6)
    assert made(3, 0).global_blocks == ()
    assert made(4, [3, 0]).global_blocks == (0, 3)
    places = dict(made(6, 2).stages())
    assert places["body.patch_embed.proj.weight"] == places["body.pos_embed"] == "stem"
    assert places["body.blocks.2.attn.encoding.relative_position_bias_table"] == "0.2"
    assert places["body.blocks.3.norm1.weight"] == "1.0"
    assert set(places) == {name for name, _ in made(6, 2).named_parameters() if name.startswith("body.")}


def test_weights_of_a_classifier() -> None:
    """Of timm and of a swapped model, but for what takes no part; others are refused."""
    model, classifier = pyramid("table"), swapped("vit", "table", img_size=(48, 80), dtype=torch.float64, seed=5)
    model.body.load_state_dict(classifier.state_dict())
    for name, parameter in model.body.named_parameters():
        assert torch.equal(parameter, classifier.get_parameter(name))
    timm_model = build("vit", img_size=(48, 80), dtype=torch.float64, seed=8)
    model.body.load_state_dict(timm_model.state_dict())
    assert torch.equal(model.body.blocks[1].attn.qkv.weight, timm_model.blocks[1].attn.qkv.weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.norm1.weight"):
        model.body.load_state_dict({k: v for k, v in timm_model.state_dict().items() if "blocks.1" not in k})
    with pytest.raises(RuntimeError, match=r"size mismatch for pos_embed"):
        model.body.load_state_dict(build("vit", img_size=64, dtype=torch.float64).state_dict())


def test_copies_and_the_meta_device() -> None:
    model = pyramid(SUM)
    batch = beside_larger(images(*IMAGE, batch=1, dtype=torch.float64), 64, 96)
    expected = model(batch)
    with torch.device("meta"):
        vit = swap(build("vit", img_size=(48, 80)), SUM)
        built = SimpleFeaturePyramid(vit, 8, window_size=WINDOW, global_blocks=[1]).double()
    built.to_empty(device="cpu").load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), built.eval()):
        assert other.report == model.report
        for mine, theirs in zip(other(batch).values(), expected.values(), strict=True):
            assert torch.equal(mine, theirs)
        other.body.load_state_dict(build("vit", img_size=(48, 80), dtype=torch.float64).state_dict(), strict=False)


def test_half_precision_and_autocast() -> None:
    model = pyramid("table").float()
    batch = beside_larger(images(*IMAGE, batch=1), 64, 96)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.isfinite().all() for y in model(batch).values())
    maps = model.to(torch.bfloat16)(batch.to(torch.bfloat16))
    assert all(y.isfinite().all() and y.dtype == torch.bfloat16 for y in maps.values())


def test_report() -> None:
    assert pyramid("none").report == [
        "left out, for they take no part: cls_token, norm, head",
        "windows of 2x3 patches: blocks 0",
        "whole images: blocks 1",
        "pos_embed: 3x5 -> those of each image, resampled as timm does",
    ]
    assert pyramid(SUM, global_blocks=0, window_size=(3, 5)).report[1:] == [
        "windows of 3x5 patches: blocks 0, 1",
        "learned in images: 3x5 -> those of each image, resampled as timm does",
        "table of offsets in windows: 5x9 as before (2 times)",
        "cpb in windows: 3x5 as before (2 times)",
        "rope_mixed in windows: a formula, evaluated at the places (2 times)",
    ]
    members = [{"name": "table", "resize": "clamp"}, {"name": "cpb", "pretrained_window_size": 4}]
    assert pyramid([*members, {"name": "table", "max_distance": 2}], global_blocks=2, image_grid=(4, 6)).report == [
        "left out, for they take no part: cls_token, norm, head, prefix_bias",
        "whole images: blocks 0, 1",
        "pos_embed: 3x5 -> 4x6, resampled as timm does",
        "table of offsets in images: 5x9 -> 7x11, resize=clamp (2 times)",
        "cpb in images: 4x4 as before (2 times)",
        "table of offsets in images: 5x5 as before (2 times)",
    ]


def test_what_is_refused() -> None:
    vit = swap(build("vit", img_size=32), "table")
    with refuses("model is a VisionTransformer, allowed is a VisionTransformer of timm after swap"):
        SimpleFeaturePyramid(build("vit"), global_blocks=1)
    with refuses("model is a Linear"):
        SimpleFeaturePyramid(nn.Linear(2, 2), global_blocks=1)
    with refuses("patches of 10x10 pixels, allowed are squares of 4, 8, 16, 32"):
        SimpleFeaturePyramid(swap(build("vit", img_size=40, patch_size=10), "table"), global_blocks=1)
    with refuses("drops patches.*patch_drop_rate=0"):
        SimpleFeaturePyramid(swap(build("vit", img_size=32, patch_drop_rate=0.5), "table"), global_blocks=1)
    for blocks in (4, -1, True, [0, 2], [1, 1], [-1]):
        with refuses(r"global_blocks=.* must be"):
            SimpleFeaturePyramid(vit, global_blocks=blocks)
    for name in ("window_size", "image_grid"):
        for value in (0, (3, 0), (3,), (1, 2, 3), 2.5, (2.5, 3)):
            with refuses(rf"{name}=.* must"):
                SimpleFeaturePyramid(vit, global_blocks=1, **{name: value})
    with refuses("out_channels=0 must"):
        SimpleFeaturePyramid(vit, 0, global_blocks=1)
    assert vit.cls_token is not None  # a refusal changes nothing
    model = pyramid("none").float()
    for shape in ((1, 2, 32, 32), (1, 5, 32, 32), (3, 32, 32)):
        with refuses(r"x has shape \(.*allowed is \(B, 3, H, W\)"):
            model(torch.zeros(shape))
    for last in ((4, 0, 8, 8), (0, 0, 0, 0), (0, 4, 8, 8)):  # top, left, bottom, right
        x = torch.ones(2, 4, 32, 32)
        x[1, 3] = 0
        x[1, 3, last[0] : last[2], last[1] : last[3]] = 1
        with refuses("the last channel of image 1 must be 1 in a rectangle in the upper left corner"):
            model(x)
