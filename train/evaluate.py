"""`python -m train.evaluate CHECKPOINT [key=value ...]`: a trained classifier on other data, or at another size."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from relpos2d import Grid, create_encoding
from train.checkpoint import replace_text
from train.config import Config, Encoding, load_config
from train.data.description import Description
from train.data.images import Example, Images
from train.loop import create_accelerator
from train.resize import by, set_image_size
from train.restore import find_checkpoint, restore, without_pretrained
from train.run_folder import CONFIG, METRICS
from train.schema import nearest
from train.tasks.classify import Classify
from train.tool import check_free, create_parser, parse_size, run_command, run_tool, written_aside

SIZE_KEYS = ("image_size", "canvas")  # of data that come in any size
OWN_KEYS = ("image_size", "permute_tokens", "output")
TRAINER_KEYS = tuple(
    f"trainer.{key}" for key in ("batch_size", "num_workers", "num_threads", "device", "mixed_precision")
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser(
        "evaluate",
        "Measures a trained classifier on a test split, and writes nothing unless told to. The run's own config holds; "
        "key=value changes it as in training, except for what would be another model.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="data=image_folder data.path=FOLDER, image_size=48 or 48x64 (what each encoding makes of it is told), "
        "encoding.resize=clamp, trainer.batch_size=8; permute_tokens=true shuffles the patches of each image, a control; "
        "output=FOLDER writes metrics.json and predictions.jsonl",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return run_tool(evaluate, parser.parse_intermixed_args(arguments))


def evaluate(given: argparse.Namespace) -> int:
    overrides, own = take_own(given.overrides)
    permuted = own.get("permute_tokens", "false")
    if permuted not in ("true", "false"):
        raise ValueError(f"permute_tokens = {permuted!r}: must be true or false")
    output = Path(own["output"]) if "output" in own else None
    if output is not None:
        check_free(output, "name another output")

    folder, found = find_checkpoint(Path(given.checkpoint))
    config = changed_config(folder / CONFIG, overrides, own.get("image_size"))
    restored = restore(found, given.weights, config)
    accelerator = create_accelerator(config)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)

    with accelerator.local_main_process_first():  # which may have to fetch the data
        task = Classify(without_pretrained(config))
    images = as_trained(task.images, restored.description)
    policy = set_image_size(restored.model, images.height, images.width)
    if permuted == "true":
        embed: Any = restored.model.patch_embed
        images = replace(images, test=PermutedPatches(images, embed.patch_size))
    task.images, task.classes = images, restored.description.classes
    metrics, records = task.evaluate(restored.model.to(accelerator.device), accelerator)

    if accelerator.is_main_process:
        about = {
            "checkpoint": str(restored.checkpoint),
            "weights": restored.weights,
            "data": config.data.name,
            "image_size": [images.height, images.width],
            "permute_tokens": permuted == "true",
            "resize": policy,
        }
        if output is not None:
            with written_aside(output) as aside:
                aside.mkdir()
                replace_text(aside / task.records_name, "".join(json.dumps(record) + "\n" for record in records))
                replace_text(aside / METRICS, json.dumps({**metrics, **about}, indent=2) + "\n")
        print(json.dumps({**metrics, **about}) if given.json else as_text(metrics, about))
    accelerator.end_training()
    return 0


def take_own(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The overrides of the run's config, and those keys that are ours.

    Raises:
        ValueError: a key that evaluation does not depend on, or ours given twice.
    """
    overrides: list[str] = []
    own: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in own:
            raise ValueError(f"{key}: given twice on the command line")
        if key in OWN_KEYS:
            own[key] = value
        elif key.split(".")[0] in ("data", "encoding") or key in TRAINER_KEYS:
            overrides.append(argument)
        else:
            wanted = nearest(key, [*OWN_KEYS, *TRAINER_KEYS, "data", "encoding"])
            raise ValueError(
                f"{argument!r}: evaluation does not depend on it, or it would be another model; "
                + (f"did you mean {wanted}? " if wanted else "")
                + f"Allowed: data, encoding and their keys, {', '.join((*TRAINER_KEYS, *OWN_KEYS))}"
            )
    return overrides, own


