"""Small folders of images and COCO json for the tests, right in all that a test does not say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from train.data import Boxed, Coco

Json = dict[str, Any]


def categories(*names: str) -> list[Json]:
    return [{"id": number, "name": name} for number, name in enumerate(names, 1)]


def image(id: Any, height: int = 40, width: int = 60, **more: Any) -> Json:
    return {"id": id, "file_name": f"{id}.png", "height": height, "width": width, **more}


def box(id: Any, image_id: Any, bbox: Any, category_id: Any = 1, **more: Any) -> Json:
    return {"id": id, "image_id": image_id, "category_id": category_id, "bbox": bbox, **more}


def content(images: list[Json], annotations: list[Json], names: list[Json] | None = None) -> Json:
    return {"images": images, "annotations": annotations, "categories": names or categories("cat", "dog")}


def write_split(root: Path, split: str, given: Any, pixels: Callable[[int, int], np.ndarray] | None = None) -> None:
    """Writes SPLIT2017/ID.png for each image that says how large it is, and the json (or a text as it is)."""
    (root / f"{split}2017").mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    for entry in given.get("images", []) if isinstance(given, dict) else []:
        size = (entry.get("height"), entry.get("width"))
        if all(isinstance(side, int) and side > 0 for side in size) and entry["file_name"] == f"{entry['id']}.png":
            drawn = np.full((*size, 3), 90, dtype=np.uint8) if pixels is None else pixels(*size)
            Image.fromarray(drawn).save(root / f"{split}2017" / entry["file_name"])
    text = given if isinstance(given, str) else json.dumps(given)
    (root / "annotations" / f"instances_{split}2017.json").write_text(text)


PLAIN = content([image(7), image(3, 30, 50)], [box(1, 7, [5, 6, 20, 10]), box(2, 3, [0, 0, 50, 30], 2)])


def coco(root: Path, **options: Any) -> Coco:
    return Coco.model_validate_json(json.dumps({"name": "coco", "path": str(root), "horizontal_flip": 0.0, **options}))


def load(root: Path, train: Any = PLAIN, val: Any = PLAIN, **options: Any) -> Boxed:
    """What is read from two such files, as they are written."""
    write_split(root, "train", train)
    write_split(root, "val", val)
    return coco(root, **options).load(seed=0)
