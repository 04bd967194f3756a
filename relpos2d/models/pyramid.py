"""Feature pyramids for detectors: the stages of a timm backbone through an FPN (arXiv:1612.03144), padding kept out."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from timm.layers import Format
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

from relpos2d.backbones.swin import StageHost, hidden_padding


class FeaturePyramid(nn.Module):
    """Maps of equally many channels at several strides, for a detector of torchvision.

    Where the backbone is a swapped Swin, the padding of a batch reaches no token of an image: an image gives the same maps alone
    as beside a larger one. Convolutional backbones see the zeros around an image, as everywhere.

    Args:
        body: timm's feature extractor (`features_only=True`).
        out_channels: of each map.
        report: what of the backbone has another size than in pretraining.

    Raises:
        ValueError: stages whose strides are not each twice the one before.

    Attributes:
        strides: pixels from one place of a map to the next, by the names of the maps (p2: 4, p3: 8, ...).
    """

    def __init__(self, body: Any, out_channels: int, report: Sequence[str] = ()):
        super().__init__()
        self.body, self.out_channels, self.report = body, out_channels, list(report)
        channels, steps = body.feature_info.channels(), body.feature_info.reduction()
        if any(below != 2 * above for above, below in itertools.pairwise(steps)):
            raise ValueError(f"FeaturePyramid: the stages have strides {steps}, each must be twice the one before")
        self.channels_last = body.output_fmt == Format.NHWC
        self.hides_padding = any(isinstance(module, StageHost) for module in body.modules())
        # what stands behind a stage of a transformer is a sum of all its blocks, of any size
        self.norms = nn.ModuleList(nn.LayerNorm(c) if self.channels_last else nn.Identity() for c in channels)
        self.fpn = FeaturePyramidNetwork(channels, out_channels)
        self.strides = {f"p{stride.bit_length() - 1}": stride for stride in steps}

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """(B, C, H, W), or one channel more that is 1 in images and 0 in the padding of the batch -> maps by name.

        H and W are multiples of the largest stride of the backbone.
        """
        x, valid = split_padding(x)
        valid = valid if self.hides_padding else None
        with hidden_padding(self.body, valid):
            maps = self.body(x)
        levels = []
        for x_level, norm, stride in zip(maps, self.norms, self.strides.values(), strict=True):
            if self.channels_last:
                x_level = norm(x_level).permute(0, 3, 1, 2)
            levels.append(without_padding(x_level, valid, stride))
        return OrderedDict(zip(self.strides, self.top_down(levels, valid), strict=True))

    def top_down(self, levels: list[Tensor], valid: Tensor | None) -> list[Tensor]:
        """What torchvision's FPN computes, with zeros in the padding before and after each 3x3 convolution."""
        strides = list(self.strides.values())
        found: list[Tensor] = []
        above: Tensor | None = None
        for index in reversed(range(len(levels))):
            inner = self.fpn.inner_blocks[index](levels[index])
            if above is not None:
                inner = inner + F.interpolate(above, size=inner.shape[-2:], mode="nearest")
            above = without_padding(inner, valid, strides[index])
            found.insert(0, without_padding(self.fpn.layer_blocks[index](above), valid, strides[index]))
        return found

    def stages(self) -> Iterator[tuple[str, str]]:
        """Names of the backbone's parameters, each with what it belongs to: "stem", or a stage and a block of it: "2.1"."""
        stage = -1
        for child, module in self.body.named_children():
            if is_stage(child):
                stage += 1
            for name, _ in module.named_parameters():
                yield f"body.{child}.{name}", "stem" if stage < 0 else f"{stage}.{block_of(name)}"


class ExtraLevels(nn.Module):
    """A pyramid with the coarser levels that a detector wants.

    Args:
        pyramid: FeaturePyramid or SimpleFeaturePyramid.
        kind: "pool" is every second place of the last level (Faster R-CNN), "convolutions" are two levels (RetinaNet, FCOS).
    """

    def __init__(self, pyramid: Any, kind: str):
        super().__init__()
        self.pyramid, self.out_channels, self.report = pyramid, pyramid.out_channels, pyramid.report
        self.convolutions = LastLevelP6P7(self.out_channels, self.out_channels) if kind == "convolutions" else None
        self.strides = dict(pyramid.strides)
        for _ in range(1 if self.convolutions is None else 2):
            stride = 2 * max(self.strides.values())
            self.strides[f"p{stride.bit_length() - 1}"] = stride

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        maps = list(self.pyramid(x).values())
        _, valid = split_padding(x)
        valid = valid if self.pyramid.hides_padding else None
        if self.convolutions is None:
            maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        else:
            *_, before_last, last = self.strides.values()
            maps.append(without_padding(self.convolutions.p6(maps[-1]), valid, before_last))
            maps.append(without_padding(self.convolutions.p7(F.relu(maps[-1])), valid, last))
        return OrderedDict(zip(self.strides, maps, strict=True))

    def stages(self) -> Iterator[tuple[str, str]]:
        """As the pyramid's."""
        return ((f"pyramid.{name}", place) for name, place in self.pyramid.stages())


def is_stage(child: str) -> bool:
    """Whether a child of timm's feature extractors is a stage: layers_0, stages_3, layer1, blocks_2."""
    return child.rstrip("0123456789").rstrip("_") in ("layers", "stages", "layer", "stage", "blocks", "features", "s")


def block_of(name: str) -> int:
    """Which block of its stage a parameter is in, from 0; what comes before the blocks counts to the first."""
    parts: Sequence[str] = name.split(".")
    return next((int(part) for part in parts if part.isdigit()), 0)


def split_padding(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, 3, H, W) and the pixels that are no padding (B, H, W); None where there is none or nobody says so."""
    if x.shape[1] == 3:
        return x, None
    valid = x[:, 3] > 0.5
    return x[:, :3], None if bool(valid.all()) else valid


def without_padding(x: Tensor, valid: Tensor | None, stride: int) -> Tensor:
    """(B, C, h, w) with zeros where no pixel of the image is; valid: (B, H, W) of pixels."""
    if valid is None:
        return x
    return x.masked_fill(~valid[:, None, ::stride, ::stride], 0.0)
