"""torchvision's detectors on timm backbones: losses, detections, weights of classifiers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import group_parameters
from torchvision.models import detection
from torchvision.models.detection.image_list import ImageList

import relpos2d
from relpos2d.models.detection import DETECTORS, Anchors, create_detector
from tests.models.detectors import SMALL, SWIN, SWINV2, VIT, detector, target
from tests.tolerances import assert_close

CLASSES = {
    "faster_rcnn": detection.FasterRCNN,
    "mask_rcnn": detection.MaskRCNN,
    "retinanet": detection.RetinaNet,
    "fcos": detection.FCOS,
}
IMAGES = [torch.rand(3, 50, 70), torch.rand(3, 90, 40)]


def targets(name: str) -> list[dict[str, torch.Tensor]]:
    """One image with two objects, one with none."""
    masks = name == "mask_rcnn"
    return [
        target([[5.0, 5, 30, 40], [20, 10, 60, 44]], [3, 1], (50, 70) if masks else None),
        target([], [], (90, 40) if masks else None),
    ]


@pytest.mark.parametrize("name", DETECTORS)
def test_h1_losses_are_finite_and_every_parameter_gets_a_gradient(name: str) -> None:
    model = detector(name).train()
    assert isinstance(model, CLASSES[name])
    losses = model(IMAGES, targets(name))
    total = sum(losses.values())
    total.backward()
    assert torch.isfinite(total)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", DETECTORS)
def test_h1_a_batch_without_any_object(name: str) -> None:
    model = detector(name).train()
    empty = [target([], [], (50, 70) if name == "mask_rcnn" else None), targets(name)[1]]
    total = sum(model(IMAGES, empty).values())
    total.backward()
    assert torch.isfinite(total)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", DETECTORS)
def test_detections_do_not_depend_on_the_padding(name: str) -> None:
    """An image in a batch is found as it is alone, in a batch padded to the same size."""
    model = detector(name, score_threshold=0.0, detections_per_image=7).double().eval()
    images = [image.double() for image in IMAGES]
    with torch.no_grad():
        both = model(images)
        # the same padded size, with something else beside it
        again = model([images[0], torch.rand(3, 96, 33, dtype=torch.float64)])
    assert len(both[0]["boxes"]) > 0
    assert torch.equal(again[0]["labels"], both[0]["labels"])
    for key in both[0].keys() - {"labels"}:
        assert_close(again[0][key], both[0][key])
    for found, image in zip(both, images, strict=True):
        height, width = image.shape[1:]
        assert found["boxes"].min() >= 0
        assert found["boxes"][:, 2].max() <= width
        assert found["boxes"][:, 3].max() <= height
        assert set(found["labels"].tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["fcos", "faster_rcnn"])
def test_anchors_stand_at_the_stride_of_their_level(name: str) -> None:
    """A level of half a place more than the image has: torchvision's own would stand at 53 pixels for a stride of 64."""
    model = detector(name)
    strides = list(model.backbone.strides.values())
    anchors: Anchors = model.anchor_generator if name == "fcos" else model.rpn.anchor_generator
    size = 5 * strides[-2]  # the last level has 3 places for 2.5
    grids = [-(-size // stride) for stride in strides]
    maps = [torch.zeros(1, 1, grid, grid) for grid in grids]
    (found,) = anchors(ImageList(torch.zeros(1, 4, size, size), [(size, size)]), maps)
    per_place = anchors.num_anchors_per_location()[-1]
    last = found[-(grids[-1] ** 2) * per_place :].unflatten(0, (grids[-1], grids[-1], per_place))
    centres = (last[..., :2] + last[..., 2:]) / 2
    assert centres[:, :, 0, 0].unique().tolist() == [step * strides[-1] for step in range(grids[-1])]


def test_images_are_resized_and_boxes_come_back() -> None:
    model = detector("fcos", min_size=(48, 64), max_size=80)
    model.train()
    sizes = set()
    for seed in range(8):
        torch.manual_seed(seed)
        batch, resized = model.transform([IMAGES[0]], targets("fcos")[:1])
        (size,) = batch.image_sizes
        sizes.add(size)
        scale = torch.tensor([size[1] / 70, size[0] / 50]).repeat(2)
        assert_close(resized[0]["boxes"][0], torch.tensor([5.0, 5, 30, 40]) * scale)
    assert len(sizes) == 2
    model.eval()
    batch, _ = model.transform([IMAGES[0]])
    assert min(batch.image_sizes[0]) == 57 or max(batch.image_sizes[0]) == 80
    untouched, _ = detector("fcos").transform([IMAGES[0]])
    assert untouched.image_sizes == [(50, 70)]
    assert untouched.tensors.shape[1] == 4


def saved(tmp_path: Path, backbone: dict[str, Any], encoding: str | None, suffix: str = ".safetensors") -> str:
    """The file of a classifier's weights, all of them drawn; encoding None: timm's own model."""
    options = dict(backbone)
    name = options.pop("name")
    model = timm.create_model(name.removeprefix("relpos2d_"), num_classes=7, **options)
    if encoding is not None:
        model = relpos2d.swap(model, encoding)
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    file = tmp_path / f"classifier{suffix}"
    if suffix == ".safetensors":
        save_file(model.state_dict(), file)
    else:
        torch.save({"state_dict": model.state_dict()}, file)
    saved_models[str(file)] = model.eval()
    return str(file)


saved_models: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("backbone", "native", "encoding"),
    [(SWIN, None, "table"), (SWINV2, None, "cpb"), (SWIN, "rope_mixed", "rope_mixed"), (VIT, None, "none")],
    ids=["swin", "swinv2", "ours", "vit"],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_classifier(backbone: Any, native: str | None, encoding: str, suffix: str, tmp_path: Path) -> None:
    file = saved(tmp_path, backbone, native, suffix)
    model = detector("retinanet", backbone, encoding, weights=file)
    body = model.backbone.pyramid.body
    theirs = saved_models[file].state_dict()
    mine = {key.replace("layers_", "layers."): value for key, value in body.state_dict().items()}
    if native is None:
        mine = {key.replace("encoding.", ""): value for key, value in mine.items()}
    compared = [key for key in theirs if key in mine and not key.startswith(("norm.", "head."))]
    assert len(compared) > 20
    for key in compared:
        assert torch.equal(mine[key], theirs[key]), key
    assert not set(mine) - set(theirs) - {key for key in mine if key.endswith("strength")}


def test_another_window_than_in_pretraining_is_reported(tmp_path: Path) -> None:
    file = saved(tmp_path, SWIN, None)
    for policy in ("timm", "bicubic", "clamp"):
        model = detector("retinanet", SWIN, {"name": "table", "resize": policy}, weights=file, window_size=6)
        assert f"table of offsets: 7x7 -> 11x11, resize={policy} (4 times)" in model.report
        assert "window: 4x4 -> 6x6 (4 times)" in model.report
    encoding = model.backbone.pyramid.body.layers_0.blocks[0].attn.encoding
    table = encoding.bias(relpos2d.Grid(6, 6), relpos2d.Grid(6, 6))
    assert_close(
        table[:, 0, 3], encoding.relative_position_bias_table.unflatten(0, (7, 7))[3, 0]
    )  # clamp keeps offsets


def test_a_continuous_bias_keeps_the_coordinates_of_pretraining(tmp_path: Path) -> None:
    """Offsets that both windows have get the bias they had (arXiv:2111.09883), also in a model that a checkpoint will fill."""
    file = saved(tmp_path, SWINV2, None)
    grid = relpos2d.Grid(4, 4)
    before = relpos2d.swap(saved_models[file], "cpb").layers[0].blocks[0].attn.encoding.bias(grid, grid)
    for options in ({}, {"load_pretrained": False}):
        model = detector("retinanet", SWINV2, "cpb", weights=file, window_size=8, **options)
        encoding = model.backbone.pyramid.body.layers_0.blocks[0].attn.encoding
        assert encoding.window_size == (8, 8)
        encoding.load_state_dict(saved_models[file].layers[0].blocks[0].attn.encoding.state_dict())
        assert_close(encoding.bias(grid, grid), before)


def test_a_continuous_bias_of_a_plain_vit_keeps_them_too(tmp_path: Path) -> None:
    file = saved(tmp_path, VIT, "cpb")
    window, grid = relpos2d.Grid(4, 4), relpos2d.Grid(8, 8)
    before = saved_models[file].blocks[0].attn.encoding.bias(grid, grid)
    for options in ({}, {"load_pretrained": False}):
        model = detector("retinanet", VIT, "cpb", weights=file, window_size=4, global_blocks=1, **options)
        encoding = model.backbone.pyramid.body.blocks[0].attn.encoding
        assert encoding.window_size == (4, 4)
        encoding.cpb_mlp.load_state_dict(saved_models[file].blocks[0].attn.encoding.cpb_mlp.state_dict())
        in_window = before.unflatten(-2, (8, 8)).unflatten(-1, (8, 8))[..., :4, :4, :4, :4].flatten(-2).flatten(-3, -2)
        assert_close(encoding.bias(window, window), in_window)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, SWIN, None)
    wider = {**SWIN, "embed_dim": 48}
    with pytest.raises(ValueError, match=r"are of another backbone or encoding: .*size mismatch"):
        detector("fcos", wider, weights=file)
    with pytest.raises(ValueError, match=r"are of another backbone or encoding: .*Missing key"):
        detector("fcos", {**SWIN, "depths": [2, 3]}, weights=file)
    with pytest.raises(ValueError, match=r"none of its .* names"):
        detector("fcos", "resnet10t", "none", weights=file)
    ours = saved(tmp_path, SWIN, "rope_mixed")
    with pytest.raises(ValueError, match="are of another backbone or encoding"):
        detector("fcos", SWIN, "table", weights=ours)
    with pytest.raises(ValueError, match="no such file"):
        detector("fcos", weights=str(tmp_path / "none.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match="no readable weights"):
        detector("fcos", weights=str(tmp_path / "text.pth"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("retinanett", {}, "name='retinanett' must be one of faster_rcnn, fcos, mask_rcnn, retinanet"),
        ("fcos", {"num_classes": 1}, "num_classes=1 must be at least 2"),
        ("fcos", {"anchor_scale": 4.0}, "anchor_scale=4.0 is for faster_rcnn, mask_rcnn, retinanet, not for fcos"),
        ("retinanet", {"mask_channels": 16}, "mask_channels=16 is for mask_rcnn"),
        ("faster_rcnn", {"num_proposals": 0}, "num_proposals=0 must be greater than 0"),
        ("fcos", {"out_channels": 48}, "out_channels=48 must be a multiple of 32 for fcos"),
        ("fcos", {"min_size": None, "max_size": 100}, "max_size=100 must be at least min_size=None"),
        ("fcos", {"min_size": 200, "max_size": 100}, "max_size=100 must be at least min_size=200"),
        ("fcos", {"backbone": "swin_tinny"}, "backbone 'swin_tinny' is no model of timm"),
        ("fcos", {"backbone": {"depths": [1]}}, "backbone None is no model of timm"),
        ("fcos", {"backbone": "resnet10t"}, "resnet10t has no attention that is known here"),
        ("fcos", {"absolute": "remove"}, "absolute is for a plain ViT"),
        ("fcos", {"global_blocks": 2}, "global_blocks is for a plain ViT"),
        ("fcos", {"backbone": VIT, "encoding": "none", "out_indices": (0, 1)}, "a plain ViT .* has none"),
        ("fcos", {"backbone": {**SWIN, "depthss": [1]}}, "depthss"),
        ("fcos", {"out_indices": (0, 1, 2)}, r"backbone .*: "),
        ("faster_rcnn", {"out_indices": (0, 2)}, r"out_indices=\(0, 2\) must be stages one after the other"),
        ("fcos", {"out_indices": (1, 0)}, "must be stages one after the other"),
        ("fcos", {"out_indices": (-1,)}, "must be stages one after the other"),
        ("fcos", {"out_indices": ()}, "must be stages one after the other"),
        ("fcos", {"backbone": {"name": "resnet18", "output_stride": 16}, "encoding": None}, r"strides \[8, 16, 16\]"),
        ("fcos", {"backbone": {**SWIN, "in_chans": 4}}, "in_chans=4 of .*: images have 3 channels"),
        ("fcos", {"backbone": VIT, "encoding": "none", "window_size": 0}, r"window_size=\(0, 0\) must hold whole"),
        ("retinanet", {"out_channels": -32}, "out_channels=-32 must hold whole numbers of at least 1"),
        ("fcos", {"min_size": 0}, "min_size=0 must hold whole numbers"),
        ("fcos", {"min_size": ()}, r"min_size=\(\) must be a size"),
        ("fcos", {"detections_per_image": 0}, "detections_per_image=0 must hold whole numbers"),
        ("fcos", {"score_threshold": 5.0}, "score_threshold=5.0 must be between 0 and 1"),
        ("fcos", {"nms_threshold": -0.1}, "nms_threshold=-0.1 must be between 0 and 1"),
        ("fcos", {"weights": "a.pth", "backbone": {**SWIN, "pretrained": True}}, "one of the two"),
        ("fcos", {"encoding": "tabel"}, "tabel"),
    ],
)
def test_bad_input(name: str, options: dict[str, Any], message: str) -> None:
    arguments = {"num_classes": 4, "backbone": SWIN, "encoding": "table", **SMALL.get(name, {}), **options}
    with pytest.raises(ValueError, match=message):
        create_detector(name, **arguments)


def test_bad_images_and_targets() -> None:
    model = detector("mask_rcnn", min_size=32).train()
    good = {**targets("mask_rcnn")[0]}
    cases: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (IMAGES[0], {"labels": torch.tensor([0, 1])}, "target 0 has labels from 0 to 1, allowed are 1 to 3"),
        (IMAGES[0], {"labels": torch.tensor([1, 4])}, "target 0 has labels from 1 to 4, allowed are 1 to 3"),
        (IMAGES[0], {"labels": torch.tensor([1])}, r"target 0 has 2 boxes and labels of shape \(1,\)"),
        (IMAGES[0], {"masks": torch.zeros(2, 70, 50)}, r"target 0: masks have shape \(2, 70, 50\)"),
        (torch.rand(4, 50, 70), {}, r"image 0 has shape \(4, 50, 70\), allowed is \(3, H, W\)"),
    ]
    for image, changed, message in cases:
        with pytest.raises(ValueError, match=message):
            model([image], [{**good, **changed}])
    with pytest.raises(ValueError, match=r"image of 1x700 pixels is too long: .* max_size=53"):
        model.eval()([torch.rand(3, 1, 700)])


@pytest.mark.parametrize("name", ["faster_rcnn", "mask_rcnn"])
def test_regions_are_pooled_at_the_strides_of_the_pyramid(name: str) -> None:
    """Of a thin image too, of which much is padding: torchvision takes 40 rows for the 64 of the maps, and remembers that."""
    model = detector(name)
    levels = list(model.backbone.strides.items())[:-1]
    # maps whose values are the columns of the image
    maps = {key: (torch.arange(64 // step) * step).float().expand(1, 1, 64 // step, 64 // step) for key, step in levels}
    heads = (model.roi_heads.box_roi_pool, *([model.roi_heads.mask_roi_pool] if name == "mask_rcnn" else []))
    for pool in heads:
        for shape in [(40, 64), (64, 64)]:
            assert_close(pool(maps, [torch.tensor([[8.0, 4, 40, 28]])], [shape]).mean(), torch.tensor(24.0))


@pytest.mark.parametrize("name", DETECTORS)
def test_boxes_and_scores_are_not_rounded_to_bfloat16(name: str) -> None:
    model = detector(name, score_threshold=0.0).eval()
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = model([IMAGES[0]])
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert not torch.equal(found["boxes"], found["boxes"].bfloat16().float())
    assert not torch.equal(found["scores"], found["scores"].bfloat16().float())


def test_groups_of_parameters_as_timm_wants_them() -> None:
    model = detector("fcos", SWIN, "table")
    coarse = group_parameters(model, model.group_matcher(coarse=True))
    assert len(coarse) == 4  # stem, two stages, the rest
    assert all(".patch_embed." in name for name in coarse[0])
    assert all(".layers_1." in name for name in coarse[2])
    assert all("body" not in name for name in coarse[3])
    fine = group_parameters(model, model.group_matcher())
    assert len(fine) == 6
    assert any("downsample" in name for name in fine[3])
    assert {name for name in model.no_weight_decay() if "table" in name} == {
        f"backbone.pyramid.body.layers_{stage}.blocks.{block}.attn.encoding.relative_position_bias_table"
        for stage in range(2)
        for block in range(2)
    }


def test_batch_norms_of_a_pretrained_cnn_stay(tmp_path: Path) -> None:
    file = tmp_path / "cnn.pth"
    torch.save(timm.create_model("resnet10t").state_dict(), file)
    model = detector("retinanet", "resnet10t", "none", weights=str(file)).train()
    before = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    model(IMAGES, targets("retinanet"))
    assert before
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert model.report == ["batch norms: statistics and weights stay those of pretraining"]
