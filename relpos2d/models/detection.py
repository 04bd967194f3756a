"""torchvision's detectors on timm backbones with any encoding: Faster and Mask R-CNN, RetinaNet, FCOS.

Papers: arXiv:1506.01497, 1703.06870, 1708.02002, 1904.01355; the pyramid is 1612.03144, that of a plain ViT 2203.16527.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.layers import freeze_batch_norm_2d
from timm.models import load_state_dict
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from relpos2d.backbones.host import Spec, check_sizes, find_part, position_parameters
from relpos2d.backbones.registry import SOURCES, feature_weights
from relpos2d.backbones.resize import set_windows
from relpos2d.backbones.swap import FAMILIES, swap
from relpos2d.backbones.swin import StageHost, SwinFamily
from relpos2d.backbones.vit import VitFamily
from relpos2d.encoding import Encoding
from relpos2d.models.plain_vit import STRIDES, SimpleFeaturePyramid
from relpos2d.models.pyramid import ExtraLevels, FeaturePyramid

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DETECTORS = ("faster_rcnn", "fcos", "mask_rcnn", "retinanet")
TWO_STAGES = ("faster_rcnn", "mask_rcnn")

#: options that only some detectors have
OPTIONS_OF = {
    "anchor_scale": ("faster_rcnn", "mask_rcnn", "retinanet"),
    "num_head_convs": ("fcos",),
    "num_proposals": TWO_STAGES,
    "box_channels": TWO_STAGES,
    "mask_channels": ("mask_rcnn",),
}


class Detector:
    """What our detectors have beside torchvision's: how timm's optimizers should treat their parameters, and a report.

    Attributes:
        report: a line for each thing that has another size than in pretraining: from what to what, and by which rule.
    """

    report: list[str]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that must not decay: those of the encodings, and the backbone's embedding."""
        model = cast(nn.Module, self)
        embeddings = {name for name, _ in model.named_parameters() if name.endswith((".pos_embed", ".logit_scale"))}
        return position_parameters(model) | embeddings

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[float, ...]]:
        """As timm's models have it: the stem, then the stages of the backbone (or its blocks), then all that is on top."""
        places = {f"backbone.{name}": place for name, place in cast(Any, self).backbone.stages()}

        def group(name: str) -> tuple[float, ...]:
            place = places.get(name)
            if place is None:
                return (float("inf"),)
            if place == "stem":
                return (0.0,)
            stage, block = (float(number) for number in place.split("."))
            return (1.0, stage) if coarse else (1.0, stage, block)

        return group


class FasterRCNN(Detector, detection.FasterRCNN):
    """torchvision's FasterRCNN on one of our pyramids."""


class MaskRCNN(Detector, detection.MaskRCNN):
    """torchvision's MaskRCNN on one of our pyramids."""


class RetinaNet(Detector, detection.RetinaNet):
    """torchvision's RetinaNet on one of our pyramids."""


class FCOS(Detector, detection.FCOS):
    """torchvision's FCOS on one of our pyramids."""


