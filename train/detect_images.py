"""`python -m train.detect_images CHECKPOINT FILE...`: what a trained detector finds in images, as COCO json and pictures."""

import argparse
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from train.data.images import Colour, image_files, read_image
from train.draw_boxes import draw_detections
from train.report import printable
from train.restore import Restored, restore, to_device
from train.tasks.detect import to_results, to_rle
from train.tool import check_free, create_parser, file_names, positive, run_command, run_tool, written_aside

DETECTIONS, IMAGES = "detections.json", "images.json"
SMALLEST_TILE = 32  # pixels
MOST_OVERLAP = 0.9  # of a tile
MERGES = {"greedy_nmm": "GreedyNMMPostprocess", "nms": "NMSPostprocess"}  # by what sahi calls them
DEFAULT_OVERLAP, DEFAULT_MERGE, SAME = 0.2, "greedy_nmm", 0.5

Records = list[dict[str, Any]]
Output = dict[
    str, Tensor
]  # boxes (N, 4) as corners in pixels, labels (N,) from 1, scores (N,); masks (N, 1, height, width) in 0..1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "detect_images",
        f"Finds objects in images. Writes {DETECTIONS} (COCO results), {IMAGES} (COCO's images and categories, which its numbers "
        "mean) and a picture of each image. Files that cannot be read are named on stderr, the others are done all the same, and "
        "the exit code is 1.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="an image, or a folder of them")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new folder to write to")
    parser.add_argument(
        "--threshold", type=share, default=0.5, metavar="SCORE", help="what has a higher score is found (default: 0.5)"
    )
    parser.add_argument(
        "--tile", type=tile_size, metavar="N", help="cut images into tiles of N x N pixels, by the package sahi"
    )
    parser.add_argument(
        "--overlap",
        type=overlap_share,
        metavar="SHARE",
        help=f"of a tile with the next one; at least as large as the objects is best (default: {DEFAULT_OVERLAP})",
    )
    parser.add_argument(
        "--merge",
        choices=tuple(MERGES),
        help="what becomes of boxes that overlap in two tiles: one around both, or the surer one (default: greedy_nmm)",
    )
    parser.add_argument("--no-pictures", action="store_true", help="write the json alone")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="N",
        help="images, or tiles, at a time (default: 1; images of other sizes in a batch may change scores a little)",
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    given = parser.parse_intermixed_args(arguments)
    for option, value in (("--overlap", given.overlap), ("--merge", given.merge)):
        if value is not None and given.tile is None:
            parser.error(f"{option} needs --tile N")
    return run_tool(detect_images, given)


def share(text: str) -> float:
    """A number in 0..1, for argparse."""
    return number_in(text, 1.0)


def overlap_share(text: str) -> float:
    """What two tiles may have in common, for argparse."""
    return number_in(text, MOST_OVERLAP)


