"""`python -m train.predict CHECKPOINT FILE...`: what a trained model says about images, or makes of texts."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms import v2

from relpos2d.backbones.resize import set_image_size
from train import predict_text
from train.data.images import ImageData, image_files, read_image
from train.predict_text import DEFAULT_TOP, as_json, as_text, top
from train.restore import Restored, restore, to_device
from train.tool import create_parser, parse_size, positive, run_command, run_tool

TEXT_TASKS = ("text_classification", "language_modeling", "sequence_to_sequence")
FOR_TASKS = {
    "text": TEXT_TASKS,
    "top": ("classify", "text_classification"),
    "image_size": ("classify",),
    "max_new_tokens": ("language_modeling", "sequence_to_sequence"),
    "num_beams": ("language_modeling", "sequence_to_sequence"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "predict",
        "Names the most likely classes of images or texts; a language model goes on with a text, an encoder-decoder writes the "
        "target. Files that cannot be read are named on stderr, the others are predicted all the same, and the exit code is 1.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="an image or a text, or a folder of them")
    parser.add_argument("--text", action="append", default=[], metavar="TEXT", help="a text itself; may be given again")
    parser.add_argument("--top", type=positive, metavar="N", help="how many classes to name (default: 5)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON an example")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="examples at a time (default: 32)")
    parser.add_argument("--image-size", metavar="HxW", help="not the size trained in but another: 224 or 192x256")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="how much to write at most (default: 64)")
    parser.add_argument(
        "--num-beams", type=positive, metavar="N", help="write by beam search (default: as in training)"
    )
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    parsed = parser.parse_intermixed_args(arguments)
    if not (parsed.files or parsed.text):
        parser.error("nothing to predict: give files, or --text for a model of text")
    return run_tool(predict, parsed)


def predict(given: argparse.Namespace) -> int:
    device = to_device(given.device)
    restored = restore(given.checkpoint, given.weights)
    others = {
        "speech_recognition": "python -m train.transcribe writes what is said",
        "detect": "python -m train.detect_images finds what is in images",
    }
    if (task := restored.config.task) in others:
        raise ValueError(f"{restored.folder} is a run of {task}: {others[task]}")
    check_options(given, restored)
    if restored.is_text:
        return predict_text.predict(given, restored, device)
    return predict_images(given, restored, device)


def check_options(given: argparse.Namespace, restored: Restored) -> None:
    """Refuses options that the model has no use for.

    Raises:
        ValueError: with the tasks that they are for.
    """
    for option, value in vars(given).items():
        if option in FOR_TASKS and value not in (None, []) and restored.config.task not in FOR_TASKS[option]:
            raise ValueError(
                f"--{option.replace('_', '-')} {value}: is for {' and '.join(FOR_TASKS[option])}; "
                f"{restored.folder} is a run of {restored.config.task}"
            )


def predict_images(given: argparse.Namespace, restored: Restored, device: torch.device) -> int:
    size = restored.description.height, restored.description.width
    if given.image_size:
        size = parse_size(given.image_size)
        set_image_size(restored.model, *size)
    model, classes = restored.model.to(device), restored.description.classes
    read = reader(restored, *size)

    paths: list[Path] = []
    num_failed = 0
    for path in map(Path, given.files):
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
            predictions = top(row, classes, given.top or DEFAULT_TOP)
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


if __name__ == "__main__":
    run_command(main)