class Batched(GeneralizedRCNNTransform):
    """torchvision's way from images of any size to a batch, which here also says where there are images.

    The batch has one channel more, 1 in images and 0 in the padding. Without `min_size` images keep their size.

    Raises:
        ValueError: on being called, with images or targets that torchvision would misread or refuse somewhere inside.
    """

    def __init__(
        self,
        min_size: int | Sequence[int] | None,
        max_size: int | None,
        mean: Sequence[float],
        std: Sequence[float],
        size_divisible: int,
        num_classes: int,
    ):
        self.num_classes = num_classes
        sizes = min_size if isinstance(min_size, Sequence) else (min_size,)
        super().__init__(sizes, max_size, list(mean), list(std), size_divisible)  # type: ignore[arg-type]

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[ImageList, list[dict[str, Tensor]] | None]:
        for index, image in enumerate(images):
            if image.ndim == 3 and image.shape[0] not in (1, 3):  # a grey one is normalised to three channels
                raise ValueError(f"image {index} has shape {tuple(image.shape)}, allowed is (3, H, W)")
        for index, (image, target) in enumerate(zip(images, targets or (), strict=False)):
            self._check(index, image, target)
        return super().forward(images, targets)

    def _check(self, index: int, image: Tensor, target: dict[str, Tensor]) -> None:
        boxes, labels, masks = target["boxes"], target["labels"], target.get("masks")
        if labels.shape != boxes.shape[:1]:
            raise ValueError(f"target {index} has {len(boxes)} boxes and labels of shape {tuple(labels.shape)}")
        if masks is not None and masks.shape != (len(boxes), *image.shape[-2:]):
            raise ValueError(
                f"target {index}: masks have shape {tuple(masks.shape)}, allowed is that of its boxes and image, "
                f"{(len(boxes), *image.shape[-2:])}"
            )
        if bool(((labels < 1) | (labels >= self.num_classes)).any()):
            raise ValueError(
                f"target {index} has labels from {labels.min()} to {labels.max()}, allowed are 1 to {self.num_classes - 1} "
                f"(num_classes={self.num_classes}; 0 is the background)"
            )

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.min_size[0] is None:
            return image, target
        shorter, longer = sorted(image.shape[-2:])
        if shorter * self.max_size < longer:
            raise ValueError(
                f"an image of {image.shape[-2]}x{image.shape[-1]} pixels is too long: its shorter side would vanish at "
                f"max_size={self.max_size}"
            )
        masks = None if target is None else target.get("masks")
        if target is not None and masks is not None and not len(masks):  # which torch does not resize
            image, rest = super().resize(image, {key: value for key, value in target.items() if key != "masks"})
            return image, {**(rest or {}), "masks": masks.new_zeros((0, *image.shape[-2:]))}
        return super().resize(image, target)

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        return super().batch_images([torch.cat((x, torch.ones_like(x[:1]))) for x in images], size_divisible)


