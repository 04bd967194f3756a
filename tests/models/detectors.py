"""Small detectors and what they look at, for tests of models and of training."""

from typing import Any

import torch
from torch import Tensor

from relpos2d.models.detection import create_detector

SWIN: dict[str, Any] = {
    "name": "relpos2d_swin_tiny_patch4_window7_224",
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [3, 3],
    "drop_path_rate": 0.0,
}
SWINV2 = {**SWIN, "name": "relpos2d_swinv2_tiny_window8_256"}
VIT: dict[str, Any] = {
    "name": "relpos2d_vit_tiny_patch16_224",
    "img_size": 64,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
}
SMALL: dict[str, dict[str, Any]] = {
    "fcos": {"out_channels": 32, "num_head_convs": 1},
    "retinanet": {"out_channels": 16},
    "faster_rcnn": {"out_channels": 16, "box_channels": 16, "num_proposals": 20},
    "mask_rcnn": {"out_channels": 16, "box_channels": 16, "mask_channels": 16, "num_proposals": 20},
}


def detector(name: str, backbone: Any = SWIN, encoding: Any = "table", num_classes: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_detector(name, num_classes, backbone, encoding, **{"min_size": None, **SMALL[name], **options})


def target(boxes: list[list[float]], labels: list[int], size: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Boxes as x1 y1 x2 y2; with a size also masks that fill them."""
    made = {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64)}
    if size is not None:
        masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
            mask[int(y1) : int(y2), int(x1) : int(x2)] = 1
        made["masks"] = masks
    return made
