"""`python -m train.predict CHECKPOINT IMAGE...`: what a trained classifier says about image files."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import v2

from train.data.images import image_files, read_image
from train.resize import set_image_size
from train.restore import Description, restore, to_device
from train.tool import create_parser, parse_size, positive, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "predict",
        "Names the most likely classes of images. Those that cannot be read are named on stderr, the others are predicted all "
        "the same, and the exit code is 1.",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="an image file, or a folder of them")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="how many classes to name (default: 5)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON an image")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images at a time (default: 32)")
    parser.add_argument("--image-size", metavar="HxW", help="not the size trained in but another: 224 or 192x256")
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    return run_tool(predict, parser.parse_intermixed_args(arguments))


def predict(given: argparse.Namespace) -> int:
    device = to_device(given.device)
    restored = restore(given.checkpoint, given.weights)
    model, description = restored.model, restored.description
    if given.image_size:
        height, width = parse_size(given.image_size)
        set_image_size(model, height, width)
        description = description.model_copy(update={"height": height, "width": width})
    model.to(device)

    paths, num_failed = [], 0
    for path in map(Path, given.images):
        found = image_files(path) if path.is_dir() else [path]
        if not found:
            print(f"{path}: no image in this folder", file=sys.stderr)
            num_failed += 1
        paths += found
    for start in range(0, len(paths), given.batch_size):
        inputs: dict[Path, torch.Tensor] = {}
        for path in paths[start : start + given.batch_size]:
            try:
                inputs[path] = to_input(read_image(path, description.background), description)
            except ValueError as error:
                print(error, file=sys.stderr)
                num_failed += 1
        if not inputs:
            continue
        with torch.no_grad():
            probabilities = model(torch.stack(list(inputs.values())).to(device)).float().softmax(dim=1).cpu()
        for path, row in zip(inputs, probabilities, strict=True):
            predictions = top(row, description.classes, given.top)
            print(as_json(path, predictions) if given.json else as_text(path, predictions))
    return 1 if num_failed else 0


def to_input(image: Image.Image, description: Description) -> torch.Tensor:
    """(channels, height, width): grey where the model knows no colour, resized as in testing, normalised.

    Raises:
        ValueError: the model wants neither grey images nor RGB.
    """
    if description.num_channels not in (1, 3):
        raise ValueError(f"the model wants {description.num_channels} channels, an image has 1 or 3")
    if description.num_channels == 1:
        image = image.convert("L")
    height, width = description.height, description.width
    if description.crop_fraction is None:
        image = v2.functional.resize(image, [height, width])
    else:
        # the axis that reaches beyond the crop least decides the scale; for a square crop that is the short side
        if image.height * width <= image.width * height:
            resized = round(height / description.crop_fraction)
            sides = [resized, int(resized * image.width / image.height)]
        else:
            resized = round(width / description.crop_fraction)
            sides = [int(resized * image.height / image.width), resized]
        image = v2.functional.center_crop(v2.functional.resize(image, sides), [height, width])
    pixels = v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
    return v2.functional.normalize(pixels, list(description.mean), list(description.std)).as_subclass(torch.Tensor)


def top(probabilities: torch.Tensor, classes: Sequence[str], count: int) -> list[tuple[str, float]]:
    """The most likely classes, the likeliest first; at most as many as there are."""
    best = probabilities.topk(min(count, len(classes)))
    return [(classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def as_json(path: Path, predictions: Sequence[tuple[str, float]]) -> str:
    named: list[dict[str, Any]] = [{"class": name, "probability": p} for name, p in predictions]
    return json.dumps({"path": str(path), "predictions": named}, allow_nan=False)


def as_text(path: Path, predictions: Sequence[tuple[str, float]]) -> str:
    longest = max(len(name) for name, _ in predictions)
    return "\n".join([str(path), *(f"  {name:<{longest}}  {p:6.1%}" for name, p in predictions)])


if __name__ == "__main__":
    sys.exit(main())