def number_in(text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number in 0..{most:g}")
    return number


def tile_size(text: str) -> int:
    """The side of a tile, for argparse."""
    if not text.isdecimal() or int(text) < SMALLEST_TILE:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of pixels, at least {SMALLEST_TILE}")
    return int(text)


@dataclass(frozen=True)
class Tiling:
    """How an image is cut, and its parts are put together. `size` in pixels, `overlap` as a share of it."""

    size: int
    overlap: float
    merge: str


@dataclass(frozen=True)
class Finder:
    """All that turns images into boxes.

    Attributes:
        categories: by label; `names` by category.
        limit: how many objects the model finds in an image at most; None: it does not say.
    """

    model: nn.Module
    checkpoint: Path
    device: torch.device
    categories: dict[int, int | str]
    names: dict[int | str, str]
    background: Colour
    threshold: float
    batch_size: int
    limit: int | None
    tiling: Tiling | None = None


def detect_images(given: argparse.Namespace) -> int:
    check_free(given.output, "give another --output, or remove it")
    tiling = None
    if given.tile is not None:
        import_sahi("slicing")
        overlap = DEFAULT_OVERLAP if given.overlap is None else given.overlap
        tiling = Tiling(given.tile, overlap, given.merge or DEFAULT_MERGE)
    restored = restore(given.checkpoint, given.weights)
    finder = create_finder(restored, to_device(given.device), given.threshold, given.batch_size, tiling)
    paths, num_failed = find_images(given.files)
    names = file_names(paths)

    with written_aside(given.output) as folder:
        folder.mkdir()
        categories = [{"id": category, "name": name} for category, name in finder.names.items()]
        images: Records = []
        results: Records = []
        for start in range(0, len(paths), finder.batch_size):
            readable: dict[int, Image.Image] = {}
            for place in range(start, min(start + finder.batch_size, len(paths))):
                try:
                    readable[place] = read_image(paths[place], finder.background)
                except ValueError as error:
                    print(error, file=sys.stderr)
                    num_failed += 1
            numbers = range(len(images) + 1, len(images) + 1 + len(readable))
            each = find(finder, list(readable.values()), numbers)
            for (place, image), number, found in zip(readable.items(), numbers, each, strict=True):
                width, height = image.size
                images.append({"id": number, "file_name": str(paths[place]), "height": height, "width": width})
                results += found
                say(paths[place], found, finder)
                if not given.no_pictures:
                    picture = folder / f"{names[place]}.png"
                    draw_detections(picture, [np.asarray(image)], [found], {"categories": categories}, [number], 0.0)
        if not images:
            raise ValueError("no image could be read, so nothing is written")
        (folder / DETECTIONS).write_text(json.dumps(results) + "\n")
        read_with = {"info": {}, "images": images, "annotations": [], "categories": categories}
        (folder / IMAGES).write_text(json.dumps(read_with, indent=1) + "\n")
    return 1 if num_failed else 0


def create_finder(
    restored: Restored, device: torch.device, threshold: float, batch_size: int, tiling: Tiling | None
) -> Finder:
    """The trained detector, which finds what has a score above `threshold`.

    Raises:
        ValueError: the model finds no boxes, or its weights are not finite.
    """
    task, model = restored.config.task, restored.model
    if task != "detect":
        tool = "transcribe" if task == "speech_recognition" else "predict"
        raise ValueError(f"{restored.folder} is a run of {task}, which finds no boxes; use python -m train.{tool}")
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError(f"{restored.checkpoint}: holds weights that are not finite; it is spoilt")
    limit = None
    parts: list[Any] = [model, *([model.roi_heads] if hasattr(model, "roi_heads") else [])]  # of one stage and of two
    for part in parts:
        if hasattr(part, "score_thresh"):
            part.score_thresh = threshold
        limit = getattr(part, "detections_per_img", limit)
    about = restored.description
    return Finder(
        model.eval().to(device),
        restored.checkpoint,
        device,
        dict(enumerate(about.category_ids, start=1)),
        dict(zip(about.category_ids, about.classes, strict=True)),
        getattr(restored.config.data, "background", (255, 255, 255)),
        threshold,
        batch_size,
        limit,
        tiling,
    )


def find_images(given: Sequence[str]) -> tuple[list[Path], int]:
    """The files, those of folders in the order of their names, and how many folders have none; these are named on stderr."""
    paths: list[Path] = []
    num_failed = 0
    for path in map(Path, given):
        found = [path / name for name in image_files(path)] if path.is_dir() else [path]
        if not found:
            print(f"{path}: no image in this folder", file=sys.stderr)
            num_failed += 1
        paths += found
    return paths, num_failed


def say(path: Path, found: Records, finder: Finder) -> None:
    """A line: how many there are of each class."""
    counts = Counter(finder.names[result["category_id"]] for result in found)
    told = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing"
    if finder.tiling is None and len(found) == finder.limit:
        told += " (the model finds no more in an image; --tile N does)"
    print(f"{printable(str(path))}: {told}", flush=True)


def find(finder: Finder, images: list[Image.Image], numbers: Sequence[int]) -> list[Records]:
    """COCO results of each image, the highest score first. `numbers` are their ids."""
    if finder.tiling is None:
        outputs = zip(run(finder, images), numbers, strict=True)
        found = [to_results(output, number, finder.categories) for output, number in outputs]
    else:
        found = [in_tiles(finder, image, number) for image, number in zip(images, numbers, strict=True)]
    return [sorted(results, key=lambda result: -result["score"]) for results in found]


def run(finder: Finder, images: Sequence[Image.Image]) -> Iterator[Output]:
    """What the model finds in each image, above the threshold, on the CPU.

    Raises:
        ValueError: the outputs are not finite.
    """
    for start in range(0, len(images), finder.batch_size):
        batch = [
            v2.functional.to_dtype(v2.functional.pil_to_tensor(image), torch.float32, scale=True).to(finder.device)
            for image in images[start : start + finder.batch_size]
        ]
        with torch.no_grad():
            outputs: list[Output] = finder.model(batch)
        for output in outputs:
            if not (output["boxes"].isfinite().all() and output["scores"].isfinite().all()):
                raise ValueError(f"{finder.checkpoint}: the model's outputs are not finite; its weights are spoilt")
            sure = output["scores"] > finder.threshold
            yield {name: value[sure].cpu() for name, value in output.items()}


def in_tiles(finder: Finder, image: Image.Image, number: int) -> Records:
    """COCO results of what is found in the tiles of an image, each object once."""
    tiling = finder.tiling
    assert tiling is not None
    combine, prediction, slicing, cv = map(import_sahi, ("postprocess.combine", "prediction", "slicing", "utils.cv"))
    width, height = image.size
    overlaps = dict.fromkeys(("overlap_height_ratio", "overlap_width_ratio"), tiling.overlap)
    tiles = slicing.get_slice_bboxes(height, width, tiling.size, tiling.size, **overlaps)
    pieces: list[Any] = []
    has_masks = False
    for (left, top, _, _), output in zip(tiles, run(finder, [image.crop(tile) for tile in tiles]), strict=True):
        has_masks = "masks" in output
        for place, box in enumerate(output["boxes"].double().tolist()):
            outlines = None
            if has_masks:  # none of it: the piece counts as a box
                outlines = cv.get_coco_segmentation_from_bool_mask((output["masks"][place, 0] >= 0.5).numpy()) or None
            piece = prediction.ObjectPrediction(
                bbox=box,
                category_id=int(output["labels"][place]),
                score=float(output["scores"][place]),
                segmentation=outlines,
                shift_amount=[left, top],
                full_shape=[height, width],
            )
            pieces.append(piece.get_shifted_object_prediction())
    if len(pieces) > 1:
        merge = getattr(combine, MERGES[tiling.merge])
        pieces = merge(match_threshold=SAME, match_metric="IOS", class_agnostic=False)(pieces)
    output = {
        "boxes": torch.tensor([piece.bbox.to_xyxy() for piece in pieces], dtype=torch.float64).reshape(-1, 4),
        "labels": torch.tensor([piece.category.id for piece in pieces], dtype=torch.int64),
        "scores": torch.tensor([piece.score.value for piece in pieces], dtype=torch.float64),
    }
    results: Records = to_results(output, number, finder.categories)
    for result, piece in zip(results if has_masks else (), pieces, strict=has_masks):
        add_mask(result, np.zeros((height, width), dtype=bool) if piece.mask is None else piece.mask.bool_mask)
    return results


def add_mask(result: dict[str, Any], mask: np.ndarray) -> None:
    """Gives a result its mask (height, width) and, as sahi measures a box from pixel to pixel, the box around it."""
    result["segmentation"] = to_rle(torch.from_numpy(mask.astype(bool)))
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if len(rows):
        x, y = float(columns[0]), float(rows[0])
        result["bbox"] = [x, y, float(columns[-1]) + 1 - x, float(rows[-1]) + 1 - y]


def import_sahi(module: str) -> Any:
    """A module of the package that cuts images into tiles.

    Raises:
        ValueError: it is missing.
    """
    try:
        return importlib.import_module(f"sahi.{module}")
    except ImportError as error:
        raise ValueError(f"--tile needs the package `sahi`: pip install sahi ({error})") from error


if __name__ == "__main__":
    run_command(main)