class Anchors(AnchorGenerator):
    """torchvision's anchors, as far from one another as the places of a map are.

    torchvision divides the size of the batch by that of the map, which is less wherever a level has rounded its size up.
    """

    def __init__(self, sizes: Sequence[Sequence[float]], ratios: Sequence[float], strides: Sequence[int]):
        super().__init__(tuple(map(tuple, sizes)), (tuple(ratios),) * len(sizes))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        first = feature_maps[0]
        self.set_cell_anchors(torch.promote_types(first.dtype, torch.float32), first.device)
        steps = [[torch.tensor(stride, device=first.device)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors([list(x.shape[-2:]) for x in feature_maps], steps))
        return [anchors] * len(image_list.image_sizes)


def roi_pool(strides: Mapping[str, int], output_size: int) -> MultiScaleRoIAlign:
    """torchvision's pooling of regions from levels whose strides are known.

    torchvision infers them from the first batch, for good, and wrongly where the padding is much of a small or long image.
    """
    pool = MultiScaleRoIAlign(list(strides), output_size, sampling_ratio=2)
    steps = list(strides.values())
    pool.scales = [1 / step for step in steps]
    pool.map_levels = LevelMapper(
        steps[0].bit_length() - 1, steps[-1].bit_length() - 1, pool.canonical_scale, pool.canonical_level
    )
    return pool


def at_least_float32(head: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook for heads under autocast: torchvision decodes boxes in the dtype of a head, and in bfloat16 there are four
    pixels from 512 to the next number."""
    if isinstance(output, Tensor):
        return output.to(torch.promote_types(output.dtype, torch.float32))
    if isinstance(output, dict):
        return {key: at_least_float32(head, given, value) for key, value in output.items()}
    return type(output)(at_least_float32(head, given, value) for value in output)


def create_detector(
    name: str,
    num_classes: int,
    backbone: str | Mapping[str, Any],
    encoding: Spec | None = None,
    *,
    weights: str | None = None,
    absolute: str | None = None,
    window_size: int | tuple[int, int] | None = None,
    global_blocks: int | tuple[int, ...] | None = None,
    out_indices: tuple[int, ...] | None = None,
    out_channels: int = 256,
    min_size: int | tuple[int, ...] | None = 800,
    max_size: int | None = None,
    score_threshold: float = 0.05,
    nms_threshold: float | None = None,
    detections_per_image: int = 100,
    anchor_scale: float | None = None,
    num_head_convs: int | None = None,
    num_proposals: int | None = None,
    box_channels: int | None = None,
    mask_channels: int | None = None,
    grad_checkpointing: bool = False,
    load_pretrained: bool = True,
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
) -> Any:
    """One of torchvision's detectors on a timm backbone with an encoding.

    It takes a list of images (3, H, W) in 0..1 and, in training, a list of targets (`boxes` (N, 4) as x1, y1, x2, y2 in pixels,
    `labels` (N,) from 1, and for Mask R-CNN `masks` (N, H, W)), and returns losses by name, or in evaluation a list of `boxes`,
    `labels`, `scores` (and `masks`). In windows and in the pyramid, padding never reaches a token of an image.

    Args:
        name: faster_rcnn, fcos, mask_rcnn or retinanet.
        num_classes: the background, which is 0, counts.
        backbone: a timm model, or a mapping of its `name` and options of its constructor: as it was in pretraining where there are
            weights. A Swin or a CNN gets an FPN, a plain ViT the simple pyramid of ViTDet.
        encoding: as in swap(); None: as timm has it. A CNN has none.
        weights: the file of a classifier's weights, of timm or of a swapped model; for timm's own give `pretrained: true` to the
            backbone. How encodings are read in other windows is said by their option `resize`.
        absolute: of a plain ViT: what becomes of its embedding, as in swap().
        window_size: of windows in detection, for all stages or blocks; None: that of pretraining (a plain ViT: 14).
        global_blocks: of a plain ViT: how many blocks, or which, attend to the whole image (default 4); the others have windows.
        out_indices: which stages are used, one after the other; default: all for two stages, all but the first for retinanet and
            fcos.
        out_channels: of the pyramid.
        min_size: the shorter side of an image in pixels; in training one of several is drawn, in evaluation it is the last;
            None: images keep their size.
        max_size: the longer side at most; None: 5/3 of min_size, as 1333 to 800.
        score_threshold: detections below are dropped.
        nms_threshold: the IoU above which the weaker of two boxes of a class is dropped (0.5; fcos: 0.6).
        detections_per_image: at most.
        anchor_scale: side of the smallest anchor of a level, in strides of it (8; retinanet: 4).
        num_head_convs: of fcos (4).
        num_proposals: that reach the second stage (1000; in training twice as many).
        box_channels: hidden channels of the second stage (1024).
        mask_channels: of the mask branch (256).
        grad_checkpointing: compute the blocks again in the backward pass, for less memory.
        load_pretrained: False builds the same model without reading `weights` or what `pretrained` names.
        mean, std: by which images are normalised.

    Returns:
        A torchvision FasterRCNN, FCOS, MaskRCNN or RetinaNet, with `report`, `no_weight_decay()` and `group_matcher()`.

    Raises:
        ValueError: an unknown detector or backbone, options that do not go together, weights that do not fit.
    """
    if name not in DETECTORS:
        raise ValueError(f"create_detector: name={name!r} must be one of {', '.join(DETECTORS)}")
    if num_classes < 2:
        raise ValueError(f"create_detector: num_classes={num_classes} must be at least 2, background and a class")
    own = {
        "anchor_scale": anchor_scale,
        "num_head_convs": num_head_convs,
        "num_proposals": num_proposals,
        "box_channels": box_channels,
        "mask_channels": mask_channels,
    }
    for option, value in own.items():
        if value is not None and name not in OPTIONS_OF[option]:
            raise ValueError(
                f"create_detector: {option}={value} is for {', '.join(OPTIONS_OF[option])}, not for {name}"
            )
        if value is not None and value <= 0:
            raise ValueError(f"create_detector: {option}={value} must be greater than 0")
    if name == "fcos" and out_channels % 32:
        raise ValueError(
            f"create_detector: out_channels={out_channels} must be a multiple of 32 for fcos, for its norms"
        )
    check_sizes("create_detector: out_channels", out_channels)
    check_sizes("create_detector: detections_per_image", detections_per_image)
    check_sizes("create_detector: min_size", min_size)
    if isinstance(min_size, Sequence) and not min_size:
        raise ValueError("create_detector: min_size=() must be a size, sizes, or None for images that keep theirs")
    for option, value in (("score_threshold", score_threshold), ("nms_threshold", nms_threshold)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"create_detector: {option}={value} must be between 0 and 1")
    shorter = [size for size in (min_size if isinstance(min_size, Sequence) else [min_size]) if size is not None]
    if max_size is not None and (not shorter or max_size < max(shorter)):
        raise ValueError(
            f"create_detector: max_size={max_size} must be at least min_size={min_size}, and has no use without"
        )

    two_stages = name in TWO_STAGES
    pyramid = create_pyramid(
        backbone,
        encoding,
        weights=weights,
        absolute=absolute,
        window_size=window_size,
        global_blocks=global_blocks,
        out_indices=out_indices,
        skip_first=not two_stages,
        out_channels=out_channels,
        extra="pool" if two_stages else "convolutions",
        grad_checkpointing=grad_checkpointing,
        load_pretrained=load_pretrained,
    )
    strides = list(pyramid.strides.values())
    size_divisible = max(strides[: -1 if two_stages else -2])
    if max_size is None and shorter:
        max_size = max(shorter) * 5 // 3
    scale = anchor_scale or (4.0 if name == "retinanet" else 8.0)
    nms = nms_threshold if nms_threshold is not None else 0.6 if name == "fcos" else 0.5
    model: Any
    if name == "fcos":
        model = FCOS(
            pyramid,
            num_classes,
            anchor_generator=Anchors([[stride] for stride in strides], [1.0], strides),
            head=FCOSHead(out_channels, 1, num_classes, num_head_convs or 4),
            score_thresh=score_threshold,
            nms_thresh=nms,
            detections_per_img=detections_per_image,
        )
    elif name == "retinanet":
        sizes = [[stride * scale * 2 ** (third / 3) for third in range(3)] for stride in strides]
        model = RetinaNet(
            pyramid,
            num_classes,
            anchor_generator=Anchors(sizes, [0.5, 1.0, 2.0], strides),
            score_thresh=score_threshold,
            nms_thresh=nms,
            detections_per_img=detections_per_image,
        )
    else:
        levels = dict(list(pyramid.strides.items())[:-1])
        proposals = num_proposals or 1000
        hidden = box_channels or 1024
        options: dict[str, Any] = {
            "rpn_anchor_generator": Anchors([[stride * scale] for stride in strides], [0.5, 1.0, 2.0], strides),
            "rpn_pre_nms_top_n_train": 2 * proposals,
            "rpn_post_nms_top_n_train": 2 * proposals,
            "rpn_pre_nms_top_n_test": proposals,
            "rpn_post_nms_top_n_test": proposals,
            "box_roi_pool": roi_pool(levels, output_size=7),
            "box_head": detection.faster_rcnn.TwoMLPHead(out_channels * 7**2, hidden),
            "box_predictor": detection.faster_rcnn.FastRCNNPredictor(hidden, num_classes),
            "box_score_thresh": score_threshold,
            "box_nms_thresh": nms,
            "box_detections_per_img": detections_per_image,
        }
        if name == "mask_rcnn":
            channels = mask_channels or 256
            options |= {
                "mask_roi_pool": roi_pool(levels, output_size=14),
                "mask_head": MaskRCNNHeads(out_channels, (channels,) * 4, 1),
                "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes),
            }
        model = (MaskRCNN if name == "mask_rcnn" else FasterRCNN)(pyramid, None, **options)
    heads = (model.rpn.head, model.roi_heads.box_predictor) if two_stages else (model.head,)
    for head in heads:
        head.register_forward_hook(at_least_float32)
    model.transform = Batched(min_size, max_size, mean, std, size_divisible, num_classes)
    model.report = pyramid.report
    return model


def create_pyramid(
    backbone: str | Mapping[str, Any],
    encoding: Spec | None,
    *,
    weights: str | None,
    absolute: str | None,
    window_size: int | tuple[int, int] | None,
    global_blocks: int | tuple[int, ...] | None,
    out_indices: tuple[int, ...] | None,
    skip_first: bool,
    out_channels: int,
    extra: str,
    grad_checkpointing: bool,
    load_pretrained: bool,
) -> Any:
    """The backbone of create_detector: a FeaturePyramid or SimpleFeaturePyramid with further levels."""
    given = {"name": backbone} if isinstance(backbone, str) else dict(backbone)
    who = given.pop("name", None)
    if not isinstance(who, str) or not timm.is_model(who):
        raise ValueError(
            f"create_detector: backbone {who!r} is no model of timm; relpos2d_* and timm.list_models() are"
        )
    if given.get("in_chans", 3) != 3:
        raise ValueError(f"create_detector: in_chans={given['in_chans']} of {who}: images have 3 channels")
    if out_indices is not None and (
        not out_indices or list(out_indices) != list(range(max(out_indices[0], 0), out_indices[-1] + 1))
    ):
        raise ValueError(f"create_detector: out_indices={out_indices} must be stages one after the other, as (1, 2, 3)")
    family = family_of(who)
    pretrained = bool(given.get("pretrained"))
    if weights is not None and pretrained:
        raise ValueError(f"create_detector: weights={weights!r} and pretrained=True of {who}: one of the two")
    knows_windows = pretrained or weights is not None
    if not load_pretrained:
        weights = None
        given.pop("pretrained", None)
    if family is not VitFamily and (absolute is not None or global_blocks is not None):
        option = "absolute" if absolute is not None else "global_blocks"
        raise ValueError(f"create_detector: {option} is for a plain ViT, backbone is {who}")
    members = encoding if isinstance(encoding, list | tuple) else [encoding]
    has_encoding = any(member not in (None, "none", {"name": "none"}) for member in members)
    if family is None and (window_size is not None or has_encoding):
        raise ValueError(
            f"create_detector: {who} has no attention that is known here; allowed: encoding='none', no window_size"
        )
    name = who.removeprefix("relpos2d_")
    native = SOURCES[who.partition(".")[0]][1] if who.startswith("relpos2d_") else None
    if encoding is None and family is not None:
        encoding = native or family_native(family)
    try:
        if family is VitFamily:
            if out_indices is not None:
                raise ValueError(f"create_detector: out_indices is for stages, a plain ViT such as {who} has none")
            body: Any = timm.create_model(name, num_classes=0, dynamic_img_size=True, **given)
            body = swap(body, cast(Any, encoding), absolute=absolute)
            if weights is not None:
                load_classifier(body, weights)
            keep_pretrained_coordinates(body, known=knows_windows)
            body.set_grad_checkpointing(grad_checkpointing)
            plain = SimpleFeaturePyramid(
                body,
                out_channels,
                window_size=14 if window_size is None else window_size,
                global_blocks=min(4, len(body.blocks)) if global_blocks is None else global_blocks,
                strides=STRIDES[1:] if skip_first else STRIDES,
            )
            return ExtraLevels(plain, extra)
        stages = out_indices if out_indices is not None else default_stages(name, given, skip_first)
        options: dict[str, Any] = {"strict_img_size": False} if family is not None else {}
        body = timm.create_model(name, features_only=True, out_indices=stages, **options, **given)
    except (
        AssertionError,
        TypeError,
        RuntimeError,
        IndexError,
    ) as error:  # timm's ways of saying that options do not fit
        raise ValueError(f"create_detector: backbone {who} with {given}: {error}") from error
    report: list[str] = []
    if family is not None:
        body = swap(body, cast(Any, encoding), mask_padding=True)
    if weights is not None:
        load_classifier(body, weights)
    if family is not None:
        keep_pretrained_coordinates(body, known=knows_windows)
        report = set_windows(body, window_size)
        for module in body.modules():
            if isinstance(module, StageHost):
                module.grad_checkpointing = grad_checkpointing
    else:
        body.set_grad_checkpointing(grad_checkpointing)
        if knows_windows:
            body = freeze_batch_norm_2d(body)
            report = ["batch norms: statistics and weights stay those of pretraining"]
    return ExtraLevels(FeaturePyramid(body, out_channels, report), extra)


@functools.cache
def family_of(name: str) -> Any:
    """How a timm model can be swapped; None for one that cannot, as a CNN."""
    with torch.device("meta"):
        model = timm.create_model(name.removeprefix("relpos2d_").partition(".")[0])
    return next((family for family in FAMILIES if family.matches(model)), None)


def family_native(family: Any) -> str:
    """The encoding that leaves a family as timm has it."""
    return family.attention[1].native_encoding if issubclass(family, SwinFamily) else "none"


def default_stages(name: str, options: Mapping[str, Any], skip_first: bool) -> tuple[int, ...]:
    """The stages from stride 4 on, or from 8 on."""
    with torch.device("meta"):
        info: Any = timm.create_model(
            name.partition(".")[0], features_only=True, **{**options, "pretrained": False}
        ).feature_info
    steps = [entry["reduction"] for entry in info.info]
    first = next((index for index, step in enumerate(steps) if step >= 4), 0)
    return tuple(range(first + int(skip_first and len(steps) - first > 1), len(steps)))


def load_classifier(body: nn.Module, file: str) -> None:
    """The weights of a classifier but for its head; those of native positions go to the encoding that has taken their place.

    Raises:
        ValueError: no readable weights, or those of another backbone or encoding.
    """
    if not Path(file).is_file():
        raise ValueError(
            f"create_detector: weights={file!r}: no such file; a .safetensors or .pth of weights is wanted"
        )
    try:
        found = load_state_dict(file)
    except Exception as error:  # torch, pickle and safetensors have many ways of saying so
        raise ValueError(f"create_detector: weights={file!r}: no readable weights ({error})") from error
    chosen = feature_weights(found, body)
    if not chosen:
        raise ValueError(
            f"create_detector: weights={file!r}: none of its {len(found)} names ({', '.join(list(found)[:3])}, ...) is one of "
            f"the backbone ({', '.join(list(body.state_dict())[:3])}, ...)"
        )
    try:
        body.load_state_dict(chosen)
    except RuntimeError as error:
        wrong = [line.strip() for line in str(error).splitlines()[1:]]
        told = " ".join(wrong[:2]) + (f" ... ({len(wrong)} in all)" if len(wrong) > 2 else "")
        raise ValueError(f"create_detector: weights={file!r} are of another backbone or encoding: {told}") from error


def keep_pretrained_coordinates(body: nn.Module, known: bool) -> None:
    """A continuous bias that was trained in windows of one size is read at the same coordinates in larger ones."""
    for module in body.modules():
        part = find_part(module, "cpb") if known and isinstance(module, Encoding) else None
        if part is not None and not part[1].pretrained_window_size[0]:  # type: ignore[union-attr, index]
            part[1].pretrained_window_size = tuple(part[1].window_size)  # type: ignore[union-attr, arg-type]


__all__ = ["DETECTORS", "FCOS", "OPTIONS_OF", "FasterRCNN", "MaskRCNN", "RetinaNet", "create_detector"]
