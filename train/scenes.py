"""`python -m train.scenes RUN...`: what classifiers of digit scenes make of larger canvases, of patches in another order, of
scenes that move."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from relpos2d.backbones.resize import set_image_size
from train.compare import group_runs, table
from train.config import Config
from train.data.digits import DigitScenes, SceneDataset
from train.data.images import Images
from train.data.stream import evaluation_batches
from train.evaluate import PermutedPatches, changed_config
from train.restore import Restored, find_checkpoint, restore
from train.run_folder import CONFIG
from train.tool import run_command, run_tool

FACTORS = (1.5, 2.0)
SHIFTS = range(1, 9)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.scenes",
        description="Accuracy on test scenes of the canvas of training, of 1.5 and 2 times its sides without retraining (once for "
        "each way to read a table beyond its size), and with the patches of each image in random order; and how "
        "often the prediction stays when the whole scene moves by 1 to 8 pixels, or by one patch.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of digit_scenes runs")
    parser.add_argument("--json", metavar="FILE", help="write a line for each run there, too")
    return run_tool(measure_runs, parser.parse_args(arguments))


def measure_runs(given: argparse.Namespace) -> int:
    groups = group_runs([Path(run) for run in given.runs])
    rows: dict[str, list[dict[str, float]]] = {}
    lines = []
    for name, folders in groups.items():
        for folder in folders:
            numbers = measure(folder)
            rows.setdefault(name, []).append(numbers)
            lines.append(json.dumps({"run": str(folder), "label": name, **numbers}))
    if given.json:
        Path(given.json).write_text("".join(f"{line}\n" for line in lines))
    print(table(rows))
    return 0


def measure(folder: Path) -> dict[str, float]:
    """All numbers of one run.

    Raises:
        ValueError: it was not trained on digit scenes.
    """
    run, found = find_checkpoint(folder)
    restored = restore(found)
    if not isinstance(restored.config.data, DigitScenes):
        raise ValueError(f"{folder}: was trained on {restored.config.data.name}, not on digit_scenes")
    torch.set_num_threads(restored.config.trainer.num_threads or torch.get_num_threads())
    height, width = restored.config.data.canvas
    images = restored.config.data.load(restored.config.seed)
    embed: Any = restored.model.patch_embed
    numbers = {
        f"{height}x{width}": accuracy(restored.model, images),
        "patches permuted": accuracy(restored.model, replace(images, test=PermutedPatches(images, embed.patch_size))),
    }
    numbers |= shift_consistency(restored, images)
    for resize, config in ways_to_resize(run / CONFIG):
        for factor in FACTORS:
            # restored anew: going to a size and back is exact, but this needs no trust in it
            other = restore(found, config=config)
            size = (round(height * factor), round(width * factor))
            set_image_size(other.model, *size)
            larger = DigitScenes.model_validate({**restored.config.data.model_dump(), "canvas": size})
            name = f"{size[0]}x{size[1]}" + (f" {resize}" if resize else "")
            numbers[name] = accuracy(other.model, larger.load(restored.config.seed))
    return numbers


def ways_to_resize(path: Path) -> Iterator[tuple[str, Config]]:
    """The config of a run for each rule by which its tables can be read beyond their size; just itself where there are none."""
    config = changed_config(path, (), {})
    with_tables = [
        number for number, encoding in enumerate(config.encodings) if "resize" in type(encoding).model_fields
    ]
    if not with_tables:
        yield "", config
        return
    for resize in ("timm", "clamp"):
        keys = [f"encoding.{number}" if isinstance(config.encoding, tuple) else "encoding" for number in with_tables]
        yield resize, changed_config(path, [f"{key}.resize={resize}" for key in keys], {})


@torch.no_grad()
def predictions(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part).argmax(dim=1) for part in images.split(64)])


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    right = total = 0
    for _, (batch, labels) in evaluation_batches(images.test, 64, num_workers=0):
        right += int((model(batch).argmax(dim=1) == labels).sum())
        total += len(labels)
    return right / total


def shift_consistency(restored: Restored, images: Images, num_scenes: int = 500) -> dict[str, float]:
    """The share of equal predictions when a scene moves right, down, or both, within a canvas that has room for it.

    The scenes are test scenes of a canvas that is smaller by a patch or more, in the upper left of the one of training. Nothing
    where that canvas would be too small for its digits.
    """
    data, test = restored.config.data, images.test
    assert isinstance(data, DigitScenes)
    assert isinstance(test, SceneDataset)
    embed: Any = restored.model.patch_embed
    patch = max(embed.patch_size)
    height, width = data.canvas
    room = patch * -(-max(SHIFTS) // patch)
    try:
        small = DigitScenes.model_validate({**data.model_dump(), "canvas": (height - room, width - room)})
    except ValidationError:
        return {}
    small_test = small.load(restored.config.seed).test
    background = float(small_test[0][0].min())
    scenes = torch.stack([small_test[index][0] for index in range(min(num_scenes, data.num_test))])

    def moved(down: int, right: int) -> torch.Tensor:
        return F.pad(scenes, (right, room - right, down, room - down), value=background)

    before = predictions(restored.model, moved(0, 0))

    def consistency(shift: int) -> float:
        ways = ((shift, 0), (0, shift), (shift, shift))
        same = [(predictions(restored.model, moved(*way)) == before).float().mean().item() for way in ways]
        return sum(same) / len(same)

    return {
        "same when moved by 1-8 px": sum(map(consistency, SHIFTS)) / len(SHIFTS),
        f"same when moved by {patch} px": consistency(patch),
    }


if __name__ == "__main__":
    run_command(main)
