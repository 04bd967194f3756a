"""Images with boxes for tests of detection: rectangles of two colours, as COCO json in a folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"leaf": (40, 200, 60), "wall": (200, 60, 40)}
MODEL = (
    "model={name: retinanet, backbone: {name: relpos2d_swin_tiny_patch4_window7_224, img_size: 64, window_size: 4, "
    "embed_dim: 24, depths: [1, 1], num_heads: [3, 3], drop_path_rate: 0.0}, out_channels: 16, min_size: null}"
)
MASK_MODEL = MODEL.replace("retinanet", "mask_rcnn").replace(
    "out_channels: 16", "out_channels: 16, box_channels: 16, mask_channels: 16, num_proposals: 20"
)
TRAINER = "trainer={max_steps: 4, batch_size: 4, log_every: 1, eval_every: 4, save_every: 2, device: cpu}"


def coco_folder(folder: Path, num_train: int = 8, num_test: int = 5, ids: tuple[Any, Any] = (3, 17)) -> Path:
    """train2017/ and val2017/ of images of several sizes, annotations/ beside them; the last of each split is empty."""
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train2017", num_train), ("val2017", num_test)):
        (folder / split).mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            height, width = ((48, 64), (64, 48), (56, 56))[number % 3]
            pixels = np.full((height, width, 3), 230, dtype=np.uint8)
            for id, colour in zip(ids, COLOURS.values(), strict=True) if number < count - 1 else ():
                w, h = rng.integers(12, 24, size=2).tolist()
                x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
                pixels[y : y + h, x : x + w] = colour
                annotations.append(
                    {
                        "id": 10 * len(annotations) + 1,
                        "image_id": 100 + number,
                        "category_id": id,
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": 0,
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    }
                )
            images.append({"id": 100 + number, "file_name": f"{number}.png", "height": height, "width": width})
            Image.fromarray(pixels).save(folder / split / f"{number}.png")
        categories = [{"id": id, "name": name} for id, name in zip(ids, COLOURS, strict=True)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def command(folder: Path, output: Path, *options: str) -> list[str]:
    return [
        *("detect/digits", "data=coco", f"data.path={folder}", MODEL, TRAINER, "schedule.warmup_steps=1"),
        *(f"output={output}", *options),
    ]