def changed_config(path: Path, overrides: Sequence[str], image_size: str | None) -> Config:
    """The run's config with overrides, for the same model.

    Raises:
        ValueError: the overrides are wrong, want another model, or a size of data that have none.
    """
    trained, config = load_config(str(path)), load_config(str(path), overrides)
    if image_size is not None:
        height, width = parse_size(image_size)
        key = next((key for key in SIZE_KEYS if key in type(config.data).model_fields), None)
        if key is None:
            raise ValueError(f"image_size = {image_size}: {config.data.name} come in one size only")
        value = height if key == "image_size" and height == width else [height, width]
        config = load_config(str(path), [*overrides, f"data.{key}={value}"])
    names, wanted = ([encoding.name for encoding in c.encodings] for c in (trained, config))
    if names != wanted:
        raise ValueError(
            f"encoding = {' + '.join(wanted)}: the model was trained with {' + '.join(names)}, and stays so"
        )
    for before, after in zip(trained.encodings, config.encodings, strict=True):
        check_same_weights(before, after)
    return config


def check_same_weights(trained: Encoding, wanted: Encoding) -> None:
    """Refuses options that make or set weights: those are loaded, so that the options would be ignored.

    Raises:
        ValueError: a newly made encoding has other weights with these options.
    """
    made = []
    for encoding in (trained, wanted):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            spec = {"name": encoding.name, **encoding.given()}
            made.append(create_encoding(spec, num_heads=2, head_dim=32, positions=Grid(3, 5)).state_dict())
    before, after = made
    if before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before):
        options = {key: value for key, value in wanted.given().items() if getattr(trained, key) != value}
        raise ValueError(
            f"encoding {wanted.name} with {options}: belongs to the weights, which are loaded; it cannot be changed any more"
        )


def as_trained(images: Images, description: Description) -> Images:
    """Data as the model knows data: its classes by name, its normalisation.

    Raises:
        ValueError: a class that the model does not know, or another number of channels.
    """
    if images.num_channels != description.num_channels:
        raise ValueError(
            f"the data have {images.num_channels} channels, the model was trained on {description.num_channels}"
        )
    for name in images.classes:
        if name not in description.classes:
            wanted = nearest(name, description.classes)
            raise ValueError(
                f"class {name!r} of the data is not among the classes of training, {', '.join(description.classes)}"
                + (f"; did you mean {wanted}?" if wanted else "")
            )
    labels = [description.classes.index(name) for name in images.classes]
    return replace(images, test=AsTrained(images, labels, description), classes=description.classes)


class AsTrained(Dataset[Example]):
    """The test split with the labels and the normalisation of training."""

    def __init__(self, images: Images, labels: Sequence[int], description: Description):
        self.test, self.labels = images.test, labels
        self.same = (images.mean, images.std) == (description.mean, description.std)
        stats = (images.mean, images.std, description.mean, description.std)
        self.stats = [torch.tensor(values).view(-1, 1, 1) for values in stats]

    def __len__(self) -> int:
        return len(self.test)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Example:
        image, label = self.test[index]
        if not self.same:
            mean, std, wanted_mean, wanted_std = self.stats
            image = (image * std + mean - wanted_mean) / wanted_std
        return image, self.labels[label]


class PermutedPatches(Dataset[Example]):
    """Images cut into the patches of a model and put together in another order, always the same for the same index.

    Raises:
        ValueError: the images cannot be cut so.
    """

    def __init__(self, images: Images, patch_size: tuple[int, int]):
        self.test, self.size, self.patch_size = images.test, (images.height, images.width), patch_size
        if any(side % patch for side, patch in zip(self.size, patch_size, strict=True)):
            raise ValueError(f"permute_tokens: {by(self.size)} pixels cannot be cut into patches of {by(patch_size)}")

    def __len__(self) -> int:
        return len(self.test)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Example:
        image, label = self.test[index]
        patches = F.unfold(image[None], self.patch_size, stride=self.patch_size)  # (1, channels * patch, patches)
        order = torch.from_numpy(np.random.default_rng(index).permutation(patches.shape[-1]))
        return F.fold(patches[..., order], self.size, self.patch_size, stride=self.patch_size)[0], label


def as_text(metrics: dict[str, Any], about: dict[str, Any]) -> str:
    """A line a number, below what it was measured on."""
    order = ", patches in random order" if about["permute_tokens"] else ""
    lines = [
        ("checkpoint", f"{about['checkpoint']} ({'moving average' if about['weights'] == 'ema' else 'weights'})"),
        ("data", f"{about['data']}, {by(about['image_size'])}{order}"),
        *[(key, f"{value:.4f}" if isinstance(value, float) else str(value)) for key, value in metrics.items()],
        *[("resize", text) for text in about["resize"]],
    ]
    longest = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:<{longest}}  {value}" for key, value in lines)


if __name__ == "__main__":
    run_command(main)
