"""`python -m train.predict CHECKPOINT IMAGE...`: what a trained classifier says about image files."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import v2

from train.data.images import ImageData, image_files, read_image
from train.resize import set_image_size
from train.restore import Restored, restore, to_device
from train.tool import create_parser, parse_size, positive, run_command, run_tool


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
    size = restored.description.height, restored.description.width
    if given.image_size:
        size = parse_size(given.image_size)
        set_image_size(restored.model, *size)
    model, classes = restored.model.to(device), restored.description.classes
    read = reader(restored, *size)

    paths: list[Path] = []
    num_failed = 0
    for path in map(Path, given.images):
        found = [path / name for name in image_files(path)] if path.is_dir() else [path]
        if not found:
            print(f"{path}: no image in this folder", file=sys.stderr)
            num_failed += 1
        paths += found
    for start in range(0, len(paths), given.batch_size):
        inputs: list[tuple[Path, torch.Tensor]] = []
        for path in paths[start : start + given.batch_size]:
            try:
                inputs.append((path, read(path)))
            except ValueError as error:
                print(error, file=sys.stderr)
                num_failed += 1
        if not inputs:
            continue
        with torch.no_grad():
            probabilities = model(torch.stack([image for _, image in inputs]).to(device)).softmax(dim=1).cpu()
        if not probabilities.isfinite().all():
            raise ValueError(f"{restored.checkpoint}: the model's outputs are not finite; its weights are spoilt")
        for (path, _), row in zip(inputs, probabilities, strict=True):
            predictions = top(row, classes, given.top)
            print(as_json(path, predictions) if given.json else as_text(path, predictions))
    return 1 if num_failed else 0


def reader(restored: Restored, height: int, width: int) -> Callable[[Path], torch.Tensor]:
    """From the file of an image to (channels, height, width), as the model was tested.

    Drawn data (digits, scenes) have no files of their own: an image is resized to their size as a whole, and is grey.

    Raises:
        ValueError: the model wants neither grey images nor RGB.
    """
    data, description = restored.config.data, restored.description
    if isinstance(data, ImageData):
        transform = data.model_copy(update={"image_size": (height, width)}).test_transform()
        return lambda path: transform(read_image(path, data.background))
    if description.num_channels not in (1, 3):
        raise ValueError(f"the model wants {description.num_channels} channels, an image has 1 or 3")
    mode = "L" if description.num_channels == 1 else "RGB"

    def read(path: Path) -> torch.Tensor:
        image = read_image(path).convert(mode).resize((width, height), Image.Resampling.BILINEAR)
        pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(image), torch.float32, scale=True)
        return v2.functional.normalize(pixels, list(description.mean), list(description.std))

    return read


def top(probabilities: torch.Tensor, classes: Sequence[str], count: int) -> list[tuple[str, float]]:
    """The most likely classes, the likeliest first; at most as many as there are."""
    best = probabilities.topk(min(count, len(classes)))
    return [(classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def as_json(path: Path, predictions: Sequence[tuple[str, float]]) -> str:
    named: list[dict[str, Any]] = [{"class": name, "probability": p} for name, p in predictions]
    return json.dumps({"path": str(path), "predictions": named})


def as_text(path: Path, predictions: Sequence[tuple[str, float]]) -> str:
    longest = max(len(name) for name, _ in predictions)
    return "\n".join([str(path), *(f"  {name:<{longest}}  {p:6.1%}" for name, p in predictions)])


if __name__ == "__main__":
    run_command(main)
