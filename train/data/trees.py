"""Trees seen from above: aerial photographs of four scenes with a hand-drawn box around each crown, cut into tiles."""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args
from xml.etree import ElementTree

import numpy as np
from PIL import Image
from pydantic import PositiveInt, model_validator

from train.data.boxes import Boxed, DetectionData
from train.data.coco import Place, load_boxed
from train.data.fetch import cached_folder, fetch_trees
from train.data.images import Names, Probability, listed

VERSION = 1  # of how tiles are cut: raise it with any change
Scene = Literal["2019_YELL_2_528000", "2019_YELL_2_541000", "OSBS_029", "SOAP_061"]
SCENES: tuple[Scene, ...] = get_args(Scene)
COUNTS = {  # boxes, width and height of each scene
    "2019_YELL_2_528000": (574, 2299, 2472),
    "2019_YELL_2_541000": (279, 1249, 1035),
    "OSBS_029": (61, 400, 400),
    "SOAP_061": (37, 400, 400),
}
LEAST_SHARE = 0.5  # of a box that lies in a tile, if it is to be found there


class Trees(DetectionData):
    """The scene `train` to train on, the scenes `test` (default: all others) to test on; one class, Tree.

    Each scene is cut into tiles of `tile` x `tile` pixels, one every `stride` pixels from the upper left corner; what is left
    at the right and at the bottom, less than a tile, is not used, and of a scene that is smaller than a tile all is one tile. A
    box is in every tile in which half of its area or more lies, and is cut at the tile's edge. Tiles without a box are left
    out. So 256 and 192 give 148 tiles and 1,303 boxes. Of a tree of which less than half lies in a tile, the part in it is
    marked as a crowd: it is not trained on, and who finds it makes no mistake.

    The images of the test split say in `scene` where they come from. Boxes are taken as they are, x and y from 0.
    """

    name: Literal["trees"]
    train: Scene = SCENES[0]
    test: Names | None = None
    tile: PositiveInt = 256
    stride: PositiveInt = 192
    vertical_flip: Probability = 0.5
    rotate90: Probability = 0.5

    @model_validator(mode="after")
    def scenes_are_apart(self) -> "Trees":
        for scene in self.test or ():
            if scene not in SCENES:
                raise ValueError(
                    f"test = {list(self.test or ())}: there is no scene {scene!r}; allowed: {listed(SCENES)}"
                )
        if self.train in (self.test or ()):
            raise ValueError(f"test = {list(self.test or ())}: {self.train} is trained on")
        if self.stride > self.tile:
            raise ValueError(
                f"stride = {self.stride}: must be at most tile = {self.tile}, or trees between tiles are lost"
            )
        return self

    def load(self, seed: int) -> Boxed:
        test = self.test or [scene for scene in SCENES if scene != self.train]
        return load_boxed(self, self.tiles([self.train]), self.tiles(sorted(test)))

    def tiles(self, scenes: Sequence[str]) -> Place:
        """The folder of the tiles of some scenes and the file of their annotations, cut if they are not in the cache."""
        name = f"trees-{VERSION}-{self.tile}-{self.stride}-{'+'.join(scenes)}"
        folder = cached_folder(name, lambda folder: cut_scenes(fetch_trees(), scenes, self.tile, self.stride, folder))
        return folder, folder / "annotations.json"


def cut_scenes(archive: Path, scenes: Sequence[str], side: int, stride: int, folder: Path) -> None:
    """Writes the tiles of some scenes as PNG files, and annotations.json beside them."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for scene in scenes:
        pixels, boxes = read_scene(archive, scene)
        for y, x, tile, found, cut in tiles_of(pixels, boxes, side, stride):
            image = {"id": len(images) + 1, "file_name": f"{scene}-{y:04}-{x:04}.png", "scene": scene}
            images.append(image | {"height": tile.shape[0], "width": tile.shape[1]})
            Image.fromarray(tile).save(folder / str(image["file_name"]))
            for crowd, kind in enumerate((found, cut)):
                for left, top, right, bottom in kind.tolist():
                    bbox = [left, top, right - left, bottom - top]
                    annotations.append(
                        {
                            "id": len(annotations) + 1,
                            "image_id": image["id"],
                            "category_id": 1,
                            "bbox": bbox,
                            "area": bbox[2] * bbox[3],
                            "iscrowd": crowd,
                        }
                    )
    content = {
        "info": {"description": f"trees of {', '.join(scenes)}: tiles of {side} pixels, one every {stride}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "Tree"}],
    }
    (folder / "annotations.json").write_text(json.dumps(content))


def read_scene(archive: Path, scene: str) -> tuple[np.ndarray, np.ndarray]:
    """The pixels (height, width, 3), and the boxes (trees, 4) as x1, y1, x2, y2.

    Raises:
        ValueError: the scene is not what we counted.
    """
    with tarfile.open(archive) as files:
        image, text = (files.extractfile(f"{scene}{suffix}").read() for suffix in (".png", ".xml"))  # type: ignore[union-attr]
    with Image.open(io.BytesIO(image)) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    boxes = voc_boxes(text)
    found = (len(boxes), pixels.shape[1], pixels.shape[0])
    if found != COUNTS[scene]:
        told = ["{} boxes in {} x {} pixels".format(*counts) for counts in (found, COUNTS[scene])]
        raise ValueError(f"trees: {scene} has {told[0]}, expected {told[1]}: the data changed")
    return pixels, boxes


def voc_boxes(text: bytes) -> np.ndarray:
    """The corners (objects, 4), x1 y1 x2 y2, in an xml file as Pascal VOC has them; whatever their class is."""
    corners = [
        [int(found.findtext(key, "")) for key in ("xmin", "ymin", "xmax", "ymax")]
        for found in ElementTree.fromstring(text).iterfind("object/bndbox")
    ]
    return np.array(corners, dtype=np.int64).reshape(-1, 4)


Tile = tuple[int, int, np.ndarray, np.ndarray, np.ndarray]  # y, x, pixels, boxes, parts of boxes


def tiles_of(pixels: np.ndarray, boxes: np.ndarray, side: int, stride: int) -> Iterator[Tile]:
    """The tiles in which there are boxes; boxes, and parts of those that lie elsewhere, from the tile's corner."""
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    ys, xs = (range(0, max(length - side, 0) + 1, stride) for length in pixels.shape[:2])
    for y, x in product(ys, xs):
        tile = pixels[y : y + side, x : x + side]
        height, width = tile.shape[:2]
        cut = np.clip(boxes - [x, y, x, y], 0, [width, height, width, height])
        inside = (cut[:, 2:] - cut[:, :2]).prod(axis=1)
        found = inside >= LEAST_SHARE * areas
        if found.any():
            yield y, x, tile, cut[found], cut[(inside > 0) & ~found]
